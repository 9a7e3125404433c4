"""Whether the regions that ranks hold make up a tensor; nearly always they cut it along one dim."""

from math import prod

from convtools.layout.cover import Fault, first_fault
from convtools.layout.region import Region


def fault_of(shape: tuple[int, ...], regions: list[Region]) -> Fault | None:
    """The first element that the regions miss or hold twice."""
    if _in_line(shape, regions):
        return None
    boxes = ((i, tuple(zip(r.offsets, r.ends, strict=True))) for i, r in enumerate(regions))
    return first_fault(shape, boxes)


def _in_line(shape: tuple[int, ...], regions: list[Region]) -> bool:
    """Whether they are the whole, or cut it along one dim: what nearly every tensor is."""
    cut = [d for d, n in enumerate(shape) if regions and regions[0].sizes[d] != n]
    if not regions or len(cut) > 1:
        return False
    if not cut:
        return len(regions) == 1
    (dim,), at = cut, 0
    for region in sorted(regions, key=lambda r: r.offsets[dim]):
        if region.offsets[dim] != at or region.numel * shape[dim] != prod(shape) * region.sizes[dim]:
            return False
        at += region.sizes[dim]
    return at == shape[dim]
