"""Compares the claims of a `.metadata` with each other and with the files beside it."""

import os
from collections.abc import Iterable, Mapping
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from convtools.errors import CheckpointError, capped
from convtools.layout.cover import Box, first_fault
from convtools.layout.region import Region
from convtools.stores.base import DTYPE_NBYTES, FROM_TORCH
from convtools.stores.dcp_metadata import ChunkEntry, IndexEntry, PlaceEntry, PropertiesEntry, TensorEntry
from convtools.stores.dcp_tensor import DcpChunk, DcpTensor
from convtools.stores.names import tick
from convtools.stores.regular_file import absence
from convtools.stores.stand_ins import Inert, InertType
from convtools.stores.torch_zip import MAX_DIMS, MAX_SIZE

MAX_IRREGULAR = 256
"""Chunks of a tensor that is not cut into slabs, and those likewise: they take cubic time."""

Place = tuple[str, int, int]
"""(file name, offset, length) of a stored item."""
Places = dict[tuple[str, tuple[int, ...] | None], Place]
"""By name and offsets of the chunk; None for an object."""


def read_places(claims: Mapping[Any, Any], where: Path) -> Places:
    """Where each item is said to lie. Raises `CheckpointError` where it is no place, or said twice."""
    places: Places = {}
    for index, place in claims.items():
        try:
            if not isinstance(index, IndexEntry) or not isinstance(place, PlaceEntry):
                raise AttributeError
            key = (index.fqn, index.offset)
            found = (place.relative_path, place.offset, place.length)
            transforms = place.transforms
        except AttributeError:  # of another class, or one that was never filled
            raise _unknown("a storage entry", (index, place), where) from None
        if type(key[0]) is not str or not (key[1] is None or are_sizes(key[1])):
            raise _unknown("a storage entry's name and offsets", key, where)
        if type(found[0]) is not str or not are_sizes(found[1:]):
            raise _unknown(f"the place of {tick(key[0])}", found, where)
        if transforms:
            raise CheckpointError(
                f"{tick(key[0])} was stored through an extension, such as compression",
                where=where,
                found=tick(transforms),
                fix="save the checkpoint again without it",
            )
        if key in places:
            raise CheckpointError(f"{tick(key[0])} is stored twice", where=where, found=[places[key], found])
        places[key] = found
    return places


def read_tensor(name: str, entry: TensorEntry, places: Places, where: Path) -> DcpTensor:
    """A tensor whose chunks tile it; takes their places out of `places`. Raises `CheckpointError`."""
    state = entry.state if isinstance(entry.state, dict) else {}
    dtype = _dtype(name, state.get("properties"), where)
    shape, listed = state.get("size"), state.get("chunks")
    if not are_sizes(shape) or type(listed) is not list:
        raise _unknown(f"the size of {tick(name)} and its chunks", (shape, listed), where)
    chunks = []
    for chunk in listed:
        region = _region(name, chunk, shape, where)
        try:
            path, offset, length = places.pop((name, region.offsets))
        except KeyError:
            what = f"a chunk of {tick(name)} is stored nowhere, or listed twice"
            raise CheckpointError(what, where=where, found=f"offsets {list(region.offsets)}") from None
        if prod(region.sizes) * DTYPE_NBYTES[dtype] > length:
            raise CheckpointError(
                f"a chunk of {tick(name)} is stored in fewer bytes than it has",
                where=f"{tick(path)}:{offset}, says {where}",
                expected=f"over {prod(region.sizes) * DTYPE_NBYTES[dtype]}: {dtype}, {list(region.sizes)}",
                found=length,
            )
        chunks.append(DcpChunk(region, path, offset, length))
    _check_tiling(name, shape, chunks, where)
    return DcpTensor(dtype, shape, tuple(chunks))


def check_files(root: Path, items: Iterable[tuple[Place, str]]) -> None:
    """All items lie in files of `root`, inside them and apart. Raises `CheckpointError` where not."""
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for (path, offset, length), name in items:
        spans.setdefault(path, []).append((offset, offset + length, name))
    real = os.path.realpath(root)
    for path, listed in spans.items():
        plain = path not in ("", ".", "..") and "/" not in path and "\0" not in path
        if not plain or os.path.dirname(os.path.realpath(root / path)) != real:
            raise CheckpointError(
                f"{tick(listed[0][2])} is said to be stored outside of the checkpoint's directory",
                where=root,
                expected="a file in it",
                found=tick(path),
                fix="where a link is meant, copy the checkpoint with links followed (cp -rL)",
            )
    missing = [f"{tick(path)} ({reason})" for path in sorted(spans) if (reason := absence(root / path))]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of the {len(spans)} files that `.metadata` refers to cannot be read",
            where=root,
            found=capped(missing),
            fix="copy the whole checkpoint again: every rank's files belong to it",
        )
    for path, listed in spans.items():
        _check_apart(root / path, os.stat(root / path).st_size, listed)


def are_sizes(numbers: object) -> TypeGuard[tuple[int, ...]]:
    """Whether this is a tuple of sizes or offsets that a tensor can have."""
    if type(numbers) is not tuple or len(numbers) > MAX_DIMS:
        return False
    for n in numbers:  # noqa: SIM110  # called millions of times: all() takes twice as long
        if type(n) is not int or not 0 <= n < MAX_SIZE:
            return False
    return True


def _check_apart(path: Path, size: int, spans: list[tuple[int, int, str]]) -> None:
    spans.sort()
    before = (0, 0, "")
    for span in spans:
        if span[0] < before[1]:
            raise CheckpointError(
                f"{tick(before[2])} and {tick(span[2])} are stored in the same bytes",
                where=f"{path}:{span[0]}",
            )
        before = span if span[1] > before[1] else before
    if before[1] > size:
        raise CheckpointError(
            f"{tick(before[2])} is stored past the end of its file",
            where=f"{path}:{before[0]}",
            expected=f"at least {before[1]} bytes",
            found=f"{size} bytes",
            fix="the file is cut short: copy it again",
        )


def _dtype(name: str, properties: Any, where: Path) -> str:
    """The dtype of a dense tensor."""
    state = properties.state if isinstance(properties, PropertiesEntry) else None
    if isinstance(state, dict):
        state = (state.get("dtype"), state.get("layout"))
    if type(state) is not tuple or len(state) < 2:
        raise _unknown(f"the dtype and layout of {tick(name)}", properties, where)
    dtype, layout = state[:2]
    spelled = layout.args[0] if isinstance(layout, Inert) and len(layout.args) == 1 else layout
    spelled = spelled.path if isinstance(spelled, InertType) else spelled
    if spelled != "torch.strided":
        found = tick(spelled)
        raise CheckpointError(
            f"{tick(name)} is not a dense tensor", where=where, expected="torch.strided", found=found
        )
    known = FROM_TORCH.get(dtype.path.removeprefix("torch.")) if isinstance(dtype, InertType) else None
    if known is None:
        raise CheckpointError(
            f"{tick(name)} has a dtype that convtools does not know",
            where=where,
            expected=capped(FROM_TORCH, 30),
            found=tick(dtype.path if isinstance(dtype, InertType) else dtype),
        )
    return known


def _region(name: str, chunk: Any, shape: tuple[int, ...], where: Path) -> Region:
    try:
        offsets, sizes = (chunk.offsets, chunk.sizes) if isinstance(chunk, ChunkEntry) else (None, None)
    except AttributeError:  # never filled
        offsets = sizes = None
    if not are_sizes(offsets) or not are_sizes(sizes):
        raise _unknown(f"a chunk of {tick(name)}", chunk, where)
    region = Region(offsets, sizes)
    if len(offsets) != len(sizes) or not region.within(shape):
        raise CheckpointError(
            f"a chunk of {tick(name)} lies outside of it",
            where=where,
            expected=f"inside {list(shape)}",
            found=f"offsets {list(offsets)}, sizes {list(sizes)}",
        )
    return region


def _check_tiling(name: str, shape: tuple[int, ...], chunks: list[DcpChunk], where: Path) -> None:
    if _is_grid(shape, [chunk.region for chunk in chunks]):
        return
    boxes: list[tuple[int, Box]] = []
    for number, chunk in enumerate(chunks):
        box = tuple((o, o + s) for o, s in zip(chunk.region.offsets, chunk.region.sizes, strict=True))
        if 0 not in chunk.region.sizes:
            boxes.append((number, box))
    if len(boxes) > MAX_IRREGULAR and not _in_slabs([box for _, box in boxes], 0):
        raise CheckpointError(
            f"{tick(name)} is stored in {len(boxes)} chunks that are not cut along its dims",
            where=where,
            fix="save the checkpoint again at a layout of fewer ranks",
        )
    fault = first_fault(shape, boxes)
    if fault is None:
        return
    places = [f"{c.relative_path}:{c.offset}" for c in (chunks[i] for i in fault.holders)]
    raise CheckpointError(
        f"element {list(fault.index)} of {tick(name)} is stored {len(fault.holders)} times",
        where=where,
        expected=f"each element of {list(shape)} stored once",
        found=f"in {capped(places)}" if places else f"in none of its {len(chunks)} chunks",
    )


def _is_grid(shape: tuple[int, ...], regions: list[Region]) -> bool:
    """Whether the regions, no two at the same offsets, are the cells between planes across the tensor."""
    cells = 1
    for dim, size in enumerate(shape):
        spans = sorted({(region.offsets[dim], region.sizes[dim]) for region in regions})
        if [first for first, _ in spans] + [size] != [0] + [first + n for first, n in spans]:
            return False
        cells *= len(spans)
    return cells == len(regions)


def _in_slabs(boxes: list[Box], dim: int) -> bool:
    """Whether equal spans of `dim` group the boxes into slabs apart from each other, and so on inside."""
    if len(boxes) <= 1 or dim == len(boxes[0]):
        return True
    boxes.sort(key=lambda box: box[dim])
    end = 0
    for (first, stop), slab in groupby(boxes, key=lambda box: box[dim]):
        if first < end or not _in_slabs(list(slab), dim + 1):
            return False
        end = stop
    return True


def _unknown(what: str, found: object, where: Path) -> CheckpointError:
    return CheckpointError(f"`.metadata` has {what} in an unknown form", where=where, found=tick(found))
