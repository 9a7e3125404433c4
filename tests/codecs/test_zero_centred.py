"""A whole number added to every element: rounded once, to nearest even; and who does not come back."""

import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from convtools.codecs.cast import cast
from convtools.codecs.zero_centred import inexact

HALVES = np.arange(65536, dtype="<u2")


def values(dtype: str) -> Any:
    """The number that each bit pattern stands for, widened by numpy or by shifting: not by convtools."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        if dtype == "BF16":
            return (HALVES.astype("<u4") << 16).view("<f4").astype("<f8")
        return HALVES.view("<f2").astype("<f8")


def nearest(dtype: str, wanted: Any) -> Any:
    """The bit pattern nearest to each finite number, by looking through all of them; ties to the even one."""
    all_values = values(dtype)
    finite = np.isfinite(all_values) & (HALVES != 0x8000)  # +0.0 stands for both zeros
    order = np.argsort(all_values[finite])
    bits, sorted_values = HALVES[finite][order], all_values[finite][order]
    right = np.clip(np.searchsorted(sorted_values, wanted), 1, len(bits) - 1)
    left = right - 1
    below, above = wanted - sorted_values[left], sorted_values[right] - wanted
    take_right = (above < below) | ((above == below) & (bits[right] % 2 == 0))
    return np.where(take_right, bits[right], bits[left])


@pytest.mark.parametrize("plus", [-1, 1])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_b07_every_16_bit_float(dtype: str, plus: int) -> None:
    """All 65536: each is the nearest float to what it should be, and the ones that are lost are counted."""
    numbers = values(dtype)
    with np.errstate(invalid="ignore"):
        wanted = numbers + plus
    finite = np.isfinite(numbers)
    made = np.frombuffer(cast(HALVES.tobytes(), dtype, dtype, plus), "<u2")
    assert (made[finite] == nearest(dtype, wanted[finite])).all()
    back = nearest(dtype, values(dtype)[made[finite]] - plus)
    expected = int((back != HALVES[finite]).sum())
    assert expected > 10_000
    assert inexact(HALVES[finite].tobytes(), dtype, dtype, plus) == expected


def bf16(*numbers: float) -> bytes:
    """Rounded by struct's way through the upper half of a float: the numbers here are chosen to fit."""
    return b"".join(struct.pack("<f", x)[2:] for x in numbers)


@pytest.mark.parametrize(
    ("number", "shifted", "back"),
    [
        (Fraction(205, 512), Fraction(-154, 256), Fraction(204, 512)),  # about 0.4: a tie, to the even side
        (Fraction(206, 512), Fraction(-153, 256), Fraction(206, 512)),
        (Fraction(253, 32), Fraction(221, 32), Fraction(253, 32)),  # about 7.9
        (Fraction(9), Fraction(8), Fraction(9)),
        (Fraction(1), Fraction(0), Fraction(1)),
        (Fraction(1, 2**133), Fraction(-1), Fraction(0)),  # a subnormal
        (Fraction(-3), Fraction(-4), Fraction(-3)),
    ],
)
def test_b07_by_hand(number: Fraction, shifted: Fraction, back: Fraction) -> None:
    data = bf16(float(number))
    made = bytes(cast(data, "BF16", "BF16", -1))
    assert made == bf16(float(shifted))
    assert bytes(cast(made, "BF16", "BF16", 1)) == bf16(float(back))
    assert inexact(data, "BF16", "BF16", -1) == (number != back)


def test_a_negative_zero_does_not_come_back() -> None:
    assert inexact(bf16(-0.0, 0.0), "BF16", "BF16", -1) == 1
    assert bytes(cast(bf16(-0.0), "BF16", "BF16", -1)) == bf16(-1.0)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_infinities_and_nans_come_back(dtype: str) -> None:
    inf = {
        "BF16": b"\x80\x7f",
        "F16": b"\x00\x7c",
        "F32": struct.pack("<f", np.inf),
        "F64": struct.pack("<d", np.inf),
    }
    nan = {
        "BF16": b"\xc0\x7f",
        "F16": b"\x00\x7e",
        "F32": struct.pack("<f", np.nan),
        "F64": struct.pack("<d", np.nan),
    }
    assert inexact(inf[dtype] + nan[dtype], dtype, dtype, -1) == 0
    assert bytes(cast(inf[dtype] + nan[dtype], dtype, dtype, -1)) == inf[dtype] + nan[dtype]


def test_a_cast_is_rounded_once_and_not_held_against_it() -> None:
    """1 + 2**-8 + 2**-30 in fp32, minus 1, is just over 2**-8: no rounding to bf16 before the subtraction."""
    number = struct.pack("<f", 1 + 2**-8 + 2**-23)
    assert bytes(cast(number, "F32", "BF16", -1)) == bf16(2**-8)
    assert inexact(number, "F32", "BF16", -1) == 1  # bf16 of it alone is 1 + 2**-7, and this gives 1 back
    assert inexact(bf16(0.400390625), "BF16", "F32", -1) == 0
    assert bytes(cast(bf16(0.400390625), "BF16", "F32", -1)) == struct.pack("<f", -0.599609375)


def test_zero_changes_nothing() -> None:
    signalling = b"\x01\x7f\x80\xff\x01\x80"
    assert bytes(cast(signalling, "BF16", "BF16", 0)) == signalling
