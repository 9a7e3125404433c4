"""Moves: a piece as strided copies, simulated on arrays."""

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, strategies as st

from convtools.layout.plan import Move, Stride, move, slabs, steps
from convtools.layout.region import Region
from convtools.layout.view import View, same
from tests.layout.brute import LAWS, indices, pairs, pieces_of, shapes


@LAWS
@given(st.data())
def test_a_move_moves_exactly_the_elements_of_its_piece(data: st.DataObject) -> None:
    src_shape = data.draw(shapes())
    piece = data.draw(pieces_of("src", src_shape, "dst"))
    room = [data.draw(st.integers(0, 2)) for _ in piece.a_origin]
    dst_shape = tuple(piece.span(d)[1] + r for d, r in enumerate(room))
    src = np.arange(prod(src_shape))
    expected = np.full(dst_shape, -1)
    for a, b in pairs(piece):
        expected[a] = src.reshape(src_shape)[b]
    m = move(piece, dst_shape, src_shape)
    found = np.full(prod(dst_shape), -1)
    for dst, at in m.runs():
        assert (found[dst : dst + m.run] == -1).all(), "an element is written twice"
        found[dst : dst + m.run] = src[at : at + m.run]
    assert np.array_equal(found.reshape(dst_shape), expected)
    assert m.numel == piece.numel
    # the destination is written front to back
    assert all(x + m.run <= y for (x, _), (y, _) in pairwise(m.runs()))


def test_contiguous_on_both_sides_is_one_run() -> None:
    whole = same(View("a", 4, 3, 5), View("b", 4, 3, 5))
    assert move(whole, (4, 3, 5), (4, 3, 5)) == Move(0, 0, (), 60)
    reshaped = same(View("a", 4, 3, 5), View("b", (4, 3), 5))
    assert move(reshaped, (4, 3, 5), (12, 5)) == Move(0, 0, (), 60)


def test_the_heads_of_a_fused_qkv_are_one_run_a_group() -> None:
    qkv = View("qkv", (2, 6, 8), 10)
    k = same(View("k", (2, 8), 10), qkv[:, 4])
    assert move(k, (16, 10), (96, 10)) == Move(0, 320, (Stride(2, 80, 480),), 80)


def test_a_transpose_moves_element_by_element() -> None:
    t = same(View("a", 2, 3), View("b", 3, 2).permuted(1, 0))
    assert list(move(t, (2, 3), (3, 2)).runs()) == [(0, 0), (1, 2), (2, 4), (3, 1), (4, 3), (5, 5)]


def test_a_scalar_is_one_element() -> None:
    assert list(move(same(View("a"), View("b", 4)[3]), (), (4,)).runs()) == [(0, 3)]


def test_steps_of_a_scalar() -> None:
    assert steps(()) == []


@LAWS
@given(st.data())
def test_slabs_tile_the_region_in_order_and_are_contiguous(data: st.DataObject) -> None:
    sizes = data.draw(shapes())
    region = Region(tuple(data.draw(st.integers(0, 3)) for _ in sizes), sizes)
    most = data.draw(st.integers(1, 60))
    flat = {index: i for i, index in enumerate(indices(region))}
    at = 0
    for slab in slabs(region, most):
        assert [flat[index] for index in indices(slab)] == list(range(at, at + slab.numel))
        assert slab.numel <= most
        at += slab.numel
    assert at == region.numel


@pytest.mark.parametrize("most", [0, 1])
def test_a_slab_has_at_least_one_element(most: int) -> None:
    assert [s.offsets for s in slabs(Region((1, 2), (2, 2)), most)] == [(1, 2), (1, 3), (2, 2), (2, 3)]


def test_a_scalar_is_its_own_slab() -> None:
    assert list(slabs(Region((), ()), 1)) == [Region((), ())]
