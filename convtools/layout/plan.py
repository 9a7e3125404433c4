"""From pieces to moves: strided copies between two C-contiguous runs of elements.

A `Move` is what a piece becomes once both sides are laid out in memory or in a file: an offset on
each side and a nest of loops, the innermost a contiguous run. Offsets and steps count elements.
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from convtools.layout.piece import Piece
from convtools.layout.region import Region


class Stride(NamedTuple):
    """`n` steps of `dst` elements on one side and `src` on the other."""

    n: int
    dst: int
    src: int


class Move(NamedTuple):
    """`run` contiguous elements, repeated over `loops` (outermost first)."""

    dst: int
    src: int
    loops: tuple[Stride, ...]
    run: int

    @property
    def numel(self) -> int:
        """Elements moved."""
        return self.run * prod(s.n for s in self.loops)

    def runs(self) -> Iterator[tuple[int, int]]:
        """(dst, src) of every contiguous run, in order of the loops."""
        yield from _runs(self.dst, self.src, self.loops)

    def halves(self) -> tuple["Move", "Move"]:
        """The same elements as two moves, cut where the source is widest; there must be a loop.

        >>> [half.src for half in Move(0, 0, (Stride(3, 1, 10),), 1).halves()]
        [0, 10]
        """
        i = max(range(len(self.loops)), key=lambda i: (self.loops[i].n - 1) * self.loops[i].src)
        n, d, s = self.loops[i]
        first = n // 2
        outer, inner = self.loops[:i], self.loops[i + 1 :]
        return (
            Move(self.dst, self.src, (*outer, Stride(first, d, s), *inner), self.run),
            Move(
                self.dst + first * d,
                self.src + first * s,
                (*outer, Stride(n - first, d, s), *inner),
                self.run,
            ),
        )


def _runs(dst: int, src: int, loops: tuple[Stride, ...]) -> Iterator[tuple[int, int]]:
    if not loops:
        yield dst, src
        return
    n, d, s = loops[0]
    for i in range(n):
        yield from _runs(dst + i * d, src + i * s, loops[1:])


def steps(shape: tuple[int, ...]) -> list[int]:
    """Elements that one step along each dim of a C-contiguous tensor skips.

    >>> steps((2, 3, 4))
    [12, 4, 1]
    """
    out = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        out[d] = out[d + 1] * shape[d + 1]
    return out


def move(piece: Piece, dst_shape: tuple[int, ...], src_shape: tuple[int, ...]) -> Move:
    """(piece dst ~ src, both shapes) -> the move, in the order in which the destination lies."""
    to, of = steps(dst_shape), steps(src_shape)
    strides = [
        Stride(n, a_step * to[a_dim], b_step * of[b_dim]) for n, a_dim, a_step, b_dim, b_step in piece.loops
    ]
    strides.sort(key=lambda s: -s.dst)
    out: list[Stride] = []
    for s in strides:
        if out and out[-1].dst == s.n * s.dst and out[-1].src == s.n * s.src:
            out[-1] = Stride(out[-1].n * s.n, s.dst, s.src)
        else:
            out.append(s)
    run = out.pop().n if out and out[-1].dst == 1 and out[-1].src == 1 else 1
    dst = sum(o * s for o, s in zip(piece.a_origin, to, strict=True))
    src = sum(o * s for o, s in zip(piece.b_origin, of, strict=True))
    return Move(dst, src, tuple(out), run)


def slabs(region: Region, most: int) -> Iterator[Region]:
    """Cut a region into C-contiguous regions of at most `most` elements (or one element), in order.

    >>> [r.offsets for r in slabs(Region((0, 0), (4, 3)), 6)]
    [(0, 0), (2, 0)]
    """
    if region.numel <= max(most, 1):
        yield region
        return
    dim = next(d for d, n in enumerate(region.sizes) if n > 1)
    inner = prod(region.sizes[dim + 1 :])
    step = max(1, most // inner)
    for first in range(0, region.sizes[dim], step):
        size = min(step, region.sizes[dim] - first)
        at = tuple(o + first if d == dim else o for d, o in enumerate(region.offsets))
        part = Region(at, tuple(size if d == dim else n for d, n in enumerate(region.sizes)))
        yield from slabs(part, most)
