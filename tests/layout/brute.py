"""The layout algebra by brute force: a piece is the plain set of (index in a, index in b) pairs.

Also the random views, pieces and mappings that the laws are tried on. Everything is tiny, so that
every element can be looked at one by one.
"""

from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
from hypothesis import settings, strategies as st

from convtools.layout.mapping import Mapping
from convtools.layout.piece import Piece
from convtools.layout.region import Region
from convtools.layout.view import View, same

LAWS = settings(deadline=None, max_examples=150)

Index = tuple[int, ...]
Pair = tuple[Index, Index]


def pairs(piece: Piece) -> list[Pair]:
    """Every (index in a, index in b), straight from the definition of a loop nest."""
    out = []
    for steps in product(*(range(loop.n) for loop in piece.loops)):
        a, b = list(piece.a_origin), list(piece.b_origin)
        for i, loop in zip(steps, piece.loops, strict=True):
            a[loop.a_dim] += i * loop.a_step
            b[loop.b_dim] += i * loop.b_step
        out.append((tuple(a), tuple(b)))
    return out


def relation(pieces: list[Piece]) -> set[tuple[str, Index, str, Index]]:
    """The pairs of many pieces, under their tensors' names; no pair may be held twice."""
    listed = [(p.a, a, p.b, b) for p in pieces for a, b in pairs(p)]
    assert len(listed) == len(set(listed)), "a pair is held twice"
    return set(listed)


def composed(left: set[tuple[str, Index, str, Index]], right: set[tuple[str, Index, str, Index]]):
    """The composition of two relations, as sets compose."""
    return {(a, x, c, z) for a, x, b, y in left for b2, y2, c, z in right if (b, y) == (b2, y2)}


def indices(region: Region) -> list[Index]:
    """Every index of a region, in row-major order."""
    return list(product(*(range(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))))


class Seen(NamedTuple):
    """A view, and the same elements as numpy sees them: flat positions under the view's axes."""

    view: View
    flat: np.ndarray


@st.composite
def factored(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """A random factorisation of a dim."""
    factors = []
    while size > 1 and len(factors) < 3 and draw(st.booleans()):
        f = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        factors.append(f)
        size //= f
    return (*factors, size)


@st.composite
def shapes(draw: st.DrawFn, most: int = 48) -> tuple[int, ...]:
    """A random shape of one to three dims."""
    dims = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=3))
    while prod(dims) > most:
        dims.remove(max(dims))
    return tuple(dims) or (draw(st.integers(1, 12)),)


@st.composite
def seen(draw: st.DrawFn, name: str, shape: tuple[int, ...]) -> Seen:
    """A random view of a tensor: factored, narrowed by ints and slices, transposed."""
    dims = [draw(factored(n)) for n in shape]
    view = View(name, *(d if len(d) > 1 or draw(st.booleans()) else d[0] for d in dims))
    picks: list[int | slice] = []
    sizes = [n for d in dims for n in d]
    for n in sizes[: draw(st.integers(0, len(sizes)))]:
        first = draw(st.integers(0, n - 1))
        picks.append(
            draw(st.sampled_from([first, slice(first, draw(st.integers(first + 1, n))), slice(None)]))
        )
    flat = np.arange(prod(shape)).reshape(sizes)[tuple(picks)]
    view = view[tuple(picks)]
    order = draw(st.permutations(range(flat.ndim)))
    return Seen(view.permuted(*order), flat.transpose(order))


@st.composite
def spread(draw: st.DrawFn, name: str, sizes: list[int], slack: int = 1) -> View:
    """A view with axes of `sizes` in a tensor of its own, where they nest in any order with gaps."""
    order = draw(st.permutations(range(len(sizes))))
    room = [draw(st.integers(0, slack)) for _ in sizes]
    first = [draw(st.integers(0, r)) for r in room]
    dims: list[list[int]] = []
    for i in order:
        if dims and draw(st.booleans()):
            dims[-1].append(sizes[i] + room[i])
        else:
            dims.append([sizes[i] + room[i]])
    view = View(name, *(tuple(d) for d in dims))
    if order:
        view = view[tuple(slice(first[i], first[i] + sizes[i]) for i in order)]
    return view.permuted(*(order.index(i) for i in range(len(sizes))))


@st.composite
def pieces_of(draw: st.DrawFn, name: str, shape: tuple[int, ...], other: str) -> Piece:
    """A random piece `other` ~ `name`, of a tensor `name` of this shape."""
    view = draw(seen(name, shape)).view
    return same(draw(spread(other, [x.size for x in view.axes])), view)


@st.composite
def bijections(draw: st.DrawFn, exact: bool = True, many: bool = False) -> Mapping:
    """A mapping of one or two tensors of side a, cut as fused weights are, onto several of side b."""
    a: dict[str, tuple[int, ...]] = {}
    b: dict[str, tuple[int, ...]] = {}
    found: list[Piece] = []
    for t in range(draw(st.integers(1, 2))):
        shape = (12, *draw(shapes(4))) if many else draw(shapes(24))
        dims = [draw(factored(n)) for n in shape]
        whole = View(f"a{t}", *dims)
        a[whole.name] = whole.shape
        for box in draw(tilings(tuple(x.size for x in whole.axes), 9 if many else 0)):
            part = whole[tuple(slice(lo, hi) for lo, hi in box)]
            other = draw(spread(f"b{len(found)}", [x.size for x in part.axes], 0 if exact else 1))
            b[other.name] = other.shape
            found.append(same(part, other))
    return Mapping(a, b, tuple(draw(st.permutations(found))))


@st.composite
def tilings(
    draw: st.DrawFn, shape: tuple[int, ...], least: int = 0, most: int = 12
) -> list[tuple[Pair, ...]]:
    """Random boxes that tile a tensor: cut again and again, anywhere."""
    boxes = [tuple((0, n) for n in shape)]
    target = draw(st.integers(max(1, least), max(most, least)))
    while len(boxes) < target:
        open_ = [i for i, box in enumerate(boxes) if any(hi - lo > 1 for lo, hi in box)]
        if not open_:
            break
        box = boxes.pop(draw(st.sampled_from(open_)))
        dim = draw(st.sampled_from([d for d, (lo, hi) in enumerate(box) if hi - lo > 1]))
        at = draw(st.integers(box[dim][0] + 1, box[dim][1] - 1))
        boxes += [
            (*box[:dim], (box[dim][0], at), *box[dim + 1 :]),
            (*box[:dim], (at, box[dim][1]), *box[dim + 1 :]),
        ]
    return draw(st.permutations(boxes))
