"""Numbers that no trainer means to publish: NaN and infinity, found in the buckets by their bits."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_INFINITY = {"BF16": ("2", 0x7F80), "F16": ("2", 0x7C00), "F32": ("4", 0x7F800000)}
_INFINITY |= {"F64": ("8", 0x7FF0000000000000)}
"""dtype -> width, bits of infinity; the 8-bit ones are scaled, and not looked at."""


def is_finite(data: "np.ndarray[Any, Any]", dtype: str) -> bool:
    """Whether the elements whose bytes these are hold neither NaN nor infinity.

    >>> import numpy as np
    >>> is_finite(np.array([1, -2], "<f4").view("u1"), "F32")
    True
    >>> is_finite(np.array([1, -np.inf], "<f8").view("u1"), "F64")
    False
    """
    if dtype not in _INFINITY or not len(data):
        return True
    width, bits = _INFINITY[dtype]
    # Bits of a float grow with its size, so two maxima see all: with the sign bit on, and off.
    if int(data.view(f"<i{width}").max()) >= bits:
        return False
    return int(data.view(f"<u{width}").max()) < bits + (1 << (8 * int(width) - 1))
