"""Covering: the first fault in row-major order, against counting every element."""

from math import prod

import numpy as np
from hypothesis import example, given, strategies as st

from convtools.layout.cover import Box, Fault, boxes_of, first_fault
from convtools.layout.piece import Loop, Piece
from tests.layout.brute import LAWS, pairs, pieces_of, shapes, tilings


def first_by_counting(shape: tuple[int, ...], boxes: list[tuple[int, Box]]) -> Fault | None:
    """The first element, in row-major order, that is not held exactly once."""
    for index in np.ndindex(*shape):
        inside = [h for h, box in boxes if all(lo <= i < hi for i, (lo, hi) in zip(index, box, strict=True))]
        if len(inside) != 1:
            return Fault(index, tuple(sorted(inside)))
    return None


def check(shape: tuple[int, ...], boxes: list[Box]) -> Fault | None:
    """The fault found, after checking that it is the right one."""
    held = list(enumerate(boxes))
    found = first_fault(shape, held)
    expected = first_by_counting(shape, held)
    assert (found and Fault(found.index, tuple(sorted(found.holders)))) == expected
    return found


@st.composite
def tiled(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes())
    return shape, draw(tilings(shape))


@LAWS
@given(tiled())
def test_a_tiling_has_no_fault(case: tuple[tuple[int, ...], list[Box]]) -> None:
    assert check(*case) is None


@LAWS
@given(tiled(), st.data())
def test_one_box_moved_is_found_at_the_first_element(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = case
    i = data.draw(st.integers(0, len(boxes) - 1))
    dim = data.draw(st.integers(0, len(shape) - 1))
    lo, hi = boxes[i][dim]
    by = data.draw(st.integers(-lo, shape[dim] - hi))
    boxes[i] = (*boxes[i][:dim], (lo + by, hi + by), *boxes[i][dim + 1 :])
    assert (check(shape, boxes) is None) == (by == 0)


@LAWS
@given(tiled(), st.data())
def test_one_box_dropped_or_doubled_is_found(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = case
    i = data.draw(st.integers(0, len(boxes) - 1))
    corner = tuple(lo for lo, _ in boxes[i])
    assert check(shape, [*boxes[:i], *boxes[i + 1 :]]) == Fault(corner, ())
    doubled = check(shape, [*boxes, boxes[i]])
    assert doubled is not None
    assert doubled.index == corner
    assert sorted(doubled.holders) == [i, len(boxes)]


@LAWS
@given(st.data())
@example(None)
def test_any_boxes_at_all(data: st.DataObject | None) -> None:
    if data is None:  # spans that nest, meet and leave a gap
        assert check((6,), [((0, 6),), ((1, 2),), ((3, 4),)]) == Fault((1,), (0, 1))
        return
    shape = data.draw(shapes())
    span = [st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda s: tuple(sorted(s))) for n in shape]
    check(
        shape, [b for b in data.draw(st.lists(st.tuples(*span), max_size=10)) if all(lo < hi for lo, hi in b)]
    )


def test_a_scalar_is_held_once_or_at_fault() -> None:
    assert first_fault((), [(0, ())]) is None
    assert first_fault((), []) == Fault((), ())
    assert first_fault((), [(0, ()), (7, ())]) == Fault((), (0, 7))


def test_an_empty_tensor_has_nothing_to_miss() -> None:
    assert first_fault((3, 0), []) is None


@LAWS
@given(st.data())
def test_the_boxes_of_a_piece_hold_its_elements_once(data: st.DataObject) -> None:
    p = data.draw(pieces_of("b", data.draw(shapes()), "a"))
    boxes = list(boxes_of(p))
    held = [
        a
        for box in boxes
        for a in np.ndindex(*(hi for _, hi in box))
        if all(lo <= i for i, (lo, _) in zip(a, box, strict=True))
    ]
    assert sorted(held) == sorted(a for a, _ in pairs(p))
    assert sum(prod(hi - lo for lo, hi in box) for box in boxes) == p.numel


def test_contiguous_rows_are_one_box() -> None:
    qkv = Piece(
        "qkv", "q", (0, 0), (0, 0), (Loop(2, 0, 48, 0, 32), Loop(32, 0, 1, 0, 1), Loop(5, 1, 1, 1, 1))
    )
    assert list(boxes_of(qkv)) == [((0, 32), (0, 5)), ((48, 80), (0, 5))]


def test_empty_boxes_hold_nothing() -> None:
    nothing = boxes_of(Piece("a", "b", (2, 0), (0, 0), (Loop(0, 0, 1, 0, 1), Loop(3, 1, 1, 1, 1))))
    halves: list[Box] = [((0, 2), (0, 3)), *nothing, ((2, 2), (1, 2)), ((2, 4), (0, 3)), ((4, 4), (0, 3))]
    assert first_fault((4, 3), enumerate(halves)) is None


def test_many_boxes_take_little_time() -> None:
    rows = [((i, i + 1), (0, 4)) for i in range(20_000)]
    assert first_fault((20_000, 4), enumerate(rows)) is None
    rows[11_111] = ((11_111, 11_112), (0, 3))
    assert first_fault((20_000, 4), enumerate(rows)) == Fault((11_111, 3), ())


def test_a_fault_among_many_overlapping_boxes_is_found_at_once() -> None:
    n = 20_000  # every box overlaps every other
    nested = ((i, ((i, n), (i, n))) for i in range(n))
    assert first_fault((n, n), nested) == Fault((1, 1), (0, 1))
