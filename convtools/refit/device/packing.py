"""The source packed into buckets on a device: what lies there is copied there."""

import time
from typing import Any

from convtools.equality.fingerprint import Fingerprint
from convtools.refit.device.looks import all_finite, mark, value_of
from convtools.refit.device.memory import as_tensor
from convtools.refit.device.ring import DeviceRing
from convtools.refit.guard import floats_of
from convtools.refit.packing import Packer, canary_in
from convtools.refit.plan import Part, PlannedBucket, Tensor


class DevicePacker(Packer):
    """Fills buckets on a device; a bucket is handed over when the device has done all of it."""

    def __init__(self, ring: DeviceRing, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ring = ring
        ring.device.settle()  # what the trainer still computes, on any stream, comes first

    def pack(
        self, index: int, bucket: PlannedBucket, data: Any, canaries: frozenset[int] = frozenset()
    ) -> bytes:
        """Fill a bucket; gives its mark, or zeros. Raises RefitError for NaN and infinity, by tensor."""
        self._source.bucket(index, bucket)
        values: list[tuple[Part, int]] = []
        for part in bucket.parts:
            tensor, to = self._plan.tensors[part.tensor], data[part.offset : part.offset + part.nbytes]
            lies = self._lies(tensor, part)
            began = time.perf_counter()
            to.copy_(as_tensor(lies))
            if part.tensor in canaries and part.start == 0:
                to[canary_in(memoryview(to[: 1 << 15].cpu().numpy()), tensor.dtype)] ^= 1
            if self._finite and not all_finite(to, floats_of(tensor.dtype)):
                raise self._not_finite(tensor, part.start, to.cpu().numpy())
            if self._wanted or self.checksums:
                values.append((part, value_of(to, part.start)))
            if self._wanted:
                self._values.setdefault(part.tensor, Fingerprint()).add_value(values[-1][1])
            self.pack_seconds += time.perf_counter() - began
        self._ring.device.settle()
        return mark(values) if self.checksums else bytes(16)

    def _lies(self, tensor: Tensor, part: Part) -> Any:
        """The part's bytes: where they lie, or gathered on the host."""
        lies = self._source.lies(tensor)
        if lies is not None:
            return lies[part.start : part.start + part.nbytes]
        began = time.perf_counter()
        host = self._ring.scratch(part.nbytes)
        self._source.fill(tensor, part, host)
        self.gather_seconds += time.perf_counter() - began
        return host
