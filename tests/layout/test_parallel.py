"""Sharding of one tensor, and the order of ranks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from convtools.errors import ParallelError
from convtools.families.rank_tensors import Placement
from convtools.families.table import Param
from convtools.layout.parallel import Cut, ParallelLayout, Part, Rank, even_stages
from convtools.layout.region import Region
from tests.layout.brute import LAWS


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Cut, tuple[int, ...], int]:
    """(a cut of one to five parts, the shape it cuts, a tp that divides every part)."""
    tp = draw(st.integers(1, 4))
    parts = tuple(
        Part(f"p{i}", (("units", tp * draw(st.integers(1, 3))), ("rows a unit", draw(st.integers(1, 3)))))
        for i in range(draw(st.integers(1, 5)))
    )
    dims = draw(st.integers(1, 3))
    dim = draw(st.integers(0, dims - 1))
    length = sum(p.size for p in parts)
    shape = tuple(length if d == dim else draw(st.integers(1, 3)) for d in range(dims))
    return Cut(dim, parts), shape, tp


def at(region: Region) -> tuple[slice, ...]:
    return tuple(slice(o, e) for o, e in zip(region.offsets, region.ends, strict=True))


@LAWS
@given(cuts())
def test_shard_cuts_each_part_evenly_and_joins_them_a_rank(case: tuple[Cut, tuple[int, ...], int]) -> None:
    cut, shape, tp = case
    whole = np.arange(np.prod(shape)).reshape(shape)
    edges = np.cumsum([p.size for p in cut.parts])[:-1]
    by_part = [np.split(part, tp, cut.dim) for part in np.split(whole, edges, cut.dim)]
    for rank in range(tp):
        local = np.full(cut.shard_shape(shape, tp), -1)
        for src, dst in cut.shard(shape, tp, rank):
            assert (local[at(dst)] == -1).all(), "a part is written twice"
            local[at(dst)] = whole[at(src)]
        assert np.array_equal(local, np.concatenate([shards[rank] for shards in by_part], cut.dim))


@LAWS
@given(cuts())
def test_unsharding_shards_is_the_identity(case: tuple[Cut, tuple[int, ...], int]) -> None:
    cut, shape, tp = case
    whole = np.arange(np.prod(shape)).reshape(shape)
    back = np.full(shape, -1)
    for rank in range(tp):
        local = np.full(cut.shard_shape(shape, tp), -1)
        for src, dst in cut.shard(shape, tp, rank):
            local[at(dst)] = whole[at(src)]
        for src, dst in cut.shard(shape, tp, rank):
            assert (back[at(src)] == -1).all(), "an element is held by two ranks"
            back[at(src)] = local[at(dst)]
    assert np.array_equal(back, whole)


def test_a_cut_of_five_parts_written_out() -> None:
    sizes = {"z": 4, "x": 4, "B": 2, "C": 2, "dt": 2}
    cut = Cut(0, tuple(Part(name, (("n", n),)) for name, n in sizes.items()))
    rows = [[range(src.offsets[0], src.ends[0]) for src, _ in cut.shard((14, 3), 2, r)] for r in (0, 1)]
    assert rows[0] == [range(0, 2), range(4, 6), range(8, 9), range(10, 11), range(12, 13)]
    assert rows[1] == [range(2, 4), range(6, 8), range(9, 10), range(11, 12), range(13, 14)]
    assert cut.shard_shape((14, 3), 2) == (7, 3)


def test_a_tp_that_cuts_a_unit_is_refused_naming_both_numbers() -> None:
    cut = Cut(0, (Part("B", (("n_groups", 2), ("ssm_state_size", 8))),))
    cut.check(2, tensor="in_proj.weight")
    with pytest.raises(ParallelError) as caught:  # 16 rows could be cut in 4, but not 2 groups
        cut.check(4, tensor="in_proj.weight")
    assert str(caught.value) == (
        "tp=4 does not divide n_groups=2\n  where: `in_proj.weight`\n  what to do: choose a tp that divides 2"
    )


def test_further_conditions_of_a_cut() -> None:
    cut = Cut(0, (Part("", (("rows", 64),)),), divides=(("heads", 8),), nests=(("groups", 2),))
    for tp in (1, 2, 4, 8):
        cut.check(tp, tensor="t")
    with pytest.raises(ParallelError, match="etp=16 does not divide heads=8"):
        cut.check(16, tensor="t", axis="etp")
    nests = Cut(0, (Part("", (("rows", 72),)),), nests=(("groups", 6),))
    for tp in (1, 2, 3, 6, 12, 18):
        nests.check(tp, tensor="t")
    with pytest.raises(ParallelError, match="tp=4 neither divides groups=6 nor is a multiple of it"):
        nests.check(4, tensor="t")


# (tp, pp, ep, etp) -> (tp, pp, ep, etp) of each rank, written by hand: tp and etp run fastest, ep is
# counted in steps of etp, and pp is slowest.
RANKS = {
    (1, 1, 1, 1): [(0, 0, 0, 0)],
    (2, 1, 1, 1): [(0, 0, 0, 0), (1, 0, 0, 0)],
    (2, 1, 2, 1): [(0, 0, 0, 0), (1, 0, 1, 0)],
    (2, 1, 2, 2): [(0, 0, 0, 0), (1, 0, 0, 1), (0, 0, 1, 0), (1, 0, 1, 1)],
    (1, 1, 1, 2): [(0, 0, 0, 0), (0, 0, 0, 1)],
    (1, 1, 2, 2): [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 1, 1)],
    (4, 1, 2, 2): [(0, 0, 0, 0), (1, 0, 0, 1), (2, 0, 1, 0), (3, 0, 1, 1)],
    (4, 1, 2, 1): [(0, 0, 0, 0), (1, 0, 1, 0), (2, 0, 0, 0), (3, 0, 1, 0)],
    (2, 1, 3, 1): [(0, 0, 0, 0), (1, 0, 1, 0), (0, 0, 2, 0), (1, 0, 0, 0), (0, 0, 1, 0), (1, 0, 2, 0)],
    (2, 1, 4, 1): [(0, 0, 0, 0), (1, 0, 1, 0), (0, 0, 2, 0), (1, 0, 3, 0)],
    (2, 1, 1, 4): [(0, 0, 0, 0), (1, 0, 0, 1), (0, 0, 0, 2), (1, 0, 0, 3)],
    (1, 3, 1, 1): [(0, 0, 0, 0), (0, 1, 0, 0), (0, 2, 0, 0)],
    (2, 2, 2, 1): [(0, 0, 0, 0), (1, 0, 1, 0), (0, 1, 0, 0), (1, 1, 1, 0)],
}


@pytest.mark.parametrize(("sizes", "expected"), RANKS.items(), ids=lambda x: str(x)[:14])
def test_ranks_in_megatrons_order(sizes: tuple[int, int, int, int], expected: list[tuple[int, ...]]) -> None:
    tp, pp, ep, etp = sizes
    layout = ParallelLayout(tp=tp, pp=pp, ep=ep, etp=etp)
    assert list(layout.ranks()) == [Rank(*r) for r in expected]
    assert layout.stage_size * pp == len(expected)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_every_shard_of_both_meshes_is_held(tp: int, pp: int, ep: int, etp: int) -> None:
    ranks = list(ParallelLayout(tp=tp, pp=pp, ep=ep, etp=etp).ranks())
    assert len(ranks) == len(set(ranks)), "two ranks hold the same"
    assert {(r.tp, r.pp) for r in ranks} == {(t, p) for t in range(tp) for p in range(pp)}
    assert {(r.ep, r.etp, r.pp) for r in ranks} == {
        (e, t, p) for e in range(ep) for t in range(etp) for p in range(pp)
    }


@given(st.integers(1, 6), st.integers(1, 20))
def test_even_stages_hold_every_layer_once_in_order(pp: int, each: int) -> None:
    stages = even_stages(pp * each, pp)
    assert [layer for stage in stages for layer in stage] == list(range(pp * each))
    assert {len(stage) for stage in stages} == {each}
    assert len(stages) == pp


def test_uneven_stages_are_refused_naming_both_numbers() -> None:
    with pytest.raises(ParallelError, match="pp=5 does not divide the number of layers=12"):
        even_stages(12, 5)


@pytest.mark.parametrize("axis", ["tp", "pp", "ep", "etp", "vpp"])
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one_are_refused(axis: str, size: int) -> None:
    change: dict[str, Any] = {axis: size}
    with pytest.raises(ParallelError, match=f"{axis}={size} is no size"):
        replace(ParallelLayout(), **change)
    with pytest.raises(ParallelError, match=f"pp={size} is no size"):
        even_stages(12, size)


@pytest.mark.parametrize(
    ("pp", "stages", "said"),
    [
        (2, ((0, 1, 2),), "pp=2, but 1 stages of layers are given"),
        (1, ((0,), (1, 2)), "pp=1, but 2 stages of layers are given"),
        (2, ((0, 1), ()), "layer 2 in none"),
        (2, ((0, 1), (1, 2)), "layer 1 in 2"),
        (1, ((0, 1, 2, 2),), "layer 2 in 2"),
        (1, ((),), "layer 0 in none, layer 1 in none, layer 2 in none"),
    ],
)
def test_stages_hold_each_layer_exactly_once(pp: int, stages: tuple[tuple[int, ...], ...], said: str) -> None:
    params = [Param(f"decoder.layers.{i}.x", (4,), stage=i) for i in range(3)]
    Placement(params, ParallelLayout(pp=2, stages=((0, 2), (1,))), tied=False)
    with pytest.raises(ParallelError) as caught:
        Placement(params, ParallelLayout(pp=pp, stages=stages), tied=False)
    assert said in str(caught.value)


def test_virtual_stages_interleave_among_ranks() -> None:
    params = [Param(f"decoder.layers.{i}.x", (4,), stage=i) for i in range(6)]
    layout = ParallelLayout(pp=2, vpp=2, stages=((0,), (1, 2), (3,), (4, 5)))
    assert [layout.layers(pp) for pp in (0, 1)] == [((0,), (3,)), ((1, 2), (4, 5))]
    place = Placement(params, layout, tied=False)
    assert [place.stage(p) for p in params] == [0, 1, 1, 2, 3, 3]
    found = [
        [(h.param.name, h.local_layer) for h in place.held(rank, chunk)]
        for rank in layout.ranks()
        for chunk in range(2)
    ]
    assert found == [
        [("decoder.layers.0.x", 0)],
        [("decoder.layers.3.x", 0)],
        [("decoder.layers.1.x", 0), ("decoder.layers.2.x", 1)],
        [("decoder.layers.4.x", 0), ("decoder.layers.5.x", 1)],
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vpp": 3}, "pp=2 and vpp=3, but 4 stages of layers are given"),
        ({"vpp": 1}, "pp=2, but 4 stages of layers are given"),
        ({"mtp": 4}, "mtp=4 is none of the 4 stages"),
        ({"final_norm": -1}, "final_norm=-1 is none of the 4 stages"),
    ],
)
def test_stages_that_do_not_fit_the_mesh(change: dict[str, Any], said: str) -> None:
    layout = replace(ParallelLayout(pp=2, vpp=2, stages=((0,), (1,), (2,), ())), **change)
    with pytest.raises(ParallelError) as caught:
        layout.check_stages(range(3))
    assert said in str(caught.value)
