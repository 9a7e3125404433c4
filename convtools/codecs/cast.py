"""Float casts with numpy alone: bf16, fp16, fp32, fp64, each rounded once, to nearest even.

Every cast goes the way that rounds only once: widening is exact, and narrowing starts from a type
that holds the source exactly.
"""

from typing import TYPE_CHECKING, Any

from convtools.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

FLOATS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp64": "F64"}
"""`--dtype` words, and the dtypes they name."""

_EXACT = {("BF16", "F32"), ("BF16", "F64"), ("F16", "F32"), ("F16", "F64"), ("F32", "F64")}


def is_exact(src: str, dst: str) -> bool:
    """Whether every value of `src` is a value of `dst` (NaN payloads aside)."""
    return src == dst or (src, dst) in _EXACT


def cast(data: memoryview | bytearray | bytes, src: str, dst: str, plus: int = 0) -> Any:
    """(bytes of a contiguous tensor, its dtype, the dtype wanted) -> bytes, as a memoryview.

    `plus` is added to every number before it is rounded, in fp64: there a small whole number and a
    float of up to 32 bits lose nothing that could change how they round. Raises UsageError for a
    pair that is not two floats.
    """
    import numpy as np

    floats = set(FLOATS.values())
    if src not in floats or dst not in floats:
        raise UsageError(f"no cast from {src} to {dst}", expected=f"both of {sorted(floats)}")
    if src == dst and not plus:
        return memoryview(bytearray(data))  # arithmetic would change signalling NaNs
    if src == "BF16":
        wide = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        wide = np.frombuffer(data, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[src])
    if plus:
        with np.errstate(invalid="ignore"):
            wide = wide.astype("<f8") + float(plus)
    if dst == "BF16":
        out = _bf16(wide)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            out = wide.astype({"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dst])
    return np.ascontiguousarray(out).data.cast("B")


def overflows(data: memoryview, src: str, out: memoryview, dst: str) -> int:
    """How many finite numbers of `data` became infinite in `out`."""
    import numpy as np

    if is_exact(src, dst):
        return 0
    return int(np.count_nonzero(_exponent_full(out, dst) & ~_exponent_full(data, src)))


def _exponent_full(data: memoryview, dtype: str) -> "np.ndarray[Any, Any]":
    """Where a float is infinite or NaN."""
    import numpy as np

    kind, mask = {
        "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00),
        "F32": ("<u4", 0x7F800000), "F64": ("<u8", 0x7FF0000000000000),
    }[dtype]  # fmt: skip
    bits = np.frombuffer(data, kind)
    full: np.ndarray[Any, Any] = (bits & bits.dtype.type(mask)) == mask
    return full


def _bf16(wide: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    import numpy as np

    if wide.dtype == np.dtype("<f8"):
        wide = _odd_rounded_f32(wide)
    bits = wide.astype("<f4", copy=False).view("<u4").astype("<u8")
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    # Rounding could carry a NaN into infinity: keep its sign and set the quiet bit instead.
    return np.where(np.isnan(wide), ((bits >> 16) | 0x40).astype("<u2"), rounded)


def _odd_rounded_f32(wide: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """fp64 -> fp32 rounded to odd, so that rounding once more to bf16 is as if done in one step."""
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        near = wide.astype("<f4")
    bits = near.view("<i4").copy()
    lost = (near.astype("<f8") != wide) & ~np.isnan(wide)
    # Step back towards zero where rounding went away from it, then mark the lost bits in the last place.
    bits[lost & (np.abs(near.astype("<f8")) > np.abs(wide))] -= 1
    bits[lost] |= 1
    return bits.view("<f4")
