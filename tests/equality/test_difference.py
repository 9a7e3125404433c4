"""The numbers of a difference, each against what is worked out by hand or by torch."""

from typing import Any

import numpy as np
import pytest
import torch

from convtools.equality.difference import Meter, bits_differ
from convtools.equality.numbers import EIGHT_BIT, distance, special, values, widened, wider
from convtools.equality.options import CompareOptions

TORCH: dict[str, Any] = {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16, "F16": torch.float16,
}  # fmt: skip


def meter(a: Any, b: Any, dtype: str, **options: Any) -> Meter:
    found = Meter(dtype, CompareOptions(**options))
    found.add(np.asarray(a).tobytes(), np.asarray(b).tobytes(), 0)
    return found


def f32(*numbers: float) -> "np.ndarray[Any, Any]":
    return np.array(numbers, "<f4")


def test_numbers_of_a_difference() -> None:
    found = meter(f32(1, 2, 4, -8), f32(1, 2.5, 4, -9), "F32")
    assert (found.different, found.first, found.max_abs) == (2, 1, 1.0)
    assert found.max_rel == pytest.approx(0.2)
    assert found.max_ulp == 2**21  # a quarter of the octave from 2 to 4
    assert found.median_ulp() == (2**21 + 2**20) / 2


@pytest.mark.parametrize("dtype", TORCH)
def test_values_and_specials_are_those_of_torch(dtype: str) -> None:
    """All 2^8 or 2^16 codes."""
    width = 1 if dtype in EIGHT_BIT else 2
    raw = np.arange(1 << 8 * width, dtype=f"<u{width}")
    theirs = torch.frombuffer(bytearray(raw.tobytes()), dtype=TORCH[dtype]).double().numpy()
    nan, inf = special(raw, dtype)
    assert np.array_equal(nan, np.isnan(theirs)) and np.array_equal(inf, np.isinf(theirs))
    assert np.array_equal(values(raw, dtype)[~nan], theirs[~nan])


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F8_E4M3", "F8_E5M2"])
def test_a_step_of_one_is_the_next_number(dtype: str) -> None:
    width = 1 if dtype in EIGHT_BIT else 2
    raw = np.arange(1 << 8 * width, dtype=f"<u{width}")
    raw = raw[~special(raw, dtype)[0]]
    raw = raw[np.argsort(values(raw, dtype), kind="stable")]
    steps, numbers = distance(raw[:-1], raw[1:], dtype), values(raw, dtype)
    assert np.array_equal(steps, (numbers[:-1] != numbers[1:]).astype(int))  # the two zeros are one


@pytest.mark.parametrize(
    ("a", "b", "steps"),
    [
        (1.0, np.nextafter(1.0, 2.0), 1), (0.0, -0.0, 0), (-5e-324, 5e-324, 2),
        (-1.7976931348623157e308, 1.7976931348623157e308, 2 * 0x7FEFFFFFFFFFFFFF),
    ],
)  # fmt: skip
def test_steps_of_fp64(a: float, b: float, steps: int) -> None:
    found = meter(np.array([a]), np.array([b]), "F64")
    assert (found.different, found.max_ulp) == (1, steps)


def test_integers() -> None:
    assert meter(np.array([-3, 7], "<i4"), np.array([4, 7], "<i4"), "I32").max_ulp == 7
    huge = meter(np.array([0], "<u8"), np.array([2**64 - 1], "<u8"), "U64")
    assert huge.max_ulp == 2**64 - 1
    assert meter(np.array([-(2**63)], "<i8"), np.array([2**63 - 1], "<i8"), "I64").max_ulp == 2**64 - 1


def test_complex_numbers_count_once() -> None:
    found = meter(np.array([1 + 1j, 2], "<c8"), np.array([1 + 1j, 3 + 1j], "<c8"), "C64")
    assert (found.unequal, found.different, found.first) == (1, 1, 1)


NAN, PAYLOAD = 0x7FC00000, 0x7FC00001
INF = 0x7F800000


@pytest.mark.parametrize(
    ("a", "b", "exact", "tolerant"),
    [
        (NAN, NAN, True, True), (NAN, PAYLOAD, False, True), (NAN, 0x3F800000, False, False),
        (0x3F800000, NAN, False, False), (0, 0x80000000, False, True), (INF, INF | 0x80000000, False, False),
        (INF, 0x7F7FFFFF, False, False), (INF, INF, True, True), (0x3F800000, 0x3F800001, False, True),
    ],
)  # fmt: skip
def test_B94_NaN_infinity_and_zeros(a: int, b: int, exact: bool, tolerant: bool) -> None:
    """Bytes by default; with a tolerance NaN only in the same place, infinity only the same, zeros alike."""
    left, right = np.array([a], "<u4"), np.array([b], "<u4")
    assert (meter(left, right, "F32").different == 0) is exact
    assert (meter(left, right, "F32", ulp=1).different == 0) is tolerant
    assert (meter(left, right, "F32", atol=1e-3).different == 0) is tolerant
    assert (meter(right, left, "F32", atol=1e-3).different == 0) is tolerant
    both = meter(left, right, "F32")
    assert both.nan == [int(a in (NAN, PAYLOAD)), int(b in (NAN, PAYLOAD))]
    assert both.inf == [int(a & 0x7FFFFFFF == INF), int(b & 0x7FFFFFFF == INF)]


def test_tolerances_have_sharp_edges() -> None:
    a, b = f32(1, 1, 1), np.array([0x3F800001, 0x3F800002, 0x3F800003], "<u4")
    found = meter(a, b, "F32", ulp=2)
    assert (found.unequal, found.different, found.first, found.max_ulp) == (3, 1, 2, 3)
    assert meter(f32(100), f32(101), "F32", rtol=1 / 101).different == 0  # relative to B
    assert meter(f32(101), f32(100), "F32", rtol=1 / 101).different == 1
    assert meter(f32(1), f32(1.5), "F32", atol=0.5).different == 0


def test_what_bits_alone_explain() -> None:
    zero = meter(np.array([0, 5], "<u2"), np.array([0x8000, 5], "<u2"), "BF16")
    assert bits_differ(zero) == "only the signs of zeros differ (-0.0 and 0.0)"
    nan = meter(np.array([0x7FC0], "<u2"), np.array([0x7FC1], "<u2"), "BF16")
    assert bits_differ(nan) == "only the payloads of NaN differ"
    bit = meter(np.array([0x4000], "<u2"), np.array([0x4100], "<u2"), "BF16")
    assert bits_differ(bit) == "one bit of one element is flipped"
    assert bits_differ(meter(np.array([1, 2], "<u2"), np.array([3, 3], "<u2"), "BF16")) is None


def test_slabs_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(0)
    a = rng.integers(0, 0x7F80, 1 << 19, dtype="<u2")
    b = np.where(rng.random(len(a)) < 0.01, a ^ 3, a).astype("<u2")
    whole, parts = meter(a, b, "BF16"), Meter("BF16")
    for at in range(0, len(a), 99_991):
        parts.add(a[at : at + 99_991].tobytes(), b[at : at + 99_991].tobytes(), at)
    where = np.flatnonzero(a != b)
    assert (whole.different, whole.first) == (len(where), int(where[0]))
    for found in (parts,):
        assert (found.different, found.first, found.max_abs, found.max_ulp, found.median_ulp()) == (
            whole.different, whole.first, whole.max_abs, whole.max_ulp, whole.median_ulp(),
        )  # fmt: skip
    steps = np.abs(a.astype(int) - b)[where]
    assert whole.median_ulp() == float(np.median(steps)) and whole.max_ulp == steps.max()


def test_the_median_of_very_many_wide_distances() -> None:
    a = np.zeros(6 << 20, "<u4") + 0x3F800000
    b = a + np.arange(len(a), dtype="<u4") + 1
    found = meter(a, b, "F32")
    assert found.max_ulp == len(a)
    assert found.median_ulp() == pytest.approx(len(a) / 2, rel=1e-3)


def test_widening_is_exact() -> None:
    assert [wider("BF16", "F16"), wider("F16", "F64"), wider("U8", "I32"), wider("F32", "I32")] == [
        "F32", "F64", "I64", None,
    ]  # fmt: skip
    raw = np.arange(1 << 16, dtype="<u2")
    for dtype in ("BF16", "F16"):
        wide = np.frombuffer(widened(raw.tobytes(), dtype, "F32"), "<f4")
        theirs = torch.frombuffer(bytearray(raw.tobytes()), dtype=TORCH[dtype]).float().numpy()
        fine = ~np.isnan(theirs)
        assert (
            np.array_equal(wide[fine].view("<u4"), theirs[fine].view("<u4")) and np.isnan(wide[~fine]).all()
        )
