"""Megatron `torch_dist` as a source."""

import re
from pathlib import Path

from convtools.conversion.megatron_config import hf_side, spelled
from convtools.conversion.source import LeftOut, Source, account, vocab_padding
from convtools.errors import AccountingError
from convtools.families.dist_keys import Form, read_forms
from convtools.families.registry import Model
from convtools.families.table import Param, Table
from convtools.layout.mapping import Mapping
from convtools.layout.piece import Piece
from convtools.stores.megatron_dir import IterationDir
from convtools.stores.torch_dist import DistCheckpoint, open_torch_dist

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer[._]")
_STATE = (
    (re.compile(r"(.*\.)?_extra_state(/shard_.*)?"), "Transformer Engine's extra state, empty for bf16"),
    (re.compile(r"rng_state(/.*)?"), "RNG state is not converted"),
    (re.compile(r"common_state(/.*)?"), "training arguments and counters, read for the config"),
    (re.compile(r"rerun_state_machine_state(/.*)?"), "the rerun state machine is not converted"),
    (re.compile(r"(optimizer|opt_param_scheduler|chained_\d+\.).*"), "optimizer state is not converted"),
)
_EMPTY_STATE = 4096
"""A stored empty extra state is smaller than this."""


def torch_dist_source(where: IterationDir, root: Path, hf_config: Path | None) -> Source:
    """Open one iteration; reads metadata and item headers only.

    Raises CheckpointError, AccountingError, ConfigError, UnsafePickle.
    """
    store = open_torch_dist(where.path)
    keys, left_out = model_keys(store)
    side = hf_side(where.path, hf_config, store.args, keys)
    spec = side.family.parse(side.config)
    spelling = spelled(side.family.mcore_spelling(spec, keys), side.spelling)
    model = Model(side.family, side.config, spec, spelling, side.wrapping)
    if EMBEDDING not in keys:
        raise AccountingError(
            f"missing: `{EMBEDDING}`",
            where=where.path,
            fix="this is no whole language model; nothing was written",
        )
    if keys[EMBEDDING][0] < spec.vocab:
        raise AccountingError(
            f"`{EMBEDDING}` has fewer rows than the config's vocab_size",
            expected=f"at least {spec.vocab}",
            found=keys[EMBEDDING][0],
            fix="pass the --hf-config that belongs to this checkpoint",
        )
    if OUTPUT in keys and keys[OUTPUT][:1] != keys[EMBEDDING][:1]:
        raise AccountingError(
            f"`{EMBEDDING}` and `{OUTPUT}` differ in their rows",
            where=where.path,
            found=f"{list(keys[EMBEDDING])} and {list(keys[OUTPUT])}",
            fix="both are padded to one vocabulary: the checkpoint is damaged",
        )
    table = model.table(keys[EMBEDDING][0])
    table.check()
    forms = resolve(table, keys, spec.num_layers)
    expected = {key: shape for form in forms.values() for key, shape in form.shapes.items()}
    account(expected, keys, what=str(where.path))
    pieces: list[Piece] = [p for form in forms.values() for p in form.pieces]
    to_params = Mapping(expected, table.mapping.a, tuple(pieces))
    stacked = [(key, p) for p, form in forms.items() for key in form.shapes]
    return Source(
        format="torch_dist",
        root=root,
        model=model,
        tensors=store.open(list(expected)),
        to_hf=to_params.compose(table.mapping),
        hf=dict(table.hf),
        table=table,
        left_out=tuple(left_out),
        padding=vocab_padding(table, stacked),
        side_root=side.root,
        side_files=side.files,
        config_bytes=side.config_bytes,
        notes=(f"config.json: {side.origin}", *model.notes()),
        iteration=where.iteration,
        args=store.args,
    )


def resolve(table: Table, keys: dict[str, tuple[int, ...]], num_layers: int) -> dict[str, Form]:
    """The form in which the store holds each parameter: the first whose keys are all there.

    A parameter that no form finds keeps its usual form, so that accounting names its keys as
    missing. Raises AccountingError where a parameter is stored twice under two names.
    """
    out: dict[str, Form] = {}
    for name, param in table.params.items():
        found = None
        for form in read_forms(param, num_layers):
            if all(key in keys for key in form.shapes):
                found = form
                break
        out[name] = found or _partial(param, keys, num_layers)
    return out


def _partial(param: Param, keys: dict[str, tuple[int, ...]], num_layers: int) -> Form:
    """The form with the most keys present, the usual one where none has any."""
    return max(read_forms(param, num_layers), key=lambda form: sum(key in keys for key in form.shapes))


def model_keys(store: DistCheckpoint) -> tuple[dict[str, tuple[int, ...]], list[LeftOut]]:
    """(shape of every model tensor, what is left out and why). Raises AccountingError for unknown objects."""
    left_out: list[LeftOut] = []
    keys: dict[str, tuple[int, ...]] = {}
    for name, tensor in store.tensors.items():
        if _OPTIMIZER.match(name):
            left_out.append(LeftOut(name, "optimizer state is not converted"))
        else:
            keys[name] = tensor.shape
    strange: list[str] = []
    for name, nbytes in store.objects.items():
        reason = next((why for pattern, why in _STATE if pattern.fullmatch(name)), None)
        if reason is None:
            strange.append(name)
        elif "_extra_state" in name and nbytes > _EMPTY_STATE:
            left_out.append(
                LeftOut(name, f"Transformer Engine's extra state, {nbytes} bytes: FP8 scaling history")
            )
        else:
            left_out.append(LeftOut(name, reason))
    if strange:
        raise AccountingError(
            f"not in this model: the stored object `{strange[0]}`"
            + (f" and {len(strange) - 1} more" if strange[1:] else ""),
            fix="convtools knows no reason to leave it out; nothing was written",
        )
    return keys, left_out
