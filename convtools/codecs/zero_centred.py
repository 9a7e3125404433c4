"""Norms that only one side centres on zero: whether the whole number that is added can be taken off again."""

from typing import TYPE_CHECKING, Any

from convtools.codecs.cast import cast

if TYPE_CHECKING:
    import numpy as np


def inexact(data: memoryview | bytearray | bytes, src: str, dst: str, plus: int) -> int:
    """How many numbers do not come back, bit for bit, when `plus` is subtracted from what `cast` gives.

    A change of dtype is not held against them: what must come back is the number as `dst` holds it,
    so that whoever reads the result gets what the cast alone would have given.
    """
    back = cast(cast(data, src, dst, plus), dst, dst, -plus)
    return int((_bits(cast(data, src, dst), dst) != _bits(back, dst)).sum())


def _bits(data: memoryview, dtype: str) -> "np.ndarray[Any, Any]":
    import numpy as np

    return np.frombuffer(data, {"BF16": "<u2", "F16": "<u2", "F32": "<u4", "F64": "<u8"}[dtype])
