"""Where buckets lie until they are consumed, and what packs them there."""

from collections.abc import Callable
from functools import partial
from typing import Any

from convtools.errors import UsageError
from convtools.refit.arena import Arena
from convtools.refit.bucket import Ring
from convtools.refit.packing import Packer


def staged(source: Any, bucket_bytes: int, slots: int, device: Any) -> tuple[Ring, Callable[..., Packer]]:
    """The ring for a source: an arena is its own; on a `device`, or of the host's memory.

    Raises UsageError where there is no such device, or the source is an arena; RefitError.
    """
    if isinstance(source, Arena):
        if device is not None:
            raise UsageError("an arena is memory of the host", fix="leave `device` out")
        return source, Packer
    if device is None:
        return Ring(bucket_bytes, slots), Packer
    from convtools.refit.device.memory import memory_of
    from convtools.refit.device.packing import DevicePacker
    from convtools.refit.device.ring import DeviceRing

    ring = DeviceRing(bucket_bytes, slots, memory_of(device))
    return ring, partial(DevicePacker, ring)
