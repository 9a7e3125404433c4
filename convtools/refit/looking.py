"""What an engine does to the bytes of a bucket, wherever they and its tensors lie.

Memory of the host takes the compiled pass; on either side of a copy a device's may lie instead.
"""

from typing import TYPE_CHECKING, Any

from convtools.equality.fingerprint import Fingerprint
from convtools.equality.one_pass import copy_and_look
from convtools.refit.bucket import checksum

if TYPE_CHECKING:
    from convtools.refit.protocol import PartRow


def mark_of(data: Any, parts: "list[PartRow]") -> bytes:
    """The checksum of a bucket: xxh3-128 of all its bytes, or on a device what is made of its parts'."""
    if isinstance(data, memoryview):
        return checksum(data)
    from convtools.refit.device import looks

    return looks.mark_of(data, parts)


def bytes_of(data: Any) -> Any:
    """As what can be sliced and copied from."""
    import numpy as np

    return np.frombuffer(data, "u1") if isinstance(data, memoryview) else data


def copy_into(to: Any, data: Any, start: int, value: Fingerprint | None) -> None:
    """Copy, and add what lies at `to` then to `value`; the bytes lie at byte `start` of their tensor."""
    import numpy as np

    if isinstance(to, np.ndarray) and isinstance(data, np.ndarray):
        copy_and_look(to.data, data.data, start, value)
        return
    from convtools.refit.device import looks

    looks.copy_and_look(to, data, start, value)


def look(value: Fingerprint, start: int, data: Any) -> None:
    """Add bytes where they lie."""
    import numpy as np

    if isinstance(data, np.ndarray):
        value.add(start, data.data)
        return
    from convtools.refit.device import looks

    value.add_value(looks.value_of(data, start))
