"""A live Megatron rank's tensors, filled straight from a checkpoint: each rank reads its own bytes."""

import os
from collections.abc import Callable, Mapping as MappingABC
from dataclasses import dataclass
from math import prod
from typing import Any

from convtools.codecs.cast import FLOATS, cast as cast_bytes
from convtools.conversion.api import open_source
from convtools.conversion.exactness import check_shifts
from convtools.conversion.megatron_target import param_dtypes, vocab_fills
from convtools.conversion.plan import Resolver, Target
from convtools.conversion.source import Source, account
from convtools.conversion.to_torch import local_fill
from convtools.equality.live import dtype_of, named_tensors
from convtools.errors import AccountingError, ParallelError, UsageError, together
from convtools.families.blocks.embedding import padded_vocab_size
from convtools.families.rank_tensors import EMBEDDING, OUTPUT, Held, Placement
from convtools.layout.mapping import Mapping
from convtools.layout.parallel import ParallelLayout, Rank
from convtools.layout.piece import Piece
from convtools.layout.plan import slabs
from convtools.layout.region import Region
from convtools.stores.base import DTYPE_NBYTES, Payload
from convtools.stores.move import SLAB, Mover

Write = Callable[[int, memoryview], None]
"""Puts bytes at a byte offset of a live tensor."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was loaded."""

    tensors: int
    nbytes: int
    """Bytes written to the rank's tensors."""
    cast: tuple[str, ...]
    """Tensors whose dtype is not the checkpoint's; only with `cast=True`."""
    left_out: tuple[str, ...]
    """Names of extra states, which hold no weights."""


def load_into(
    tensors: Any,
    store: str | os.PathLike[str] | Source,
    layout: ParallelLayout,
    rank: Rank | tuple[int, int, int, int],
    *,
    chunk: int = 0,
    cast: bool = False,
    allow_inexact: bool = False,
    iteration: int | str | None = None,
    hf_config: str | os.PathLike[str] | None = None,
) -> LoadReport:
    """Fill one rank's tensors (tp, pp, ep, etp) from a checkpoint of any format.

    `tensors`: a module, or name -> torch tensor or numpy array, under Megatron's names in memory, each
    contiguous and of the rank's shape. All of them are held against the model before the first byte is
    written: a tensor that is missing, left over, or of another shape or dtype raises AccountingError,
    ParallelError where the layout does not divide the model. `cast` converts dtypes, `allow_inexact`
    rounds norms that only Megatron centres on zero. Rows of vocabulary padding become zero.
    """
    named = named_tensors(tensors)
    if named is None:
        raise UsageError("load_into takes a module or named tensors", found=type(tensors).__name__)
    source = (
        store if isinstance(store, Source) else open_source(store, iteration=iteration, hf_config=hf_config)
    )
    for axis, at in zip(Rank._fields, rank, strict=True):
        if not 0 <= at < getattr(layout, axis):
            raise ParallelError(f"{axis}={at} is no rank", expected=f"0 to {getattr(layout, axis) - 1}")
    extra = tuple(name for name in named if name.endswith("_extra_state"))
    live = {name: tensor for name, tensor in named.items() if name not in set(extra)}
    table = source.model.table(_padded(live, source, layout))
    table.check()
    place = Placement(table.params.values(), layout, tied=source.model.spec.tied)
    held = _named(place.held(Rank(*rank), chunk), live)
    account(
        {name: part.shape for name, part in held.items()},
        {name: tuple(int(n) for n in tensor.shape) for name, tensor in live.items()},
        what=f"rank {tuple(rank)}",
    )
    dtypes = source.dtypes()
    wanted = param_dtypes(table, dtypes)
    casts = _casts(held, live, wanted, cast=cast)
    fills = vocab_fills(table)
    pieces: list[Piece] = []
    local: dict[str, Region] = {}
    for name, part in held.items():
        pieces += [p.renamed(name, p.b) for p in part.pieces]
        fill = fills.get(part.param.name)
        here = local_fill(fill, part.shard, part.shape) if fill else None
        if here:
            local[name] = here
    shapes = {name: part.shape for name, part in held.items()}
    to_params = Mapping(shapes, table.mapping.a, tuple(pieces))
    target = Target("torch", (), to_params.compose(table.mapping), dtypes, fills=local)
    check_shifts(source, target, allow_inexact=allow_inexact)
    writers = {name: writer(name, tensor) for name, tensor in live.items()}
    nbytes = _fill(Resolver(source, target), shapes, {n: dtype_of(n, live[n]) for n in shapes}, writers)
    return LoadReport(len(held), nbytes, casts, extra)


def _padded(live: MappingABC[str, Any], source: Source, layout: ParallelLayout) -> int:
    """Rows of embedding and head over all ranks; a rank that holds neither does not care."""
    for name in (EMBEDDING, OUTPUT):
        if name in live and len(live[name].shape):
            return int(live[name].shape[0]) * layout.tp
    return padded_vocab_size(source.model.spec.vocab, layout.tp, 1)


def _named(parts: Any, live: MappingABC[str, Any]) -> dict[str, Held]:
    """What the rank must hold, under the names that it uses."""
    return {next((n for n in part.names() if n in live), next(iter(part.names()))): part for part in parts}


def _casts(
    held: MappingABC[str, Held], live: MappingABC[str, Any], wanted: MappingABC[str, str], *, cast: bool
) -> tuple[str, ...]:
    """Tensors of another dtype than the checkpoint's. Raises AccountingError unless that is asked for."""
    problems, found = [], []
    for name, part in held.items():
        theirs, ours = wanted[part.param.name], dtype_of(name, live[name])
        if theirs == ours:
            continue
        found.append(name)
        if not cast or {theirs, ours} - set(FLOATS.values()):
            problems.append(f"dtype: `{name}` is {ours}, the checkpoint's is {theirs}")
    if problems:
        raise together(AccountingError, problems, fix="pass cast=True to convert floats; nothing was written")
    return tuple(found)


def writer(name: str, tensor: Any) -> Write:
    """How bytes get into a live tensor. Raises UsageError for one that is not contiguous or not writable."""
    if hasattr(tensor, "data_ptr"):
        import torch

        if not tensor.is_contiguous():
            raise UsageError(f"`{name}` is not contiguous", fix="give the tensor that owns the memory")
        if tensor.is_neg() or tensor.is_conj():
            raise UsageError(
                f"`{name}` is a view that changes the sign", fix="give the tensor that owns the memory"
            )
        flat = tensor.detach().view(-1).view(torch.uint8) if tensor.numel() else None
        if flat is None:
            return lambda at, data: None
        if flat.device.type == "cpu":
            place = memoryview(flat.numpy()).cast("B")
            return lambda at, data: place.__setitem__(slice(at, at + len(data)), data)

        def copy(at: int, data: memoryview) -> None:
            flat[at : at + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

        return copy
    flags = getattr(tensor, "flags", None)
    if flags is None or not flags.c_contiguous or not flags.writeable:
        raise UsageError(f"`{name}` is not a contiguous array that can be written")
    inside = memoryview(tensor.reshape(-1).view("u1")) if tensor.size else memoryview(b"")
    return lambda at, data: inside.__setitem__(slice(at, at + len(data)), data) if len(data) else None


def _fill(
    resolver: Resolver,
    shapes: MappingABC[str, tuple[int, ...]],
    dtypes: MappingABC[str, str],
    writers: MappingABC[str, Write],
) -> int:
    mover, total = Mover(), 0
    try:
        for name, shape in shapes.items():
            dtype, at = dtypes[name], 0
            if not prod(shape):
                continue
            for slab in slabs(Region.whole(shape), SLAB // DTYPE_NBYTES[dtype]):
                for unit in resolver.units(Payload(name, slab, dtype), 0):
                    data = mover.gather(unit)
                    if unit.plus or unit.src_dtype != dtype:
                        data = cast_bytes(data, unit.src_dtype, dtype, unit.plus)
                    writers[name](at, data)
                    at += len(data)
            total += at
    finally:
        mover.close()
    return total


__all__ = ["LoadReport", "load_into"]
