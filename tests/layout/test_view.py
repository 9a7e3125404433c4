"""Views against numpy: reshape, index, transpose."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from convtools.layout.view import View, same
from tests.layout.brute import LAWS, Seen, pairs, seen, shapes, spread


def flat_of(view: View) -> np.ndarray:
    """Flat positions of a view's elements, from its axes alone."""
    steps = [int(np.prod(view.shape[d + 1 :])) for d in range(len(view.shape))]
    at = np.full([x.size for x in view.axes], sum(o * s for o, s in zip(view.origin, steps, strict=True)))
    for i, axis in enumerate(view.axes):
        along = np.arange(axis.size) * axis.step * steps[axis.dim]
        at = at + along.reshape([-1 if j == i else 1 for j in range(len(view.axes))])
    return at


@LAWS
@given(st.data())
def test_a_view_is_numpys_reshape_index_and_transpose(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    view, flat = data.draw(seen("t", shape))
    assert view.shape == shape
    assert np.array_equal(flat_of(view), flat)


@LAWS
@given(st.data())
def test_same_pairs_elements_in_reading_order(data: st.DataObject) -> None:
    a: Seen = data.draw(seen("a", data.draw(shapes())))
    b = data.draw(spread("b", [x.size for x in a.view.axes]))
    piece = same(a.view, b)
    expected = zip(a.flat.ravel().tolist(), flat_of(b).ravel().tolist(), strict=True)
    found = [
        (int(np.ravel_multi_index(x, a.view.shape)), int(np.ravel_multi_index(y, b.shape)))
        for x, y in pairs(piece)
    ]
    assert len(found) == piece.numel == a.flat.size
    assert sorted(found) == sorted(expected)


def test_a_view_narrowed_twice_is_narrowed_once() -> None:
    qkv = View("qkv", (2, 6, 8), 3)
    assert qkv[1][2:5][1] == qkv[1, 3]
    assert qkv[:, 2:][:, 1:3] == qkv[:, 3:5]
    assert qkv[:, -2:] == qkv[:, 4:6]


def test_a_scalar_is_one_element() -> None:
    piece = same(View("a"), View("b", 4)[2])
    assert pairs(piece) == [((), (2,))]
    assert piece.numel == 1


def test_axes_of_one_step_do_not_count() -> None:
    assert pairs(same(View("conv", 3, 1, 2), View("flat", 3, 2)))[3] == ((1, 0, 1), (1, 1))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (4, "`t`: index 4 is outside axis 0 of size 4"),
        (-1, "`t`: index -1 is outside axis 0 of size 4"),
        (slice(0, 5), "`t`: slice(0, 5, None) does not fit axis 0 of size 4"),
        (slice(0, 4, 2), "`t`: slice(0, 4, 2) does not fit axis 0 of size 4"),
        (slice(3, 1), "`t`: slice(3, 1, None) does not fit axis 0 of size 4"),
        (slice(7, None), "`t`: slice(7, None, None) does not fit axis 0 of size 4"),
        ((slice(None), 5), "`t`: index 5 is outside axis 1 of size 3"),
        ((0, 0, 0), "`t` has 2 axes, 3 indices given"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(index: object, message: str) -> None:
    with pytest.raises(IndexError) as caught:
        View("t", 4, 3)[index]  # type: ignore[index]
    assert str(caught.value) == message


def test_an_order_that_is_no_permutation_is_refused() -> None:
    with pytest.raises(IndexError, match=r"`t`: \(0, 0\) is no order of its 2 axes"):
        View("t", 4, 3).permuted(0, 0)


def test_views_of_different_sizes_are_not_the_same() -> None:
    with pytest.raises(ValueError, match=r"`a` \[4, 3\] and `b` \[3, 4\] differ in shape"):
        same(View("a", 4, 3), View("b", 3, 4))
