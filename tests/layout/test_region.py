"""Regions against sets of indices."""

from hypothesis import given, strategies as st

from convtools.layout.region import Region
from tests.layout.brute import LAWS, indices


@st.composite
def boxes(draw: st.DrawFn, dims: int) -> Region:
    at = tuple(draw(st.integers(0, 4)) for _ in range(dims))
    return Region(at, tuple(draw(st.integers(0, 4)) for _ in range(dims)))


@LAWS
@given(st.integers(0, 3).flatmap(lambda d: st.tuples(boxes(d), boxes(d))))
def test_intersect_is_the_intersection(two: tuple[Region, Region]) -> None:
    a, b = two
    common = set(indices(a)) & set(indices(b))
    met = a.intersect(b)
    assert (set(indices(met)) if met else set()) == common
    assert (met is None) == (not common)
    assert met == b.intersect(a)


@LAWS
@given(st.integers(0, 3).flatmap(lambda d: st.tuples(boxes(d), st.tuples(*[st.integers(0, 6)] * d))))
def test_within_is_containment(case: tuple[Region, tuple[int, ...]]) -> None:
    region, shape = case
    assert region.within(shape) == all(e <= n for e, n in zip(region.ends, shape, strict=True))
    assert not region.within((*shape, 1))
    assert region.numel == len(indices(region))


def test_nothing_negative_is_within() -> None:
    assert not Region((-1,), (2,)).within((4,))
    assert not Region((1,), (-1,)).within((4,))


def test_the_whole_of_a_scalar() -> None:
    assert Region.whole(()) == Region((), ())
    assert Region.whole(()).numel == 1
