"""What an engine does to the bytes of a bucket, wherever they and its tensors lie.

Memory of the host takes the compiled pass; on either side of a copy a device's may lie instead.
"""

from collections.abc import Callable
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


def bytes_of(data: Any, anywhere: bool) -> Any:
    """A bucket as what can be sliced and copied from; on the host, unless it may lie `anywhere`."""
    import numpy as np

    if isinstance(data, memoryview):
        return np.frombuffer(data, "u1")
    return data if anywhere else data.cpu().numpy()


Copying = Callable[[Any, Any, int, Fingerprint | None], object]
"""Copy (to, from), and add what lies at `to` then to the value; it lies at that byte of its tensor."""


def copying(data: Any, on_device: bool) -> Copying:
    """How a bucket's bytes get to tensors, which are on a device or not; chosen once a bucket."""
    if isinstance(data, memoryview) and not on_device:
        return copy_and_look
    from convtools.refit.device import looks

    return looks.copy_and_look


def look(value: Fingerprint, start: int, data: Any) -> None:
    """Add bytes where they lie."""
    import numpy as np

    if isinstance(data, np.ndarray):
        value.add(start, data.data)
        return
    from convtools.refit.device import looks

    value.add_value(looks.value_of(data, start))
