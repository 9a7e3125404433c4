"""A Hugging Face directory as a source."""

from pathlib import Path

from convtools.conversion.megatron_target import SPELLING_FILE
from convtools.conversion.source import Duplicate, LeftOut, Source, account
from convtools.families.registry import Model, find_family
from convtools.stores.encodings import refuse_encodings
from convtools.stores.hf import open_hf


def hf_source(root: Path) -> Source:
    """Open an HF directory; reads config and headers only.

    Raises CheckpointError, AccountingError, ConfigError.
    """
    store = open_hf(root)
    files = (*store.side_files, *store.weight_files, *(name for name, _ in store.unread_files))
    refuse_encodings(store.config, store.tensors, files)
    family = find_family(store.config)
    spec = family.parse(store.config)
    model = Model(family, store.config, spec, family.spelling(spec, store.tensors))
    table = model.table(model.spec.vocab)
    expected = dict(table.hf)
    expected.update({copy.name: table.hf[copy.of] for copy in model.copies()})
    account(expected, {name: t.shape for name, t in store.tensors.items()}, what=str(root))
    return Source(
        format="hf",
        root=root,
        model=model,
        tensors=store.tensors,
        to_hf=None,
        hf=dict(table.hf),
        table=table,
        left_out=(
            *(LeftOut(n, "a note of convtools' own") for n in store.side_files if n == SPELLING_FILE),
            *(LeftOut(name, reason) for name, reason in store.unread_files),
            *(
                LeftOut(f"{name} in {file}", "the index does not assign it there")
                for name, file in store.stray_tensors
            ),
        ),
        notes=model.notes(),
        duplicates=tuple(Duplicate(copy.of, copy.name) for copy in model.copies()),
        side_root=root,
        side_files=tuple(n for n in store.side_files if n != SPELLING_FILE),
        config_bytes=store.config_bytes,
    )
