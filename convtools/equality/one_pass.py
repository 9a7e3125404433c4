"""Bytes copied, fingerprinted and searched for NaN and infinity in one pass over memory.

Apart, each of the three reads what the one before left; together they cost little more than the copy.
What is looked at are the bytes at the destination, after they were written.
"""

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from convtools.equality.fingerprint import COMPILED, Fingerprint, path_used

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Buffer

    Array = np.ndarray[Any, Any]

_STEP = 1 << 18  # bytes that numpy copies and then looks at: they stay in a core's own cache


class Floats(NamedTuple):
    """How to tell a number from what is none, by bits."""

    size: int
    """Bytes of an element; 0: nothing is looked for."""
    infinity: int
    """Its bits."""


NO_FLOATS = Floats(0, 0)


def copy_and_look(
    to: "Buffer | None", data: "Buffer", offset: int, value: Fingerprint | None, floats: Floats = NO_FLOATS
) -> bool:
    """Copy `data` to `to`, add what lies there then to `value`, tell whether it is all finite.

    The bytes lie at byte `offset` of their tensor. Without `to`, `data` is looked at where it lies; the two
    do not overlap. Raises ValueError where they are not of one length, or hold no whole floats.

    >>> made, to = Fingerprint(), bytearray(4)
    >>> copy_and_look(to, bytes(4), 0, made, Floats(2, 0x7C00)), made.value
    (True, 0)
    """
    kernel = _kernel()
    if kernel is None:
        return _by_numpy(to, data, offset, value, floats)
    added, finite = kernel(to, data, offset, value is not None, floats.size, floats.infinity)
    if value is not None:
        value.add_value(int.from_bytes(added, "little"))
    return bool(finite)


def all_finite(data: "Array", floats: Floats) -> bool:
    """Whether the floats whose bytes these are hold neither NaN nor infinity."""
    if not floats.size or not len(data):
        return True
    # Bits of a float grow with its size, so two maxima see all: with the sign bit on, and off.
    if int(data.view(f"<i{floats.size}").max()) >= floats.infinity:
        return False
    return int(data.view(f"<u{floats.size}").max()) < floats.infinity + (1 << (8 * floats.size - 1))


def _by_numpy(
    to: "Buffer | None", data: "Buffer", offset: int, value: Fingerprint | None, floats: Floats
) -> bool:
    import numpy as np

    given = np.frombuffer(memoryview(data).cast("B"), "u1")
    lies = given if to is None else np.frombuffer(memoryview(to).cast("B"), "u1")
    if len(given) != len(lies) or (floats.size and len(given) % floats.size):
        raise ValueError("no two runs of so many floats of that size")
    finite = True
    for at in range(0, len(given), _STEP):
        step = lies[at : at + _STEP]
        if to is not None:
            step[:] = given[at : at + _STEP]
        if value is not None:
            value.add(offset + at, step.data)
        finite &= all_finite(step, floats)
    return finite


@cache
def _kernel() -> Any:
    """The compiled pass; None where it was not built."""
    if path_used() != COMPILED:
        return None
    from convtools.equality import fingerprint_kernel

    return fingerprint_kernel.copy_and_look
