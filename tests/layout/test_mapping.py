"""Mappings: asking, restricting, composing, and the check that accepts exactly the bijections."""

import re

import numpy as np
import pytest
from hypothesis import given, strategies as st

from convtools.errors import MappingError
from convtools.layout.mapping import Mapping
from convtools.layout.piece import Loop, Piece, block
from convtools.layout.region import Region
from convtools.layout.view import View, same
from tests.layout.brute import LAWS, bijections, composed, indices, pairs, pieces_of, relation


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    at = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Region(at, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, at, strict=True)))


def test_the_random_mappings_do_have_many_pieces_and_nested_spans() -> None:
    """The strategy below reaches the search in `touching`, both ways; shown on two by hand."""
    rows = tuple(block(f"b{i}", "a", Region((i, 0), (1, 2))).inverse() for i in range(12))
    ordered = Mapping({"a": (12, 2)}, {f"b{i}": (1, 2) for i in range(12)}, rows[::-1])
    assert [p.b for p in ordered.touching("a", Region((3, 0), (2, 2)))] == ["b3", "b4"]
    wide = (*rows, block("w", "a", Region((0, 0), (12, 2))).inverse())
    nested = Mapping({"a": (12, 2)}, {**ordered.b, "w": (12, 2)}, wide)
    assert {"b3", "b4", "w"} <= {p.b for p in nested.touching("a", Region((3, 0), (2, 2)))}


@LAWS
@given(st.data())
def test_touching_never_misses(data: st.DataObject) -> None:
    mapping = data.draw(bijections(many=data.draw(st.booleans())))
    name = data.draw(st.sampled_from(sorted(mapping.a)))
    for _ in range(3):
        region = data.draw(regions(mapping.a[name]))
        inside = set(indices(region))
        needed = {p for p in mapping.pieces if p.a == name and any(a in inside for a, _ in pairs(p))}
        found = mapping.touching(name, region)
        assert needed <= set(found)
        assert len(found) == len(set(found))
        assert all(p.a == name for p in found)


@LAWS
@given(st.data())
def test_restrict_keeps_the_elements_of_the_region(data: st.DataObject) -> None:
    mapping = data.draw(bijections(many=data.draw(st.booleans())))
    name = data.draw(st.sampled_from(sorted(mapping.a)))
    region = data.draw(st.one_of(regions(mapping.a[name]), st.just(Region.whole(mapping.a[name]))))
    inside = set(indices(region))
    expected = {
        ("part", tuple(i - o for i, o in zip(a, region.offsets, strict=True)), b, y)
        for n, a, b, y in relation(list(mapping.pieces))
        if n == name and a in inside
    }
    assert relation(list(mapping.restrict(name, region, into="part"))) == expected


def test_asking_does_not_disturb_an_answer_being_read() -> None:
    rows = [block(f"b{i}", "a", Region((i,), (1,))).inverse() for i in range(12)]
    mapping = Mapping({"a": (12,)}, {p.b: (1,) for p in rows}, tuple(rows[::-1]))
    reading = mapping.restrict("a", Region((0,), (12,)), into="part")
    first = next(reading)
    mapping.touching("a", Region((3,), (1,)))
    assert sorted(p.b for p in (first, *reading)) == sorted(p.b for p in rows)
    assert [p.b for p in mapping.of("a")] == [p.b for p in rows[::-1]]


@LAWS
@given(st.data())
def test_inverse_undoes_itself(data: st.DataObject) -> None:
    mapping = data.draw(bijections())
    back = mapping.inverse().inverse()
    assert (back.a, back.b, back.pieces) == (mapping.a, mapping.b, mapping.pieces)
    assert {(b, y, a, x) for a, x, b, y in relation(list(mapping.pieces))} == relation(
        list(mapping.inverse().pieces)
    )


@LAWS
@given(st.data())
def test_compose_is_the_composition_of_the_two_sets(data: st.DataObject) -> None:
    first = data.draw(bijections(many=data.draw(st.booleans()))).inverse()
    second = Mapping(first.b, {}, tuple(data.draw(follow(first.b, "c"))))
    third = data.draw(bijections())
    made = first.compose(second)
    assert (made.a, made.b) == (first.a, second.b)
    expected = composed(relation(list(first.pieces)), relation(list(second.pieces)))
    assert relation(list(made.pieces)) == expected
    # with a mapping that shares no tensor nothing is left
    assert first.compose(Mapping({"z": (1,)}, third.b, ())).pieces == ()


@st.composite
def follow(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]], to: str) -> list[Piece]:
    """Pieces from tensors of these shapes to others, one or two a tensor."""
    out = []
    for name, shape in shapes.items():
        for i in range(draw(st.integers(1, 2))):
            out.append(draw(pieces_of(name, shape, f"{to}.{name}.{i}")).inverse())
    return out


@LAWS
@given(st.data())
def test_compose_is_associative_on_elements(data: st.DataObject) -> None:
    first = data.draw(bijections()).inverse()
    second = Mapping(first.b, *data.draw(mapped(first.b, "c")))
    third = Mapping(second.b, *data.draw(mapped(second.b, "d")))
    left = first.compose(second).compose(third)
    right = first.compose(second.compose(third))
    assert relation(list(left.pieces)) == relation(list(right.pieces))


@st.composite
def mapped(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]], to: str):
    pieces = draw(follow(shapes, to))
    ends = {p.b: tuple(p.inverse().span(d)[1] for d in range(len(p.b_origin))) for p in pieces}
    return ends, tuple(pieces)


@LAWS
@given(st.data())
def test_composing_with_the_inverse_is_the_identity(data: st.DataObject) -> None:
    mapping = data.draw(bijections())
    there_and_back = mapping.compose(mapping.inverse())
    assert all((a, x) == (b, y) for a, x, b, y in relation(list(there_and_back.pieces)))
    there_and_back.check()


# --- check -----------------------------------------------------------------------------------------


def fault_by_counting(mapping: Mapping) -> tuple[str, str] | None:
    """(tensor, the words for what is wrong): the first fault that `check` must report."""
    for shapes, pieces in ((mapping.a, mapping.pieces), (mapping.b, [p.inverse() for p in mapping.pieces])):
        for name, shape in shapes.items():
            own = [p for p in pieces if p.a == name]
            held: dict[tuple[int, ...], list[str]] = {}
            for p in own:
                for a, _ in pairs(p):
                    held.setdefault(a, []).append(p.b)
            outside = [a for a in held if not all(0 <= i < n for i, n in zip(a, shape, strict=True))]
            if outside:
                return name, "a piece reaches outside dim"
            for index in np.ndindex(*shape):
                holders = held.get(index, [])
                if len(holders) != 1:
                    return name, f"element {list(index)} is held {len(holders)} times"
    return None


def fault_found(mapping: Mapping) -> tuple[str, str] | None:
    """What `check` reports, in the same words."""
    try:
        mapping.check()
    except MappingError as error:
        name = re.match(r"`(\w+)`: ", error.what)
        assert name, error.what
        if "reaches outside" in error.what:
            return name[1], "a piece reaches outside dim"
        element = re.search(r"element (\[[\d, ]*\]) is held by (.*)", error.what)
        assert element, error.what
        count = 0 if element[2] == "nothing" else element[2].count("`") // 2
        assert error.found == f"{count} times"
        return name[1], f"element {element[1]} is held {count} times"
    return None


@LAWS
@given(st.data())
def test_check_accepts_bijections(data: st.DataObject) -> None:
    mapping = data.draw(bijections(many=data.draw(st.booleans())))
    assert fault_by_counting(mapping) is None
    mapping.check()
    mapping.inverse().check()


@LAWS
@given(st.data())
def test_check_names_the_first_element_that_a_gap_leaves(data: st.DataObject) -> None:
    mapping = data.draw(bijections(exact=False))  # side b has room that nothing fills
    assert fault_found(mapping) == fault_by_counting(mapping)


@LAWS
@given(st.data())
def test_check_names_the_first_element_that_a_mutation_breaks(data: st.DataObject) -> None:
    mapping = data.draw(bijections())
    pieces = list(mapping.pieces)
    i = data.draw(st.integers(0, len(pieces) - 1))
    p = pieces[i]
    mutation = data.draw(st.sampled_from(["drop", "double", "shift a", "shift b", "shrink", "swap origin"]))
    if mutation == "drop":
        del pieces[i]
    elif mutation == "double":
        pieces.append(p)
    elif mutation == "shrink":
        if not p.loops:
            return
        k = data.draw(st.integers(0, len(p.loops) - 1))
        loops = tuple(x._replace(n=x.n - 1) if j == k else x for j, x in enumerate(p.loops))
        pieces[i] = p._replace(loops=loops)
    elif mutation == "swap origin":
        other = pieces[data.draw(st.integers(0, len(pieces) - 1))]
        if len(other.a_origin) != len(p.a_origin):
            return
        pieces[i] = p._replace(a_origin=other.a_origin)
    else:
        side, by = "a_origin" if mutation == "shift a" else "b_origin", data.draw(st.sampled_from([-1, 1]))
        at = list(getattr(p, side))
        d = data.draw(st.integers(0, len(at) - 1)) if at else None
        if d is None:
            return
        at[d] += by
        pieces[i] = p._replace(**{side: tuple(at)})
    broken = Mapping(mapping.a, mapping.b, tuple(pieces))
    expected = fault_by_counting(broken)
    assert fault_found(broken) == expected
    if mutation != "swap origin":
        assert expected is not None


def test_the_error_says_who_holds_the_element() -> None:
    a = View("linear_qkv.weight", 6, 2)
    q, k = same(a[:4], View("q", 4, 2)), same(a[3:], View("k", 3, 2))
    with pytest.raises(MappingError) as caught:
        Mapping({"linear_qkv.weight": (6, 2)}, {"q": (4, 2), "k": (3, 2)}, (q, k)).check()
    assert str(caught.value) == (
        "`linear_qkv.weight`: element [3, 0] is held by `q`, `k`\n"
        "  expected: every element held exactly once\n"
        "  found: 2 times"
    )


def test_a_tensor_that_no_piece_holds_is_at_fault_on_either_side() -> None:
    with pytest.raises(MappingError, match=r"`lost`: element \[0\] is held by nothing"):
        Mapping({"lost": (3,)}, {}, ()).check()
    with pytest.raises(MappingError, match=r"`lost`: element \[0, 0\] is held by nothing"):
        Mapping({}, {"lost": (3, 1)}, ()).check()


def test_a_piece_of_an_undeclared_tensor_is_refused() -> None:
    p = same(View("a", 3), View("b", 3))
    with pytest.raises(MappingError, match="`b` is in a piece but not among the tensors of its side"):
        Mapping({"a": (3,)}, {}, (p,)).check()
    with pytest.raises(MappingError, match="`a` is in a piece but not among the tensors of its side"):
        Mapping({}, {"b": (3,)}, (p,)).check()


def test_a_piece_outside_its_tensor_is_refused_with_both_numbers() -> None:
    p = same(View("a", 4), View("b", 4))
    with pytest.raises(MappingError) as caught:
        Mapping({"a": (3,)}, {"b": (4,)}, (p,)).check()
    assert str(caught.value) == (
        "`a`: a piece reaches outside dim 0\n"
        "  expected: 0 <= index < 3\n"
        "  found: 0 <= index < 4 (other side: `b`)"
    )


@pytest.mark.parametrize("dims", [1, 3])
def test_a_piece_with_another_number_of_dims_is_refused(dims: int) -> None:
    piece = Piece("a", "b", (0,) * dims, (0, 0), (Loop(3, 0, 1, 0, 1),))
    with pytest.raises(MappingError, match=rf"`a`: a piece has {dims} dims, the tensor 2"):
        Mapping({"a": (3, 1)}, {"b": (3, 1)}, (piece,)).check()


def test_pieces_of_nothing_do_not_count() -> None:
    a, b = View("a", 4, 2), View("b", 4, 2)
    pieces = (same(a[:2], b[:2]), same(a[2:2], b[2:2]), same(a[2:], b[2:]), same(a[4:], b[4:]))
    mapping = Mapping({"a": (4, 2)}, {"b": (4, 2)}, pieces)
    mapping.check()
    whole = same(a, b)
    assert relation(list(mapping.compose(mapping.inverse()).pieces)) == relation([whole.renamed("a", "a")])
