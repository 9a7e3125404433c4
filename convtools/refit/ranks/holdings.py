"""What each rank holds, as it tells the others, once: names, dtypes, shapes and regions, never bytes.

The holdings of all ranks make a source like a checkpoint in many files: every tensor is blobs, each a
region that lies in some rank's tensor. So what reads checkpoints plans this too.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from convtools.conversion.source import Source
from convtools.equality.canonical import Loose
from convtools.equality.live import LiveBytes, Shards, dtype_of, shards_source
from convtools.equality.reading import MEMORY
from convtools.errors import UsageError, capped, tick
from convtools.layout.parallel import ParallelLayout, Rank
from convtools.layout.region import Region
from convtools.refit.errors import FrameError, RefitError
from convtools.refit.protocol import MAX_TENSORS, Count, Name
from convtools.refit.ranks.collector import collector_paused
from convtools.refit.ranks.covering import fault_of
from convtools.refit.ranks.cut_tensor import CutTensor
from convtools.refit.ranks.placement import dtensor_region
from convtools.stores.base import DTYPE_NBYTES, FROM_TORCH, TORCH_DTYPE, Blob, StoredTensor

RANK = f"{MEMORY}rank"
"""Paths of tensors in other processes begin with it."""
Named = Mapping[str, Any]


_Corner = tuple[tuple[int, ...], tuple[int, ...]]


class HeldRow(Struct, array_like=True, frozen=True):
    """A tensor that a rank holds, or its part of one."""

    name: Name
    dtype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]
    """Of the whole; under Megatron's names: of what the rank holds."""
    offsets: Annotated[tuple[Count, ...], Meta(max_length=16)] = ()
    sizes: Annotated[tuple[Count, ...], Meta(max_length=16)] = ()
    """Its region of the whole; none under Megatron's names."""
    chunk: Count = 0
    """Model chunk, where a pipeline rank has several."""


class Holdings(Struct, frozen=True, forbid_unknown_fields=True):
    """All that a rank holds."""

    rows: Annotated[list[HeldRow], Meta(max_length=MAX_TENSORS)]
    place: tuple[int, int, int, int] | None = None
    """(tp, pp, ep, etp) under Megatron's names; None under Hugging Face names."""
    layout: Annotated[bytes, Meta(max_length=1 << 20)] = b""
    config: Annotated[bytes, Meta(max_length=1 << 22)] = b""


@dataclass(frozen=True, slots=True)
class MegatronPlace:
    """Where in a Megatron job this process stands."""

    layout: ParallelLayout
    rank: Rank
    config: Mapping[str, Any]
    """The model's config.json."""


class Replicas(NamedTuple):
    """Tensors that must be the same bytes."""

    name: str
    held: tuple[tuple[int, int], ...]
    """(rank, place among the rows of that rank); the first is the one that is sent."""


@dataclass(frozen=True)
class Merged:
    """All ranks' holdings as one source."""

    source: "Source | Loose"
    replicas: tuple[Replicas, ...]
    holders: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """Path of a blob -> (rank, place among its rows)."""


def rank_path(rank: int, index: int) -> Path:
    """Names the memory of one tensor of one rank."""
    return Path(f"{RANK}{rank}/{index}")


def hf_holdings(named: Named) -> Holdings:
    """DTensors, CutTensors and plain tensors (the same on all ranks), by Hugging Face names.

    Raises UsageError.
    """
    rows = []
    for name, tensor in named.items():
        dtype, shape = dtype_of(name, tensor), tuple(int(n) for n in tensor.shape)
        if isinstance(tensor, CutTensor):
            region = tensor.region
        else:
            region = dtensor_region(name, tensor) if hasattr(tensor, "placements") else Region.whole(shape)
        rows.append(HeldRow(name, dtype, shape, region.offsets, region.sizes))
    return Holdings(rows)


def cut_holdings(cuts: Mapping[str, tuple[str, tuple[int, ...], Region]]) -> Holdings:
    """Parts of tensors under Hugging Face names: name -> (dtype, shape of the whole, region held here)."""
    return Holdings([HeldRow(n, dtype, shape, r.offsets, r.sizes) for n, (dtype, shape, r) in cuts.items()])


def megatron_holdings(chunks: Sequence[Named], place: MegatronPlace) -> Holdings:
    """A rank's tensors under Megatron's names, its model chunks in order. Raises UsageError."""
    if len(chunks) != place.layout.vpp:
        raise UsageError(
            "not the model chunks of the layout", expected=f"vpp={place.layout.vpp}", found=len(chunks)
        )
    rows = [
        HeldRow(name, dtype_of(name, t), tuple(int(n) for n in t.shape), chunk=chunk)
        for chunk, named in enumerate(chunks)
        for name, t in named.items()
        if not name.endswith("_extra_state")
    ]
    layout = json.dumps(msgspec.to_builtins(place.layout), sort_keys=True).encode()
    config = json.dumps(dict(place.config), sort_keys=True).encode()
    tp, pp, ep, etp = place.rank
    return Holdings(rows, (tp, pp, ep, etp), layout, config)


def encode_holdings(holdings: Holdings) -> bytes:
    """As msgpack."""
    return msgspec.msgpack.encode(holdings)


def decode_holdings(data: bytes) -> Holdings:
    """What a rank says that it holds. Raises FrameError."""
    try:
        found = msgspec.msgpack.decode(data, type=Holdings)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FrameError("what a rank holds is not of the schema", found=str(error)[:200]) from None
    seen: set[tuple[int, str]] = set()
    for row in found.rows:
        if row.dtype not in DTYPE_NBYTES:
            raise FrameError(f"{tick(row.name)} is of a dtype that is not known", found=row.dtype)
        if (row.chunk, row.name) in seen:
            raise FrameError(f"{tick(row.name)} is there twice")
        seen.add((row.chunk, row.name))
        if found.place is None and not len(row.shape) == len(row.offsets) == len(row.sizes):
            raise FrameError(f"{tick(row.name)} has a region of other dims than its own")
    return found


def merge(holdings: Sequence[Holdings]) -> Merged:
    """The holdings of ranks 0, 1, ... as one source; every element has one holder that sends it.

    Raises RefitError, UsageError, and what a Megatron job's shards may raise, naming the tensor.
    """
    kinds = {h.place is None for h in holdings}
    if len(kinds) != 1:
        raise UsageError("some ranks hold Hugging Face names, others Megatron's")
    with collector_paused():
        return _merge_hf(holdings) if kinds == {True} else _merge_megatron(holdings)


def _merge_hf(holdings: Sequence[Holdings]) -> Merged:
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    held: dict[str, dict[_Corner, list[tuple[int, int]]]] = {}
    problems: list[str] = []
    for rank, held_there in enumerate(holdings):
        for index, row in enumerate(held_there.rows):
            kind, corner = (row.dtype, row.shape), (row.offsets, row.sizes)
            if kinds.setdefault(row.name, kind) != kind:
                was = kinds[row.name]
                problems.append(f"{tick(row.name)} is {kind} on rank {rank}, {was} before")
                continue
            regions = held.setdefault(row.name, {})
            if corner in regions:
                regions[corner].append((rank, index))
            elif not Region(*corner).within(row.shape):
                problems.append(f"{tick(row.name)}: rank {rank} holds {Region(*corner)}, which lies outside")
            elif all(row.sizes) or not all(row.shape):
                regions[corner] = [(rank, index)]
    tensors: dict[str, StoredTensor] = {}
    replicas: list[Replicas] = []
    holders: dict[Path, tuple[int, int]] = {}
    for name, regions in held.items():
        dtype, shape = kinds[name]
        if fault := fault_of(shape, [Region(*corner) for corner in regions]):
            problems.append(f"{tick(name)}: element {list(fault.index)} lies in {len(fault.holders)} parts")
            continue
        blobs = []
        for corner, ranks in regions.items():
            path, region = rank_path(*ranks[0]), Region(*corner)
            holders[path] = ranks[0]
            blobs.append(Blob(path, 0, region))
            if len(ranks) > 1 and region.numel:
                replicas.append(Replicas(name, tuple(ranks)))
        tensors[name] = StoredTensor(name, dtype, shape, tuple(blobs))
    if problems:
        raise RefitError("the ranks do not hold every element once", found=capped(problems))
    return Merged(Loose(tensors, {n: t.shape for n, t in tensors.items()}), tuple(replicas), holders)


class _Remote(NamedTuple):
    """Stands for a tensor of another process."""

    dtype: str
    shape: tuple[int, ...]
    at: tuple[int, int]


class _RemoteBytes(LiveBytes):
    """Remembers who holds what, in place of the bytes."""

    def store(self, name: str, tensor: Any) -> StoredTensor:
        """As a blob of that rank."""
        path = rank_path(*tensor.at)
        return StoredTensor(
            name, FROM_TORCH[tensor.dtype], tensor.shape, (Blob(path, 0, Region.whole(tensor.shape)),)
        )


def _merge_megatron(holdings: Sequence[Holdings]) -> Merged:
    for what in ("layout", "config"):
        if len({getattr(h, what) for h in holdings}) != 1:
            raise UsageError(f"the ranks give different {what}s", fix="give every rank the same")
    layout = layout_of(holdings[0])
    ranks: dict[tuple[int, int, int, int], list[dict[str, _Remote]]] = {}
    twins: dict[tuple[tuple[int, int, int, int], int, str], list[tuple[int, int]]] = {}
    for r, h in enumerate(holdings):
        assert h.place is not None
        first = h.place not in ranks
        chunks = ranks.setdefault(h.place, [{} for _ in range(layout.vpp)])
        for i, row in enumerate(h.rows):
            if row.chunk >= layout.vpp:
                raise UsageError(f"{tick(row.name)} is of chunk {row.chunk}, but vpp={layout.vpp}")
            twins.setdefault((h.place, row.chunk, row.name), []).append((r, i))
            if first:
                chunks[row.chunk][row.name] = _Remote(TORCH_DTYPE[row.dtype], row.shape, (r, i))
        if not first:  # a data-parallel copy
            theirs = {(row.chunk, row.name): (TORCH_DTYPE[row.dtype], row.shape) for row in h.rows}
            ours = {(c, n): (t.dtype, t.shape) for c, named in enumerate(chunks) for n, t in named.items()}
            if theirs != ours:
                names = {n for _, n in dict(theirs.items() ^ ours.items())}
                raise RefitError(
                    f"rank {r} holds other tensors than its data-parallel peer",
                    found=capped(map(tick, sorted(names))),
                )
    shards = Shards(ranks, layout, config_of(holdings[0]))
    source = shards_source(shards, _RemoteBytes())
    holders = {
        rank_path(*at): at
        for chunks in ranks.values()
        for named in chunks
        for at in (t.at for t in named.values())
    }
    groups = {at[0]: list(at) for at in twins.values()}
    for pair in source.duplicates:
        kept, repeated = (holders[source.tensors[n].blobs[0].path] for n in (pair.kept, pair.repeated))
        groups[kept] = groups[kept] + groups.pop(repeated)
    replicas = tuple(
        Replicas(holdings[r].rows[i].name, tuple(group)) for (r, i), group in groups.items() if len(group) > 1
    )
    mixed = [g.name for g in replicas if len({holdings[r].rows[i].dtype for r, i in g.held}) > 1]
    if mixed:
        raise RefitError("ranks hold one tensor in different dtypes", found=capped(map(tick, mixed)))
    return Merged(source, replicas, holders)


def config_of(holdings: Holdings) -> dict[str, Any]:
    """The config that a rank gives. Raises FrameError."""
    try:
        found = json.loads(holdings.config)
    except (ValueError, RecursionError) as error:
        raise FrameError("a rank's config is no JSON", found=str(error)[:200]) from None
    if not isinstance(found, dict):
        raise FrameError("a rank's config is no JSON object", found=type(found).__name__)
    return found


def layout_of(holdings: Holdings) -> ParallelLayout:
    """The layout that a rank gives. Raises FrameError."""
    try:
        layout = msgspec.json.decode(holdings.layout, type=ParallelLayout)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError("a rank's layout is not of the schema", found=str(error)[:200]) from None
    if len(layout.stages) != layout.pp * layout.vpp:  # before anything is made for so many chunks
        raise FrameError("a rank's layout has other stages", found=f"pp={layout.pp}, vpp={layout.vpp}")
    return layout
