"""A piece: elements of tensor `a` that are elements of tensor `b`, as one affine loop nest.

Loop indices `i_0, i_1, ...` run over a box; each loop moves along one dim of `a` and one dim of
`b` by its own step. That is enough for slices, interleaves, stacks and transposes, and two pieces
that share a tensor meet by solving one dim at a time.
"""

from collections.abc import Iterator
from typing import NamedTuple

from convtools.layout.region import Region


class Loop(NamedTuple):
    """`n` steps, each moving `a_step` along `a_dim` of `a` and `b_step` along `b_dim` of `b`."""

    n: int
    a_dim: int
    a_step: int
    b_dim: int
    b_step: int


class Piece(NamedTuple):
    """The same elements in two tensors. Within a dim, loops nest: a step exceeds what is inside it."""

    a: str
    b: str
    a_origin: tuple[int, ...]
    """Index in `a` where all loop indices are zero."""
    b_origin: tuple[int, ...]
    loops: tuple[Loop, ...]

    @property
    def numel(self) -> int:
        """Number of elements on either side."""
        count = 1
        for loop in self.loops:
            count *= loop.n
        return count

    def inverse(self) -> "Piece":
        """The same piece with the sides exchanged."""
        loops = tuple(Loop(n, bd, bs, ad, as_) for n, ad, as_, bd, bs in self.loops)
        return Piece(self.b, self.a, self.b_origin, self.a_origin, loops)

    def renamed(self, a: str, b: str) -> "Piece":
        """The same piece between tensors of other names."""
        return Piece(a, b, self.a_origin, self.b_origin, self.loops)

    def span(self, dim: int) -> tuple[int, int]:
        """The smallest `[first, end)` along `dim` of `a` that holds the piece."""
        first = self.a_origin[dim]
        return first, first + 1 + sum((x.n - 1) * x.a_step for x in self.loops if x.a_dim == dim)

    def extent(self) -> Region:
        """The smallest region of `a` that holds the piece."""
        ends = list(self.a_origin)
        for loop in self.loops:
            ends[loop.a_dim] += (loop.n - 1) * loop.a_step
        return Region(self.a_origin, tuple(e - o + 1 for o, e in zip(self.a_origin, ends, strict=True)))


def block(a: str, b: str, region: Region) -> Piece:
    """(a, b, region) -> the piece that says: the whole of `a` is `region` of `b`.

    >>> block("part", "whole", Region((2,), (3,))).b_origin
    (2,)
    """
    loops = tuple(Loop(n, d, 1, d, 1) for d, n in enumerate(region.sizes) if n != 1)
    return Piece(a, b, (0,) * len(region.sizes), region.offsets, loops)


def merged(loops: list[Loop]) -> tuple[Loop, ...]:
    """Drop loops of one step and join each loop with the one that continues it, outermost first."""
    out: list[Loop] = []
    for loop in loops:
        if loop.n == 1:
            continue
        if out:
            n, ad, as_, bd, bs = out[-1]
            inner = loop.n
            if (
                ad == loop.a_dim
                and bd == loop.b_dim
                and as_ == inner * loop.a_step
                and bs == inner * loop.b_step
            ):
                out[-1] = Loop(n * inner, ad, loop.a_step, bd, loop.b_step)
                continue
        out.append(loop)
    return tuple(out)


class _Axis(NamedTuple):
    """One loop of a piece as seen along one dim of the shared tensor."""

    n: int
    step: int
    loop: int
    """Position of the loop in its piece."""


def meet(p: Piece, q: Piece) -> Iterator[Piece]:
    """(a ~ b, b ~ c) -> the pieces a ~ c of the elements of `b` that both hold, disjoint."""
    if not p.loops and not q.loops:
        if p.b_origin == q.a_origin:
            yield Piece(p.a, q.b, p.a_origin, q.b_origin, ())
        return
    solutions = []
    for dim in range(len(p.b_origin)):
        ps = [_Axis(x.n, x.b_step, i) for i, x in enumerate(p.loops) if x.b_dim == dim]
        qs = [_Axis(x.n, x.a_step, i) for i, x in enumerate(q.loops) if x.a_dim == dim]
        found = _meet_dim(p.b_origin[dim], ps, q.a_origin[dim], qs)
        if not found:
            return
        solutions.append(found)
    picks: list[list[_Joint]] = [[]]
    for found in solutions:
        picks = [[*chosen, one] for chosen in picks for one in found]
    for chosen in picks:
        yield _joined(p, q, chosen)


class _Joint(NamedTuple):
    """A common run of two pieces along one dim: where each begins, and the loops they share."""

    p_start: list[tuple[int, int]]
    """(loop of p, first index), for loops that do not begin at 0."""
    q_start: list[tuple[int, int]]
    loops: list[tuple[int, int, int, int, int]]
    """(n, loop of p, index step in it, loop of q, index step in it); outermost first."""


def _joined(p: Piece, q: Piece, chosen: "list[_Joint]") -> Piece:
    a_origin, c_origin = list(p.a_origin), list(q.b_origin)
    loops: list[Loop] = []
    for joint in chosen:
        for i, start in joint.p_start:
            a_origin[p.loops[i].a_dim] += start * p.loops[i].a_step
        for i, start in joint.q_start:
            c_origin[q.loops[i].b_dim] += start * q.loops[i].b_step
        for n, pi, p_step, qi, q_step in joint.loops:
            pl, ql = p.loops[pi], q.loops[qi]
            loops.append(Loop(n, pl.a_dim, p_step * pl.a_step, ql.b_dim, q_step * ql.b_step))
    return Piece(p.a, q.b, tuple(a_origin), tuple(c_origin), merged(loops))


def _meet_dim(p0: int, ps: list[_Axis], q0: int, qs: list[_Axis]) -> list[_Joint]:
    """Where `p0 + sum i*step` equals `q0 + sum k*step`, as boxes of indices."""
    if len(ps) < 2 and len(qs) < 2 and all(x.step == 1 for x in (*ps, *qs)):
        return _meet_runs(p0, ps[0] if ps else None, q0, qs[0] if qs else None)
    if p0 == q0 and [(x.n, x.step) for x in ps] == [(x.n, x.step) for x in qs]:
        return [_Joint([], [], [(x.n, x.loop, 1, y.loop, 1) for x, y in zip(ps, qs, strict=True)])]
    ps = sorted(ps, key=lambda x: -x.step)
    qs = sorted(qs, key=lambda x: -x.step)
    alike = _meet_interleaved(p0, ps, q0, qs)
    if alike is not None:
        return alike
    if _outer(qs) < _outer(ps):
        return [
            _Joint(q, p, [(n, c, d, a, b) for n, a, b, c, d in loops])
            for p, q, loops in _walk(q0, qs, p0, ps)
        ]
    return _walk(p0, ps, q0, qs)


def _meet_runs(p0: int, p: _Axis | None, q0: int, q: _Axis | None) -> list[_Joint]:
    """The usual case: two contiguous runs, each of one loop or of one element."""
    lo = max(p0, q0)
    n = min(p0 + (p.n if p else 1), q0 + (q.n if q else 1)) - lo
    if n < 1:
        return []
    return [
        _Joint(
            [(p.loop, lo - p0)] if p and lo > p0 else [],
            [(q.loop, lo - q0)] if q and lo > q0 else [],
            [(n, p.loop, 1, q.loop, 1)] if p and q and n > 1 else [],
        )
    ]


def _meet_interleaved(p0: int, ps: list[_Axis], q0: int, qs: list[_Axis]) -> list[_Joint] | None:
    """Two nests whose outermost step is the same, such as the even rows of rows g0 u0 g1 u1 ...

    They meet in every period alike, so the periods meet as runs do, and what is inside a period
    meets once. None where that is not so: other steps, or what is inside crosses a period's edge.
    """
    if not (ps and qs and ps[0].step == qs[0].step > 1):
        return None
    (p, *p_inner), (q, *q_inner), period = ps, qs, ps[0].step
    ahead, offset = divmod(p0 - q0, period)
    if offset + _reach(p_inner) > period or _reach(q_inner) > period:
        return None
    outer = _meet_runs(ahead, p, 0, q)
    inner = _meet_dim(offset, p_inner, 0, q_inner)
    return [
        _Joint([*a.p_start, *b.p_start], [*a.q_start, *b.q_start], [*a.loops, *b.loops])
        for a in outer
        for b in inner
    ]


def _reach(axes: list[_Axis]) -> int:
    """How far a nest spans from its first element."""
    return 1 + sum((x.n - 1) * x.step for x in axes)


def _outer(axes: list[_Axis]) -> int:
    """How many contiguous runs the axes make."""
    count = 1
    for axis in axes[:-1] if axes and axes[-1].step == 1 else axes:
        count *= axis.n
    return count


def _walk(p0: int, ps: list[_Axis], q0: int, qs: list[_Axis]) -> list[_Joint]:
    """Enumerate the contiguous runs of p, and cut q by each."""
    run = ps[-1] if ps and ps[-1].step == 1 else None
    out = []
    for starts, first in _runs(p0, ps[:-1] if run else ps):
        for box in _cut(q0, qs, first, first + (run.n if run else 1)):
            at = q0 + sum(lo * axis.step for axis, (lo, _) in zip(qs, box, strict=True))
            p_start = [*starts, (run.loop, at - first)] if run else starts
            q_start = [(axis.loop, lo) for axis, (lo, _) in zip(qs, box, strict=True) if lo]
            loops = []
            if run:
                loops = [
                    (n, run.loop, axis.step, axis.loop, 1)
                    for axis, (_, n) in zip(qs, box, strict=True)
                    if n > 1
                ]
            out.append(_Joint(p_start, q_start, loops))
    return out


def _runs(origin: int, axes: list[_Axis]) -> Iterator[tuple[list[tuple[int, int]], int]]:
    if not axes:
        yield [], origin
        return
    head, rest = axes[0], axes[1:]
    for i in range(head.n):
        for starts, first in _runs(origin + i * head.step, rest):
            yield [(head.loop, i), *starts], first


def _cut(origin: int, axes: list[_Axis], lo: int, hi: int) -> list[list[tuple[int, int]]]:
    """The part of a nest that lies in `[lo, hi)`, as boxes of (first index, count), one an axis."""
    if not axes:
        return [[]] if lo <= origin < hi else []
    head, rest = axes[0], axes[1:]
    inside = 1 + sum((x.n - 1) * x.step for x in rest)
    first = max(0, -((origin - lo) // head.step))  # the first block that begins at or after lo
    last = min(head.n, (hi - inside - origin) // head.step + 1)  # one past the last block that ends by hi
    boxes = [[(first, last - first), *((0, x.n) for x in rest)]] if first < last else []
    if inside > 1:
        # lo falls into the block before the first, hi into the one after the last; maybe the same.
        for edge in {first - 1, last}:
            if 0 <= edge < head.n:
                boxes += [[(edge, 1), *box] for box in _cut(origin + edge * head.step, rest, lo, hi)]
    return boxes
