"""Numbers that no trainer means to publish: NaN and infinity, found in the buckets by their bits."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_EXPONENT = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000)}
_EXPONENT |= {"F64": ("<u8", 0x7FF0000000000000)}
_STEP = 1 << 18
CHECKED = frozenset(_EXPONENT)
"""dtypes that are looked at; the 8-bit ones are scaled anyway."""


def is_finite(data: "np.ndarray[Any, Any]", dtype: str) -> bool:
    """Whether the elements whose bytes these are hold neither NaN nor infinity.

    >>> import numpy as np
    >>> is_finite(np.array([1, 2], "<f4").view("u1"), "F32"), is_finite(np.array([np.inf]).view("u1"), "F64")
    (True, False)
    """
    import numpy as np

    if dtype not in _EXPONENT:
        return True
    kind, bits = _EXPONENT[dtype]
    items = data.view(kind)
    size = items.dtype.itemsize
    # All exponent bits set, and only then, is as large as `bits` or larger once the sign is gone.
    mask, scratch = items.dtype.type((1 << (8 * size - 1)) - 1), np.empty(min(len(items), _STEP // size), kind)
    for at in range(0, len(items), len(scratch) or 1):
        some = items[at : at + len(scratch)]
        if int(np.bitwise_and(some, mask, out=scratch[: len(some)]).max()) >= bits:
            return False
    return True

