"""A Hugging Face directory as a source."""

from collections.abc import Iterable
from pathlib import Path

from convtools.conversion.megatron_target import SPELLING_FILE
from convtools.conversion.source import Duplicate, LeftOut, Source, account
from convtools.families.config import Config
from convtools.families.registry import Model, language_model
from convtools.families.wrapping import find_wrapping, group_outside
from convtools.manifest import MANIFEST_NAME
from convtools.stores.encodings import refuse_encodings
from convtools.stores.hf import open_hf

OWN_FILES = {
    SPELLING_FILE: "a note of convtools' own",
    MANIFEST_NAME: "the source's own manifest: another checkpoint needs its own",
}
"""Side files that speak of the source alone, and why they stay behind."""
_PASSED = "passed through unchanged: outside the language model"


def hf_source(root: Path) -> Source:
    """Open an HF directory; reads config and headers only.

    Raises CheckpointError, AccountingError, ConfigError.
    """
    store = open_hf(root)
    files = (*store.side_files, *store.weight_files, *(name for name, _ in store.unread_files))
    refuse_encodings(store.config, store.tensors, files)
    model, outside = model_of(store.config, store.tensors)
    table = model.table(model.spec.vocab)
    expected = dict(table.hf)
    expected.update({copy.name: table.hf[copy.of] for copy in model.copies()})
    passed = set(outside)
    account(expected, {n: t.shape for n, t in store.tensors.items() if n not in passed}, what=str(root))
    return Source(
        format="hf",
        root=root,
        model=model,
        tensors=store.tensors,
        to_hf=None,
        hf=dict(table.hf) | {name: store.tensors[name].shape for name in outside},
        table=table,
        left_out=(
            *(LeftOut(n, OWN_FILES[n]) for n in store.side_files if n in OWN_FILES),
            *(LeftOut(name, reason) for name, reason in store.unread_files),
            *(
                LeftOut(f"{name} in {file}", "the index does not assign it there")
                for name, file in store.stray_tensors
            ),
        ),
        notes=(*model.notes(), *(f"{group} {_PASSED}" for group in group_outside(outside))),
        outside=outside,
        duplicates=tuple(Duplicate(copy.of, copy.name) for copy in model.copies()),
        side_root=root,
        side_files=tuple(n for n in store.side_files if n not in OWN_FILES),
        config_bytes=store.config_bytes,
    )


def model_of(config: Config, hf_names: Iterable[str]) -> tuple[Model, tuple[str, ...]]:
    """(the language model of a config and these names, the names that lie outside of it).

    Raises ConfigError, AccountingError.
    """
    hf_names = list(hf_names)
    found = language_model(config)
    wrapping = find_wrapping(config, found.section, hf_names)
    found = found.wrapped(wrapping)
    spec = found.parse()
    nested = found.section is not None  # only then may there be anything else
    outside = {name: None for name in hf_names if nested and wrapping.outside(name)}
    names = [own for n in hf_names if n not in outside and (own := wrapping.inner(n)) is not None]
    spelling = found.family.spelling(spec, names)
    return Model(found.family, found.config, spec, spelling, wrapping), tuple(outside)
