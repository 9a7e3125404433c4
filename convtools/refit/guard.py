"""Numbers that no trainer means to publish: NaN and infinity, found in the buckets by their bits."""

from typing import TYPE_CHECKING, Any

from convtools.equality.one_pass import NO_FLOATS, Floats, all_finite
from convtools.stores.base import DTYPE_NBYTES

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Buffer

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


def where_not_finite(data: "Buffer", dtype: str, shape: tuple[int, ...], start: int) -> str:
    """The first element that is NaN or infinity of a run at byte `start` of its tensor, and how many are.

    >>> import numpy as np
    >>> where_not_finite(np.array([1, np.nan, np.inf], "<f4"), "F32", (2, 3), 12)
    'element [1, 1]; 2 of the 3 elements looked at'
    """
    import numpy as np

    size, floats = DTYPE_NBYTES[dtype], floats_of(dtype)
    bits = np.frombuffer(memoryview(data).cast("B"), f"<u{floats.size}") & floats.infinity
    bad = (bits == floats.infinity).reshape(-1, size // floats.size).any(axis=1)
    first = [int(n) for n in np.unravel_index(start // size + int(bad.argmax()), shape or (1,))]
    return f"element {first if shape else []}; {int(bad.sum())} of the {len(bad)} elements looked at"
