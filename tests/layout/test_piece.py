"""Pieces against the sets of pairs that they stand for."""

from hypothesis import given, strategies as st

from convtools.layout.piece import Loop, Piece, block, meet, merged
from convtools.layout.region import Region
from convtools.layout.view import View, same
from tests.layout.brute import LAWS, composed, indices, pairs, pieces_of, relation, shapes


def loops_nest(piece: Piece) -> bool:
    """On both sides, a step along a dim exceeds the reach of the smaller steps inside it."""
    for side in (piece, piece.inverse()):
        for dim in range(len(side.a_origin)):
            reach = 0
            for loop in sorted((x for x in side.loops if x.a_dim == dim), key=lambda x: x.a_step):
                if loop.a_step <= reach:
                    return False
                reach += (loop.n - 1) * loop.a_step
    return True


@st.composite
def meeting(draw: st.DrawFn) -> tuple[Piece, Piece, Piece]:
    """Pieces a ~ b, b ~ c and c ~ d of three tensors that overlap at random."""
    b = draw(shapes())
    p = draw(pieces_of("b", b, "a"))
    q = draw(pieces_of("b", b, "c")).inverse()
    ends = [q.inverse().span(d)[1] for d in range(len(q.b_origin))]
    r = draw(pieces_of("c", tuple(ends), "d")).inverse()
    return p, q, r


@LAWS
@given(st.data())
def test_inverse_exchanges_the_pairs_and_undoes_itself(data: st.DataObject) -> None:
    p = data.draw(pieces_of("b", data.draw(shapes()), "a"))
    assert p.inverse().inverse() == p
    assert {(b, a) for a, b in pairs(p)} == set(pairs(p.inverse()))
    assert p.numel == p.inverse().numel == len(set(pairs(p)))


@LAWS
@given(st.data())
def test_span_and_extent_are_the_smallest_that_hold_the_piece(data: st.DataObject) -> None:
    p = data.draw(pieces_of("b", data.draw(shapes()), "a"))
    held = [a for a, _ in pairs(p)]
    bounds = [(min(at), max(at) + 1) for at in zip(*held, strict=True)]
    assert [p.span(d) for d in range(len(p.a_origin))] == bounds
    assert p.extent() == Region(tuple(lo for lo, _ in bounds), tuple(hi - lo for lo, hi in bounds))


@LAWS
@given(meeting())
def test_meet_is_the_composition_of_the_two_sets(three: tuple[Piece, Piece, Piece]) -> None:
    p, q, _ = three
    met = list(meet(p, q))
    assert relation(met) == composed(relation([p]), relation([q]))
    assert all(loops_nest(m) for m in met)
    assert all(loop.n > 1 for m in met for loop in m.loops)


@LAWS
@given(meeting())
def test_meet_mirrors_under_inversion(three: tuple[Piece, Piece, Piece]) -> None:
    p, q, _ = three
    mirrored = [m.inverse() for m in meet(q.inverse(), p.inverse())]
    assert relation(mirrored) == relation(list(meet(p, q)))


@LAWS
@given(meeting())
def test_meet_is_associative_on_elements(three: tuple[Piece, Piece, Piece]) -> None:
    p, q, r = three
    left = [x for m in meet(p, q) for x in meet(m, r)]
    right = [x for m in meet(q, r) for x in meet(p, m)]
    assert relation(left) == relation(right)
    assert relation(left) == composed(composed(relation([p]), relation([q])), relation([r]))


@LAWS
@given(st.data())
def test_meeting_the_whole_changes_nothing(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    p = data.draw(pieces_of("b", shape, "a"))
    assert relation(list(meet(p, block("b", "b", Region.whole(shape))))) == relation([p])


@LAWS
@given(st.data())
def test_a_block_is_a_region_counted_from_its_corner(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    at = [data.draw(st.integers(0, n - 1)) for n in shape]
    region = Region(
        tuple(at), tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, at, strict=True))
    )
    expected = {(tuple(i - o for i, o in zip(x, at, strict=True)), x) for x in indices(region)}
    assert set(pairs(block("part", "whole", region))) == expected


def test_pieces_without_loops_meet_only_at_the_same_element() -> None:
    p, q = Piece("a", "b", (), (3,), ()), Piece("b", "c", (3,), (5, 6), ())
    assert list(meet(p, q)) == [Piece("a", "c", (), (5, 6), ())]
    assert list(meet(p, q._replace(a_origin=(4,)))) == []


def test_a_run_is_found_inside_an_interleave() -> None:
    # Rows 5..8 of four blocks of three rows, the blocks apart in c: the end of one, a whole, none more.
    p = block("a", "b", Region((5,), (4,)))
    q = Piece("b", "c", (0,), (0,), (Loop(4, 0, 3, 0, 10), Loop(3, 0, 1, 0, 1)))
    assert relation(list(meet(p, q))) == {
        ("a", (0,), "c", (12,)),
        ("a", (1,), "c", (20,)),
        ("a", (2,), "c", (21,)),
        ("a", (3,), "c", (22,)),
    }


def test_a_run_meets_an_interleave_in_few_pieces_from_either_side() -> None:
    # 1,000 query groups of 6 heads of 8 rows; the run begins and ends inside a head.
    heads = same(View("q", (1000, 4, 8)), View("qkv", (1000, 6, 8))[:, :4])
    run = block("rank", "qkv", Region((100,), (45_000,)))
    assert len(list(meet(run, heads.inverse()))) <= 5
    assert len(list(meet(heads, run.inverse()))) <= 5


def test_merged_joins_only_what_continues_on_both_sides() -> None:
    assert merged([Loop(2, 0, 12, 0, 12), Loop(1, 1, 1, 1, 1), Loop(3, 0, 4, 0, 4)]) == (Loop(6, 0, 4, 0, 4),)
    apart = [Loop(2, 0, 12, 0, 24), Loop(3, 0, 4, 0, 4)]
    assert merged(apart) == tuple(apart)
    other_dim = [Loop(2, 0, 12, 1, 12), Loop(3, 0, 4, 0, 4)]
    assert merged(other_dim) == tuple(other_dim)
