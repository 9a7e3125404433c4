"""What the bits of each dtype mean, as numpy sees them: values, order, NaN, infinity."""

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from convtools.stores.base import DTYPE_NBYTES

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

EIGHT_BIT: Final = {
    "F8_E4M3": (4, 3, 7, "fn"), "F8_E5M2": (5, 2, 15, "ieee"),
    "F8_E4M3FNUZ": (4, 3, 8, "fnuz"), "F8_E5M2FNUZ": (5, 2, 16, "fnuz"), "F8_E8M0": (8, 0, 127, "e8m0"),
}  # fmt: skip
"""Bits of exponent and mantissa, bias, and what is NaN."""
FLOAT: Final = frozenset({"BF16", "F16", "F32", "F64", "C64", *EIGHT_BIT})
"""The dtypes that hold floats."""
_SIGNED = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_EXPONENT = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF0000000000000}


def bits(data: Any, dtype: str) -> "Array":
    """Raw bits as unsigned integers; a complex number as two."""
    import numpy as np

    return np.frombuffer(data, f"<u{4 if dtype == 'C64' else DTYPE_NBYTES[dtype]}")


def parts(dtype: str) -> int:
    """Numbers an element: 2 of a complex one."""
    return 2 if dtype == "C64" else 1


def real(dtype: str) -> str:
    """The dtype of an element's parts."""
    return "F32" if dtype == "C64" else dtype


def values(raw: "Array", dtype: str) -> "Array":
    """Bits to fp64 (fp32 and narrower exactly; 64-bit integers rounded)."""
    import numpy as np

    dtype = real(dtype)
    with np.errstate(invalid="ignore"):  # a signalling NaN is none of a caster's business
        if dtype == "BF16":
            return (raw.astype("<u4") << 16).view("<f4").astype("<f8")
        if dtype in ("F16", "F32", "F64"):
            return raw.view(f"<f{raw.itemsize}").astype("<f8")
    if dtype in EIGHT_BIT:
        return np.asarray(_table(dtype))[raw]
    return _whole(raw, dtype).astype("<f8")


def _whole(raw: "Array", dtype: str) -> "Array":
    """The bits of an integer dtype as its numbers."""
    return raw.view(_SIGNED[dtype]) if dtype in _SIGNED else raw


@lru_cache(maxsize=8)
def _table(dtype: str) -> "Array":
    """The value of each of the 256 codes."""
    import numpy as np

    out: Array

    exponent_bits, mantissa_bits, bias, kind = EIGHT_BIT[dtype]
    codes = np.arange(256)
    if kind == "e8m0":
        out = np.ldexp(1.0, codes - bias)
        out[255] = np.nan
        return out
    exponent, mantissa = codes >> mantissa_bits & (1 << exponent_bits) - 1, codes & (1 << mantissa_bits) - 1
    normal = exponent > 0
    significand = mantissa / (1 << mantissa_bits) + normal
    out = np.ldexp(significand, np.where(normal, exponent, 1) - bias) * np.where(codes & 128, -1, 1)
    if kind == "fnuz":
        out[128] = np.nan
    elif kind == "fn":
        out[[127, 255]] = np.nan
    else:
        full = exponent == (1 << exponent_bits) - 1
        out[full] = np.where(mantissa[full] > 0, np.nan, np.copysign(np.inf, out[full]))
    return out


def special(raw: "Array", dtype: str) -> tuple["Array", "Array"]:
    """(where NaN, where infinite)."""
    import numpy as np

    dtype = real(dtype)
    if dtype in EIGHT_BIT:
        table = _table(dtype)
        return np.isnan(table)[raw], np.isinf(table)[raw]
    if dtype not in _EXPONENT:
        nothing = np.zeros(raw.shape, bool)
        return nothing, nothing
    full = raw.dtype.type(_EXPONENT[dtype])
    magnitude = raw & raw.dtype.type((1 << 8 * raw.itemsize - 1) - 1)
    return magnitude > full, magnitude == full


def distance(a: "Array", b: "Array", dtype: str) -> "Array":
    """Steps between two numbers in the order of their dtype, as uint64; the two zeros are one."""
    import numpy as np

    left, right = _ordered(a, dtype), _ordered(b, dtype)
    high, low = np.maximum(left, right), np.minimum(left, right)
    steps: Array = high.view("<u8") - low.view("<u8")
    return steps


def _ordered(raw: "Array", dtype: str) -> "Array":
    import numpy as np

    dtype = real(dtype)
    if dtype in FLOAT and dtype != "F8_E8M0":
        wide = raw.view(f"<i{raw.itemsize}").astype("<i8")
        lowest = np.int64(-(1 << 8 * raw.itemsize - 1))
        return np.where(wide < 0, lowest - wide, wide)
    if dtype == "U64":
        return raw  # compared as unsigned
    return _whole(raw, dtype).astype("<i8")


def wider(a: str, b: str) -> str | None:
    """The dtype that holds every value of both, of those that `widened` makes; None where there is none."""
    if a == b:
        return a
    narrow = {"BF16", "F16", "F32", *EIGHT_BIT}
    if a in narrow and b in narrow:
        return "F32"
    if a in narrow | {"F64"} and b in narrow | {"F64"}:
        return "F64"
    whole = {*_SIGNED, "U8", "U16", "U32", "BOOL"}
    return "I64" if a in whole and b in whole else None


def widened(data: Any, dtype: str, to: str) -> Any:
    """Bytes of one dtype as bytes of a wider one, exactly; NaN keep their payload where both have room."""
    import numpy as np

    if dtype == to:
        return data
    raw = bits(data, dtype)
    if to == "I64":
        return _whole(raw, dtype).astype("<i8").data.cast("B")
    if dtype == "BF16":
        wide = (raw.astype("<u4") << 16).view("<f4")
    elif dtype in EIGHT_BIT:
        wide = np.asarray(_table(dtype))[raw]
    else:
        wide = raw.view(f"<f{raw.itemsize}")
    with np.errstate(invalid="ignore"):
        return np.ascontiguousarray(wide.astype("<f4" if to == "F32" else "<f8")).data.cast("B")
