"""Legacy `torch` checkpoints (`mp_rank_XX/model_optim_rng.pt`) as a source, at any TP/PP/EP and VPP."""

import re
from collections import defaultdict
from itertools import product
from pathlib import Path

from convtools.conversion.megatron_config import hf_side, spelled
from convtools.conversion.source import Duplicate, LeftOut, Padding, Source, account
from convtools.errors import AccountingError, CheckpointError, capped
from convtools.families.rank_tensors import EMBEDDING, Held, Placement
from convtools.families.registry import Model
from convtools.layout.mapping import Mapping
from convtools.layout.parallel import ParallelLayout, Rank
from convtools.layout.piece import Piece
from convtools.layout.region import Region
from convtools.stores.base import StoredTensor
from convtools.stores.megatron_dir import IterationDir
from convtools.stores.torch_legacy import LegacyCheckpoint, open_torch_legacy

EXTRA_STATE = "Transformer Engine's extra state, empty for bf16"
_FINAL_NORMS = ("decoder.final_layernorm.weight", "decoder.final_norm.weight")
_LAYER = re.compile(r"decoder\.layers\.([0-9]{1,6})\.")


def torch_source(where: IterationDir, root: Path, hf_config: Path | None) -> Source:
    """Open one iteration; reads archive headers only. Every replica is compared when the plan runs.

    Raises CheckpointError, AccountingError, ConfigError, UnsafePickle.
    """
    store = open_torch_legacy(where.path)
    names = {
        name: t.shape for chunks in store.ranks.values() for chunk in chunks for name, t in chunk.items()
    }
    side = hf_side(where.path, hf_config, store.args, names)
    spec = side.family.parse(side.config)
    spelling = spelled(side.family.mcore_spelling(spec, names), side.spelling)
    model = Model(side.family, side.config, spec, spelling, side.wrapping)
    layout = _layout(store, spec.num_layers)
    table = model.table(_embedding_rows(store, spec.vocab) * layout.tp)
    table.check()
    place = Placement(table.params.values(), layout, tied=spec.tied)
    expected: dict[str, tuple[int, ...]] = {}
    found: dict[str, tuple[int, ...]] = {}
    tensors: dict[str, StoredTensor] = {}
    pieces: list[Piece] = []
    kept: dict[tuple[str, int], str] = {}
    leaders: dict[str, str] = {}
    duplicates: list[Duplicate] = []
    left_out = [LeftOut(*item) for item in store.left_out]
    padding: list[Padding] = []
    for rank, chunk in product(layout.ranks(), range(layout.vpp)):
        stored, label = _chunk(store, rank, chunk)
        for name, tensor in stored.items():
            if name.endswith("_extra_state"):
                left_out.append(
                    LeftOut(f"{label}/{name}", "Transformer Engine's extra state, empty for bf16")
                )
            else:
                found[f"{label}/{name}"] = tensor.shape
        for held in place.held(rank, chunk):
            name = _stored_name(held, stored)
            key = f"{label}/{name}"
            expected[key] = held.shape
            if name not in stored:
                continue
            tensors[key] = stored[name]
            leader = leaders.setdefault(held.param.name, key)
            if tensors[leader].dtype != stored[name].dtype:
                raise AccountingError(
                    f"the ranks hold `{held.param.name}` in different dtypes",
                    expected=f"one dtype; `{leader}` is {tensors[leader].dtype}",
                    found=f"`{key}` is {stored[name].dtype}",
                    fix="save the checkpoint again from one run, in one dtype a tensor",
                )
            first = kept.setdefault((held.param.name, held.shard), key)
            if first != key:
                duplicates.append(Duplicate(first, key))
                continue
            padding += _padding(key, held)
            pieces += [p.renamed(key, p.b) for p in held.pieces]
    account(expected, found, what=str(where.path))
    shapes = {key: found[key] for key in kept.values()}
    to_params = Mapping(shapes, table.mapping.a, tuple(pieces))
    to_params.check()
    return Source(
        format="torch",
        root=root,
        model=model,
        tensors=tensors,
        to_hf=to_params.compose(table.mapping),
        hf=dict(table.hf),
        table=table,
        left_out=tuple(left_out),
        duplicates=tuple(duplicates),
        padding=tuple(padding),
        side_root=side.root,
        side_files=side.files,
        config_bytes=side.config_bytes,
        notes=(f"config.json: {side.origin}", *model.notes()),
        iteration=where.iteration,
        args=store.args,
        layout=layout,
    )


def _padding(key: str, held: Held) -> list[Padding]:
    """The rows of a rank's embedding or head that lie past the vocabulary."""
    if held.param.vocab is None:
        return []
    rows = held.shape[0]
    first = min(max(held.param.vocab - held.shard * rows, 0), rows)
    return [Padding(key, Region((first, 0), (rows - first, *held.shape[1:])))] if first < rows else []


def _stored_name(held: Held, stored: dict[str, StoredTensor]) -> str:
    names = held.names()
    return next((n for n in names if n in stored), next(iter(names)))


def _chunk(store: LegacyCheckpoint, rank: Rank, chunk: int) -> tuple[dict[str, StoredTensor], str]:
    """One model chunk of a rank, and a label for its tensors."""
    at = rank.tp, rank.pp, rank.ep
    return store.ranks[at][chunk], store.label(at, chunk)


def _layout(store: LegacyCheckpoint, num_layers: int) -> ParallelLayout:
    """The layout as the files show it: virtual stage v is chunk v // pp of pipeline rank v % pp."""
    etp = store.args.get("expert_tensor_parallel_size") or store.tp
    if not isinstance(etp, int) or not 0 < etp <= store.tp * store.ep:
        raise CheckpointError(
            "args give a strange expert_tensor_parallel_size", where=store.root, found=repr(etp)[:60]
        )
    _check_chunks(store)
    virtual = [store.ranks[0, pp, 0][chunk] for chunk in range(store.chunks) for pp in range(store.pp)]
    counts: list[int] = []
    highest: list[str] = []
    for tensors in virtual:
        local = {int(m[1]) for name in tensors if (m := _LAYER.match(name))}
        if max(local, default=-1) >= max(counts, default=0):
            highest = [f"`{n}`" for n in tensors if (m := _LAYER.match(n)) and int(m[1]) == max(local)]
        counts.append(max(local, default=-1) + 1)
    if sum(counts) != num_layers:
        raise AccountingError(
            "the pipeline stages do not add up to the model",
            where=store.root,
            expected=f"{num_layers} layers",
            found=f"{sum(counts)} ({capped(counts, 32)} a stage); the highest: {capped(highest, 4)}",
            fix="the files of a stage are missing, or the config belongs to another model",
        )
    starts = [sum(counts[:v]) for v in range(len(counts))]
    stages = tuple(tuple(range(at, at + n)) for at, n in zip(starts, counts, strict=True))
    mtp, norm = _only(virtual, "mtp."), _only(virtual, *_FINAL_NORMS)
    layout = ParallelLayout(store.tp, store.pp, store.ep, etp, stages, store.chunks, mtp, norm)
    by_name: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    for rank in layout.ranks():
        by_name[rank.tp, rank.pp, rank.ep].add(rank.etp)
    unclear = [k for k, etps in by_name.items() if len(etps) > 1]
    if unclear or {(t, e) for t, _, e in by_name} != {(t, e) for t, _, e in store.ranks}:
        raise CheckpointError(
            f"the files do not fit tp={store.tp} ep={store.ep} etp={etp}",
            where=store.root,
            expected=capped(sorted({f"tp {t} ep {e}" for t, _, e in by_name})),
            found=capped(sorted({f"tp {t} ep {e}" for t, _, e in store.ranks})),
            fix="file names hold no etp: several ranks wrote to one name, or files are missing",
        )
    return layout


def _check_chunks(store: LegacyCheckpoint) -> None:
    """Raise CheckpointError where args and files differ in the number of model chunks."""
    said = store.args.get("virtual_pipeline_model_parallel_size")
    if said not in (None, store.chunks):
        held = "`model`" if store.chunks == 1 else f"`model0` to `model{store.chunks - 1}`"
        raise CheckpointError(
            "args and files differ in the number of virtual pipeline stages",
            where=store.root,
            expected=f"virtual_pipeline_model_parallel_size={said!r}"[:100],
            found=f"{held} in each file",
            fix="the files or their args are of another save",
        )


def _only(virtual: list[dict[str, StoredTensor]], *prefixes: str) -> int | None:
    """The one virtual stage that holds such a tensor; None where none or several do."""
    found = [v for v, tensors in enumerate(virtual) if any(name.startswith(prefixes) for name in tensors)]
    return found[0] if len(found) == 1 else None


def _embedding_rows(store: LegacyCheckpoint, vocab: int) -> int:
    tensor = store.ranks[0, 0, 0][0].get(EMBEDDING)
    if tensor is None or len(tensor.shape) != 2:
        raise AccountingError(
            f"missing: `{EMBEDDING}`", where=store.root, fix="this is no whole language model"
        )
    if tensor.shape[0] * store.tp < vocab:
        raise AccountingError(
            f"`{EMBEDDING}` has fewer rows than the config's vocab_size",
            expected=f"at least {vocab}",
            found=tensor.shape[0] * store.tp,
            fix="pass the --hf-config that belongs to this checkpoint",
        )
    return tensor.shape[0]
