"""Float casts: against rounding in exact rationals, which is the truth, and against torch."""

import struct
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from convtools.codecs.cast import FLOATS, cast, is_exact
from convtools.errors import UsageError

LAYOUT = {"BF16": (8, 7), "F16": (5, 10), "F32": (8, 23), "F64": (11, 52)}
"""Bits of exponent and of fraction."""
CODE = {"BF16": "<u2", "F16": "<u2", "F32": "<u4", "F64": "<u8"}
TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
PAIRS = list(product(LAYOUT, LAYOUT))
both = pytest.mark.parametrize(("src", "dst"), PAIRS, ids="-".join)
single = pytest.mark.parametrize("dtype", LAYOUT)


def width(dtype: str) -> int:
    return 1 + sum(LAYOUT[dtype])


def value(bits: int, dtype: str) -> Fraction | float:
    """What a bit pattern stands for: a rational, or an infinity or NaN."""
    exponent, fraction = LAYOUT[dtype]
    sign = -1 if bits >> (exponent + fraction) else 1
    e, f = bits >> fraction & (1 << exponent) - 1, bits & (1 << fraction) - 1
    if e == (1 << exponent) - 1:
        return float("nan") if f else sign * float("inf")
    unit = Fraction(2) ** (max(e, 1) - (1 << exponent - 1) + 1 - fraction)
    return sign * ((f | 1 << fraction) if e else f) * unit


def nearest(number: Fraction | float, negative: bool, dtype: str) -> int:
    """Bits of the nearest number of `dtype`, ties to even; -1 stands for any NaN."""
    exponent, fraction = LAYOUT[dtype]
    infinity, sign = ((1 << exponent) - 1) << fraction, int(negative) << (exponent + fraction)
    if isinstance(number, float):
        return -1 if number != number else sign | infinity
    size, least = abs(number), 2 - (1 << exponent - 1)
    if not size:
        return sign
    e = size.numerator.bit_length() - size.denominator.bit_length()
    e = max(e - (size < Fraction(2) ** e), least)
    steps = round(size / Fraction(2) ** (e - fraction))  # Python rounds half to even
    return sign | min(((e - least) << fraction) + steps, infinity)


def truth(bits: int, src: str, dst: str) -> int:
    return nearest(value(bits, src), bool(bits >> (width(src) - 1)), dst)


def run(bits: "np.ndarray | list[int]", src: str, dst: str) -> np.ndarray:
    data = np.asarray(bits, dtype="<u8").astype(CODE[src]).tobytes()
    return np.frombuffer(cast(data, src, dst), CODE[dst])


def nans(bits: np.ndarray, dtype: str) -> np.ndarray:
    exponent, fraction = LAYOUT[dtype]
    infinity = ((1 << exponent) - 1) << fraction
    return (bits.astype("<u8") & ((1 << exponent + fraction) - 1)) > infinity


def edges(src: str, dst: str) -> list[int]:
    """Bits of `src` where rounding to `dst` turns: numbers of `dst`, their midpoints, one bit around."""
    exponent, fraction = LAYOUT[dst]
    infinity = ((1 << exponent) - 1) << fraction
    one = ((1 << exponent - 1) - 1) << fraction
    corners = [
        0,
        1,
        2,
        3,
        (1 << fraction) - 1,
        1 << fraction,
        one - 1,
        one,
        one + 1,
        one + 2,
        infinity - 2,
        infinity - 1,
    ]
    corners = [c for c in corners if 0 <= c < infinity]
    numbers = [Fraction(value(c, dst)) for c in corners]
    following = [value(c + 1, dst) for c in corners]
    top = 2 * numbers[-1] - Fraction(value(infinity - 2, dst))  # where the next number would be
    numbers += [
        (x + (top if isinstance(y, float) else y)) / 2 for x, y in zip(numbers, following, strict=True)
    ]
    found = set()
    for number in numbers:
        for near in (-1, 0, 1):
            bits = nearest(number, False, src) + near
            if 0 <= bits < 1 << (width(src) - 1):
                found |= {bits, bits | 1 << (width(src) - 1)}
    return sorted(found)


def specials(dtype: str) -> list[int]:
    """Zeros, infinities, quiet and signalling NaNs, the largest, the subnormals' ends; both signs."""
    exponent, fraction = LAYOUT[dtype]
    infinity = ((1 << exponent) - 1) << fraction
    plain = [0, 1, (1 << fraction) - 1, 1 << fraction, infinity - 1, infinity, infinity + 1]
    plain += [infinity | 1 << fraction - 1, infinity | (1 << fraction) - 1]
    return plain + [b | 1 << exponent + fraction for b in plain]


def check(bits: list[int], src: str, dst: str) -> None:
    found = run(bits, src, dst)
    is_nan = nans(found, dst)
    for b, out, nan in zip(bits, found.tolist(), is_nan.tolist(), strict=True):
        assert (-1 if nan else out) == truth(b, src, dst), f"{src} {b:#x} -> {dst} {out:#x}"


def test_the_truth_agrees_with_python_and_struct() -> None:
    numbers = [0.1, 1e300, 5e-324, -2.5, 65504.0, 65519.999, 65520.0, 2**-149 * 0.75, 3.4028235677973366e38]
    for x in numbers:
        (bits,) = struct.unpack("<Q", struct.pack("<d", x))
        assert value(bits, "F64") == Fraction(x)
        assert nearest(Fraction(x), x < 0, "F64") == bits
        for code, dtype in (("f", "F32"), ("e", "F16")):
            try:
                out = int.from_bytes(struct.pack("<" + code, x), "little")
            except OverflowError:
                out = nearest(float("inf"), x < 0, dtype)
            assert nearest(Fraction(x), x < 0, dtype) == out


@both
def test_specials_and_every_edge_of_rounding(src: str, dst: str) -> None:
    check(specials(src) + edges(src, dst), src, dst)


@both
@settings(deadline=None, max_examples=50)
@given(st.data())
def test_random_bits_round_once_to_nearest_even(src: str, dst: str, data: st.DataObject) -> None:
    check(data.draw(st.lists(st.integers(0, (1 << width(src)) - 1), min_size=1, max_size=40)), src, dst)


@pytest.mark.parametrize("dst", ["BF16", "F16", "F32"])
@settings(deadline=None, max_examples=100)
@given(st.data())
def test_fp64_beside_a_tie_is_not_rounded_twice(dst: str, data: st.DataObject) -> None:
    exponent, fraction = LAYOUT[dst]
    low = data.draw(st.integers(0, (((1 << exponent) - 1) << fraction) - 2))
    tie = (Fraction(value(low, dst)) + Fraction(value(low + 1, dst))) / 2
    bits = nearest(tie, False, "F64")
    check([bits - 1, bits, bits + 1], "F64", dst)


def test_fp64_to_bf16_where_going_by_fp32_is_wrong() -> None:
    just_above = 1 + 2.0**-8 + 2.0**-40  # fp32 cannot hold the last term, and 1 + 2**-8 is a tie in bf16
    found = np.frombuffer(cast(struct.pack("<d", just_above), "F64", "BF16"), "<u2")
    assert found.tolist() == [0x3F81]
    by_fp32 = np.frombuffer(cast(cast(struct.pack("<d", just_above), "F64", "F32"), "F32", "BF16"), "<u2")
    assert by_fp32.tolist() == [0x3F80]


@pytest.mark.parametrize("src", ["BF16", "F16"])
@pytest.mark.parametrize("dst", LAYOUT)
def test_every_16_bit_pattern(src: str, dst: str) -> None:
    check(list(range(1 << 16)), src, dst)


def as_torch(bits: np.ndarray, src: str, dst: str) -> np.ndarray:
    whole = torch.from_numpy(bits.copy().view(np.uint8)).view(TORCH[src]).to(TORCH[dst])
    return whole.view(torch.uint8).numpy().view(CODE[dst])


@both
def test_torch_agrees_or_rounds_twice(src: str, dst: str) -> None:
    rng = np.random.default_rng(7)
    ordinary = rng.standard_normal(20_000) * 2.0 ** rng.integers(-30, 30, 20_000)
    dense = run(ordinary.view("<u8"), "F64", src)
    bits = np.concatenate(
        [
            rng.integers(0, 1 << width(src), 20_000, dtype="<u8", endpoint=False).astype(CODE[src]),
            dense,
            np.array(specials(src) + edges(src, dst), CODE[src]),
        ]
    )
    ours, theirs = run(bits, src, dst), as_torch(bits, src, dst)
    assert np.array_equal(nans(ours, dst), nans(theirs, dst))
    differ = np.flatnonzero((ours != theirs) & ~nans(ours, dst))
    if (src, dst) not in {("F64", "BF16"), ("F64", "F16")}:
        assert differ.size == 0
    for i in differ.tolist():
        assert ours[i] == truth(int(bits[i]), src, dst)


@single
def test_a_cast_to_the_same_dtype_keeps_every_bit(dtype: str) -> None:
    bits = np.array(specials(dtype) + list(range(1000)), CODE[dtype])
    assert bytes(cast(bits.tobytes(), dtype, dtype)) == bits.tobytes()


@both
def test_a_nan_keeps_its_sign(src: str, dst: str) -> None:
    exponent, fraction = LAYOUT[src]
    quiet = ((1 << exponent) - 1) << fraction | 1 << fraction - 1
    found = run([quiet, quiet | 1 << width(src) - 1, quiet | (1 << fraction) - 1], src, dst)
    assert (found >> (width(dst) - 1)).tolist() == [0, 1, 0]
    assert nans(found, dst).all()


@both
def test_exact_pairs_are_those_where_nothing_is_lost(src: str, dst: str) -> None:
    some = [b for b in specials(src) + edges(src, src) + [1, 3] if not nans(np.array([b], "<u8"), src)[0]]
    lossless = all(value(truth(b, src, dst), dst) == value(b, src) for b in some)
    assert is_exact(src, dst) == lossless


@both
def test_nothing_casts_to_nothing(src: str, dst: str) -> None:
    assert bytes(cast(b"", src, dst)) == b""


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_read_and_none_is_changed(
    kind: Callable[[bytes], "bytes | bytearray | memoryview"],
) -> None:
    data = np.array([1.5, -2.25], "<f4").tobytes()
    given_ = kind(data)
    assert bytes(cast(given_, "F32", "BF16")) == bytes.fromhex("c03f10c0")
    assert bytes(given_) == data


def test_the_result_of_an_identity_is_not_the_buffer_it_came_from() -> None:
    buffer = bytearray(np.array([1.5], "<f4").tobytes())
    out = cast(buffer, "F32", "F32")
    buffer[:] = b"\0\0\0\0"
    assert np.frombuffer(out, "<f4").tolist() == [1.5]


@pytest.mark.parametrize(
    ("src", "dst"), [("I64", "F32"), ("F32", "I64"), ("F8_E4M3", "BF16"), ("BOOL", "F16"), ("bf16", "F32")]
)
def test_what_is_no_float_is_refused(src: str, dst: str) -> None:
    with pytest.raises(UsageError) as caught:
        cast(bytes(8), src, dst)
    assert str(caught.value) == (
        f"no cast from {src} to {dst}\n  expected: both of ['BF16', 'F16', 'F32', 'F64']"
    )


def test_the_words_of_the_command_line() -> None:
    assert FLOATS == {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp64": "F64"}
