"""From shards to shards: which rank of the trainer sends which bytes to which rank of the engine.

Both ends derive it from what all ranks said that they hold, and compare its digest. A target's bucket is
made of its own tensors, as it holds them; no tensor is whole anywhere unless a rank holds it whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from convtools.conversion.from_hf import model_of
from convtools.conversion.megatron_target import vocab_fills
from convtools.conversion.plan import Resolver, Target
from convtools.conversion.source import Source, Stored, account
from convtools.conversion.to_torch import local_fill
from convtools.equality.canonical import open_side
from convtools.errors import UsageError, capped, tick
from convtools.families.rank_tensors import EMBEDDING, OUTPUT, Held, Placement
from convtools.families.registry import Model
from convtools.families.table import Table
from convtools.layout.mapping import Mapping
from convtools.layout.parallel import Rank
from convtools.layout.piece import Piece, block
from convtools.layout.region import Region
from convtools.refit.plan import RefitPlan, Tensor, make_plan
from convtools.refit.ranks.collector import collector_paused
from convtools.refit.ranks.holdings import HeldRow, Holdings, Merged, config_of, layout_of, merge
from convtools.refit.ranks.legs import Legs


@dataclass(frozen=True)
class ShardPlan:
    """One engine rank's part."""

    plan: RefitPlan
    """Its own tensors in buckets."""
    legs: Legs
    """Who sends what of each."""
    holes: bool
    """Whether some rows come from nobody: vocabulary padding, which is zero."""


def shard_plans(
    merged: Merged,
    targets: Sequence[Holdings],
    bucket_bytes: int,
    *,
    target: int | None = None,
    sender: int | None = None,
) -> list[ShardPlan]:
    """The plan of every target, or of the one at place `target`; all of it, or what rank `sender` sends.

    Raises UsageError, RefitError, AccountingError, ParallelError, naming the tensor: the targets do not
    take all there is, or something that there is not.
    """
    if not targets:
        raise UsageError("no rank of an engine is in the group")
    hf = _hf_shapes(merged)
    whole = merge(targets)
    if not isinstance(whole.source, Source):
        theirs = whole.source.hf
        problems = [tick(n) for n in hf.keys() ^ theirs.keys()]
        problems += [
            f"{tick(n)} is {list(theirs[n])} there, {list(hf[n])} here"
            for n in hf.keys() & theirs.keys()
            if tuple(hf[n]) != theirs[n]
        ]
        if problems:
            raise UsageError("the engine's tensors are not the trainer's", found=capped(sorted(problems)))
    chosen = targets if target is None else [targets[target]]
    with collector_paused():
        side = Resolver(_stored(merged), Target("hf", (), None, {}))
        held = None if sender is None else _held_by(merged, sender)
        out = []
        for one in chosen:
            plan, described = _described(merged, hf, one, targets, bucket_bytes)
            names = None if held is None else _made_of(described, held)
            legs = Legs(plan, Resolver(_stored(merged), described, side), merged.holders, sender, names)
            out.append(ShardPlan(plan, legs, bool(described.fills)))
        return out


def _stored(merged: Merged) -> Stored:
    source: Any = merged.source  # loose tensors have no table, and are asked for none
    stored: Stored = source
    return stored


def _held_by(merged: Merged, rank: int) -> frozenset[str]:
    """The Hugging Face tensors of which a rank sends a part."""
    mine = {
        name
        for name, tensor in merged.source.tensors.items()
        if any(merged.holders[blob.path][0] == rank for blob in tensor.blobs)
    }
    if not isinstance(merged.source, Source) or merged.source.to_hf is None:
        return frozenset(mine)
    return frozenset(piece.b for piece in merged.source.to_hf.pieces if piece.a in mine)


def _made_of(described: Target, held: frozenset[str]) -> frozenset[str]:
    assert described.to_hf is not None
    return frozenset(piece.a for piece in described.to_hf.pieces if piece.b in held)


def _hf_shapes(merged: Merged) -> dict[str, tuple[int, ...]]:
    source = merged.source
    return dict(open_side(source).hf) if isinstance(source, Source) else dict(source.hf)


def _described(
    merged: Merged,
    hf: dict[str, tuple[int, ...]],
    target: Holdings,
    targets: Sequence[Holdings],
    bucket_bytes: int,
) -> tuple[RefitPlan, Target]:
    """A target's own tensors in buckets, and what they are made of."""
    if target.place is None:
        tensors = [Tensor(row.name, row.dtype, row.sizes) for row in target.rows]
        pieces = tuple(
            block(row.name, row.name, Region(row.offsets, row.sizes))
            for row in target.rows
            if Region(row.offsets, row.sizes).numel
        )
        to_hf = Mapping({t.name: t.shape for t in tensors}, hf, pieces)
        described = Target("hf", (), to_hf, {})
    else:
        tensors = [Tensor(row.name, row.dtype, row.shape) for row in target.rows]
        described = _megatron_target(merged, target, targets)
    return make_plan(tensors, bucket_bytes), described


def _megatron_target(merged: Merged, target: Holdings, targets: Sequence[Holdings]) -> Target:
    assert target.place is not None
    layout, config = layout_of(target), config_of(target)
    if layout.vpp > 1:
        raise UsageError("an engine has one model chunk a rank", found=f"vpp={layout.vpp}")
    rows: dict[str, HeldRow] = {row.name: row for row in target.rows}
    model: Model = (
        merged.source.model if isinstance(merged.source, Source) else model_of(config, merged.source.hf)[0]
    )
    table = model.table(_padded(targets, layout.tp))
    table.check()
    place = Placement(table.params.values(), layout, tied=model.spec.tied)
    held = {_name(part, rows): part for part in place.held(Rank(*target.place))}
    shapes = {name: part.shape for name, part in held.items()}
    account(shapes, {name: row.shape for name, row in rows.items()}, what=f"engine rank {target.place}")
    fills, local = vocab_fills(table), {}
    pieces: list[Piece] = []
    for name, part in held.items():
        pieces += [p.renamed(name, p.b) for p in part.pieces]
        fill = fills.get(part.param.name)
        if fill and (here := local_fill(fill, part.shard, part.shape)):
            local[name] = here
    to_hf = Mapping(shapes, table.mapping.a, tuple(pieces)).compose(table.mapping)
    return Target(_format(merged, table), (), to_hf, {}, fills=local)


def _format(merged: Merged, table: Table) -> str:
    """Loose tensors have no table to say what Megatron shifts: where it shifts nothing, none is needed."""
    if isinstance(merged.source, Source):
        return "torch"
    if shifted := [p.name for p in table.params.values() if p.shift]:
        raise UsageError(
            "Megatron centres these norms on zero, and the trainer holds Hugging Face names",
            found=capped(map(tick, shifted)), fix="push whole tensors, with WeightSync",
        )  # fmt: skip
    return "hf"


def _padded(targets: Sequence[Holdings], tp: int) -> int:
    """Rows of embedding and head over all ranks of the engine."""
    for row in (row for target in targets for row in target.rows):
        if row.name in (EMBEDDING, OUTPUT) and row.shape:
            return row.shape[0] * tp
    raise UsageError(f"no rank of the engine holds {tick(EMBEDDING)}")


def _name(part: Held, rows: dict[str, HeldRow]) -> str:
    return next((n for n in part.names() if n in rows), next(iter(part.names())))
