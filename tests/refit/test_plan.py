"""Laws of the plan: every byte of every tensor in one place, aligned, within a bucket; one digest."""

import pytest
from hypothesis import given, strategies as st

from convtools.errors import UsageError
from convtools.refit.coverage import Coverage
from convtools.refit.errors import RefitError
from convtools.refit.plan import ALIGN, Tensor, make_plan
from convtools.stores.base import DTYPE_NBYTES

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(st.sampled_from(sorted(DTYPE_NBYTES)), SHAPES), min_size=1, max_size=12)


@given(TENSORS, st.integers(1, 20))
def test_every_byte_lies_in_one_place(rows: list[tuple[str, tuple[int, ...]]], size: int) -> None:
    tensors = [Tensor(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(rows)]
    plan = make_plan(tensors, size * ALIGN)
    coverage = Coverage(plan)
    for bucket in plan.buckets:
        end = 0
        for part in bucket.parts:
            coverage.add(part.tensor, part.start, part.start + part.nbytes)
            itemsize = DTYPE_NBYTES[tensors[part.tensor].dtype]
            assert part.offset % ALIGN == 0 and part.offset >= end
            assert part.nbytes == part.region.numel * itemsize > 0
            end = part.offset + part.nbytes
        assert bucket.nbytes == end <= plan.bucket_bytes
    coverage.check_whole()
    assert make_plan(tensors, size * ALIGN).digest == plan.digest


def test_regions_are_the_runs_they_say() -> None:
    import numpy as np

    plan = make_plan([Tensor("a", "I32", (7, 5, 11)), Tensor("b", "I32", (64,))], 512)
    numbers = np.arange(7 * 5 * 11, dtype="i4").reshape(7, 5, 11)
    flat = numbers.reshape(-1).view("u1")
    for part in (p for b in plan.buckets for p in b.parts if p.tensor == 0):
        of = tuple(slice(o, e) for o, e in zip(part.region.offsets, part.region.ends, strict=True))
        assert numbers[of].tobytes() == flat[part.start : part.start + part.nbytes].tobytes()


def test_the_digest_tells_plans_apart() -> None:
    one = [Tensor("a", "F32", (4, 2)), Tensor("b", "F32", (2,))]
    two = [Tensor("b", "F32", (2,))]
    others = [make_plan(one, 512), make_plan(one[::-1], 1024)] + [
        make_plan([other, *two], 1024)
        for other in (Tensor("a", "F32", (2, 4)), Tensor("a", "I32", (4, 2)), Tensor("c", "F32", (4, 2)))
    ]
    assert len({p.digest for p in others} | {make_plan(one, 1024).digest}) == 6


@pytest.mark.parametrize("size", [0, -256, 100, True, 1.5])
def test_a_bucket_is_a_multiple_of_256(size: int) -> None:
    with pytest.raises(UsageError, match="multiple of 256"):
        make_plan([Tensor("a", "F32", (4,))], size)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "no tensors"),
        ([Tensor("a", "F32", (4,)), Tensor("a", "F32", (4,))], "`a` is there twice"),
        ([Tensor("a", "F4", (4,))], "dtype that is not known"),
        ([Tensor("a", "F32", (1 << 60,))], "cannot be of that shape"),
        ([Tensor("a", "F32", (-1,))], "cannot be of that shape"),
    ],
)
def test_what_cannot_be_planned(tensors: list[Tensor], message: str) -> None:
    with pytest.raises(RefitError, match=message):
        make_plan(tensors, 256)


def test_a_plan_of_made_up_size_is_refused_before_it_is_made() -> None:
    with pytest.raises(UsageError, match="too small for this model"):
        make_plan([Tensor("a", "U8", (1 << 49,))], 256)


def test_coverage_names_what_is_missing_and_what_came_twice() -> None:
    plan = make_plan([Tensor("a", "U8", (10,)), Tensor("b", "U8", (4,)), Tensor("e", "U8", (0,))], 256)
    coverage = Coverage(plan)
    for start, end in ((6, 10), (0, 2), (2, 4)):
        coverage.add(0, start, end)
    with pytest.raises(RefitError, match=r"`a` \(8 of 10 bytes\), `b` \(0 of 4 bytes\)"):
        coverage.check_whole()
    for start, end in ((3, 5), (5, 7), (0, 10), (6, 7), (4, 4), (9, 11), (-1, 0)):
        with pytest.raises(RefitError, match=r"given twice|outside"):
            coverage.add(0, start, end)
    coverage.add(0, 4, 6)
    coverage.add(1, 0, 4)
    coverage.check_whole()
