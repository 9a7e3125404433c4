"""Numbers that no trainer means to publish: NaN and infinity, found in the buckets by their bits."""

from typing import TYPE_CHECKING, Any

from convtools.equality.one_pass import NO_FLOATS, Floats, all_finite

if TYPE_CHECKING:
    import numpy as np

_FLOATS = {
    "BF16": Floats(2, 0x7F80),
    "F16": Floats(2, 0x7C00),
    "F32": Floats(4, 0x7F800000),
    "F64": Floats(8, 0x7FF0000000000000),
    "C64": Floats(4, 0x7F800000),
}


def floats_of(dtype: str) -> Floats:
    """What to look for; nothing in the 8-bit dtypes, which are scaled, and in integers."""
    return _FLOATS.get(dtype, NO_FLOATS)


def is_finite(data: "np.ndarray[Any, Any]", dtype: str) -> bool:
    """Whether the elements whose bytes these are hold neither NaN nor infinity.

    >>> import numpy as np
    >>> is_finite(np.array([1, -2], "<f4").view("u1"), "F32")
    True
    >>> is_finite(np.array([1, -np.inf], "<f8").view("u1"), "F64")
    False
    """
    return all_finite(data, floats_of(dtype))
