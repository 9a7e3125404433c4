"""Do boxes tile a tensor exactly? If not, the first element that is missed or held twice."""

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise, product
from typing import NamedTuple

from convtools.layout.piece import Piece

Box = tuple[tuple[int, int], ...]
"""`(first, end)` in each dim."""


class Fault(NamedTuple):
    """The first element at fault, in row-major order of the tensor."""

    index: tuple[int, ...]  # type: ignore[assignment]  # shadows tuple.index
    holders: tuple[int, ...]
    """Which boxes hold it: none where it is missed, two or more where they overlap."""


def boxes_of(piece: Piece) -> Iterator[Box]:
    """The boxes of a piece on its `a` side: strided loops are laid out, contiguous ones kept."""
    per_dim: list[list[tuple[int, int]]] = []
    for dim, origin in enumerate(piece.a_origin):
        loops = sorted((x for x in piece.loops if x.a_dim == dim), key=lambda x: -x.a_step)
        run = 1
        while loops and loops[-1].a_step == run:  # an interleave with no gaps is one run
            run *= loops.pop().n
        starts = [origin]
        for loop in loops:
            starts = [s + i * loop.a_step for s in starts for i in range(loop.n)]
        per_dim.append([(s, s + run) for s in starts])
    yield from product(*per_dim)


def first_fault(shape: tuple[int, ...], boxes: Iterable[tuple[int, Box]]) -> Fault | None:
    """(shape, (holder, box)...) -> None if the boxes tile the tensor exactly, else the first fault.

    Boxes must lie inside the tensor; empty ones hold nothing. Cost is near linear for tilings with
    few boxes a slab.
    """
    if 0 in shape:
        return None
    return _scan(shape, [(h, box) for h, box in boxes if all(lo < hi for lo, hi in box)], 0)


def _scan(shape: tuple[int, ...], boxes: list[tuple[int, Box]], dim: int) -> Fault | None:
    if dim == len(shape):
        return None if len(boxes) == 1 else Fault((), tuple(h for h, _ in boxes))
    boxes = sorted(boxes, key=lambda b: b[1][dim])
    at = 0
    slabs = [(span, list(group)) for span, group in groupby(boxes, key=lambda b: b[1][dim])]
    overlap = any(later[0][0] < earlier[0][1] for earlier, later in pairwise(slabs))
    rest = tuple(0 for _ in shape[dim + 1 :])
    for (first, end), held in _split(slabs) if overlap else slabs:  # split as we go: a fault ends it early
        if first > at:
            return Fault((at, *rest), ())
        fault = _scan(shape, held, dim + 1)
        if fault:
            return Fault((first, *fault.index), fault.holders)
        at = end
    return None if at == shape[dim] else Fault((at, *rest), ())


def _split(
    slabs: list[tuple[tuple[int, int], list[tuple[int, Box]]]],
) -> Iterator[tuple[tuple[int, int], list[tuple[int, Box]]]]:
    """Cut overlapping slabs at each other's edges."""
    cuts = sorted({edge for span, _ in slabs for edge in span})
    active: list[tuple[tuple[int, int], list[tuple[int, Box]]]] = []
    upcoming = iter([*slabs, None])
    following = next(upcoming)
    for first, end in pairwise(cuts):
        while following is not None and following[0][0] <= first:
            active.append(following)
            following = next(upcoming)
        active = [slab for slab in active if slab[0][1] > first]
        held = [box for _, boxes in active for box in boxes]
        if held:
            yield (first, end), held
