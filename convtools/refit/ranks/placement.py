"""Which region of a tensor a rank of a DTensor's mesh holds: arithmetic on placements, no process asked."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from convtools.errors import UsageError, tick
from convtools.layout.region import Region


class Split(NamedTuple):
    """One mesh dim: how many ranks, which of them this is, and what it does to the tensor."""

    size: int
    coordinate: int
    dim: int | None
    """The tensor dim that is cut over it; None where its ranks hold the same (Replicate)."""
    factor: int = 1
    """How many cuts of that dim by later mesh dims come first (FSDP over tensor parallelism)."""


def local_region(shape: Sequence[int], splits: Sequence[Split]) -> Region:
    """The region of a tensor of `shape`, cut as `torch.chunk` does it, over each mesh dim in turn.

    Raises UsageError for a dim that is not there, or an order of cuts that mesh dims do not make up.

    >>> local_region((5, 4), [Split(2, 1, 0), Split(3, 0, None)])
    Region(offsets=(3, 0), sizes=(2, 4))
    >>> [local_region((8,), [Split(2, i, 0, 2), Split(2, 0, 0)]).offsets[0] for i in (0, 1)]
    [0, 2]
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for dim in {s.dim for s in splits if s.dim is not None}:
        if not -len(sizes) <= dim < len(sizes):
            raise UsageError(f"a tensor of {len(sizes)} dims cannot be cut along dim {dim}")
    for split in _in_order(splits, len(shape)):
        assert split.dim is not None
        chunk = -(-sizes[split.dim] // split.size)
        first = min(split.coordinate * chunk, sizes[split.dim])
        offsets[split.dim] += first
        sizes[split.dim] = min(chunk, sizes[split.dim] - first)
    return Region(tuple(offsets), tuple(sizes))


def _in_order(splits: Sequence[Split], dims: int) -> list[Split]:
    """The cuts in the order in which they were made: a mesh dim with a factor comes after that many."""
    order: list[Split] = []
    for split in reversed(splits):
        if split.dim is None:
            continue
        split = split._replace(dim=split.dim % dims)
        after, at = 1, 0
        while after < split.factor and at < len(order):
            if order[at].dim == split.dim:
                after *= order[at].size
            at += 1
        if after != split.factor:
            raise UsageError("the mesh dims do not make up a split factor", found=split.factor)
        order.insert(at, split)
    return order


def dtensor_region(name: str, tensor: Any) -> Region:
    """The region of a DTensor that its local tensor is. Raises UsageError, naming the tensor."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise UsageError(f"{tick(name)} lies on a mesh without this rank")
    splits = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            dim = None
        elif hasattr(placement, "dim") and not placement.is_partial():
            dim = int(placement.dim)
        else:
            raise UsageError(
                f"{tick(name)} is {placement} over a mesh dim",
                fix="redistribute it: a part of a sum is no weight",
            )
        factor = int(getattr(placement, "split_factor", 1))
        splits.append(Split(int(mesh.size(axis)), int(coordinate[axis]), dim, factor))
    try:
        region = local_region(tuple(tensor.shape), splits)
    except UsageError as error:
        raise UsageError(f"{tick(name)}: {error.what}", found=str(tensor.placements)) from None
    have = tuple(int(n) for n in tensor.to_local().shape)
    if have != region.sizes and region.numel:
        raise UsageError(
            f"{tick(name)} is not cut as its placements say",
            expected=list(region.sizes), found=f"{list(have)}, placements {tensor.placements}",
        )  # fmt: skip
    return region
