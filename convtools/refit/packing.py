"""One pass over the source: each part into its bucket, looked at while it is still in the cache."""

import time

from convtools.equality.fingerprint import Fingerprint
from convtools.errors import tick
from convtools.refit.errors import RefitError
from convtools.refit.guard import is_finite
from convtools.refit.plan import Part, PlannedBucket, RefitPlan, Tensor
from convtools.refit.receiver import packed
from convtools.refit.source import PushSource
from convtools.stores.base import DTYPE_NBYTES

_STEP = 1 << 19


class Packer:
    """Fills buckets, and collects the fingerprints of what it filled them with."""

    def __init__(self, source: PushSource, plan: RefitPlan, finite: bool) -> None:
        self._source, self._plan, self._finite = source, plan, finite
        self._values: dict[int, Fingerprint] = {}
        self.gather_seconds = self.pack_seconds = self.wait_seconds = 0.0

    def pack(self, bucket: PlannedBucket, data: memoryview, canaries: frozenset[int] = frozenset()) -> None:
        """Fill a bucket. Raises RefitError, naming the tensor, for NaN and infinity.

        Of each tensor in `canaries`, the lowest bit of the first element is turned over.
        """
        for part in bucket.parts:
            tensor = self._plan.tensors[part.tensor]
            view = data[part.offset : part.offset + part.nbytes]
            began = time.perf_counter()
            self._source.fill(tensor, part, view)
            filled = time.perf_counter()
            if part.tensor in canaries and part.start == 0:
                view[0] ^= 1
            self._look(tensor, part, view)
            self.gather_seconds += filled - began
            self.pack_seconds += time.perf_counter() - filled

    def values(self) -> list[bytes]:
        """Fingerprints of all tensors, in the order of the plan."""
        return [packed(self._values.get(i)) for i in range(len(self._plan.tensors))]

    def _look(self, tensor: Tensor, part: Part, view: memoryview) -> None:
        import numpy as np

        value = self._values.setdefault(part.tensor, Fingerprint())
        value.add(part.start, view)
        if self._finite and not is_finite(np.frombuffer(view, "u1"), tensor.dtype):
            first = part.start // DTYPE_NBYTES[tensor.dtype]
            raise RefitError(
                f"{tick(tensor.name)} holds NaN or infinity",
                where=f"{len(view) // DTYPE_NBYTES[tensor.dtype]} elements from {first} on",
                fix="look at the training step; to push it all the same, finite=False",
            )
