"""One pass over the source: each part into its bucket, looked at while it is still in the cache."""

import time

from convtools.equality.fingerprint import Fingerprint
from convtools.errors import tick
from convtools.refit.bucket import Mark
from convtools.refit.errors import RefitError
from convtools.refit.guard import is_finite
from convtools.refit.plan import Part, PlannedBucket, RefitPlan, Tensor
from convtools.refit.source import PushSource
from convtools.refit.transaction import packed
from convtools.stores.base import DTYPE_NBYTES

_STEP = 1 << 19
"""Bytes that are copied and looked at in one go: they and their copy fit a core's own cache."""


_EXPONENT = {"BF16": (2, 0x7F80), "F16": (2, 0x7C00), "F32": (4, 0x7F800000), "F64": (8, 0x7FF << 52)}
"""dtype -> width, bits of the exponent."""


class Packer:
    """Fills buckets, and collects the fingerprints of what it filled them with."""

    def __init__(self, source: PushSource, plan: RefitPlan, *, finite: bool, fingerprints: bool) -> None:
        self._source, self._plan, self._finite, self._wanted = source, plan, finite, fingerprints
        self._values: dict[int, Fingerprint] = {}
        self.gather_seconds = self.pack_seconds = self.wait_seconds = 0.0

    def pack(
        self, index: int, bucket: PlannedBucket, data: memoryview, canaries: frozenset[int] = frozenset()
    ) -> bytes:
        """Fill a bucket; gives its xxh3-128. Raises RefitError, naming the tensor, for NaN and infinity.

        Of each tensor in `canaries`, the lowest bit of one of its first elements is turned over.
        """
        self._source.bucket(index, bucket)
        mark, end = Mark(), 0
        for part in bucket.parts:
            tensor = self._plan.tensors[part.tensor]
            mark.update(data[end : part.offset])
            end = part.offset + part.nbytes
            step = _STEP if self._source.piecemeal else part.nbytes
            for at in range(0, part.nbytes, step):
                run = part._replace(start=part.start + at, nbytes=min(step, part.nbytes - at))
                view = data[part.offset + at : part.offset + at + run.nbytes]
                began = time.perf_counter()
                self._source.fill(tensor, run, view)
                filled = time.perf_counter()
                if part.tensor in canaries and run.start == 0:
                    view[canary_in(view, tensor.dtype)] ^= 1
                for first in range(0, run.nbytes, _STEP):
                    some = view[first : first + _STEP]
                    self._look(tensor, run._replace(start=run.start + first), some)
                    mark.update(some)
                self.gather_seconds += filled - began
                self.pack_seconds += time.perf_counter() - filled
        return mark.digest()

    def values(self) -> list[bytes]:
        """Fingerprints of all tensors, in the order of the plan; none where they are not wanted."""
        if not self._wanted:
            return []
        return [packed(self._values.get(i)) for i in range(len(self._plan.tensors))]

    def _look(self, tensor: Tensor, part: Part, view: memoryview) -> None:
        import numpy as np

        if self._wanted:
            self._values.setdefault(part.tensor, Fingerprint()).add(part.start, view)
        if self._finite and not is_finite(np.frombuffer(view, "u1"), tensor.dtype):
            first = part.start // DTYPE_NBYTES[tensor.dtype]
            raise RefitError(
                f"{tick(tensor.name)} holds NaN or infinity",
                where=f"{len(view) // DTYPE_NBYTES[tensor.dtype]} elements from {first} on",
                fix="look at the training step; to push it all the same, finite=False",
            )


def canary_in(view: memoryview, dtype: str) -> int:
    """The lowest byte of the first element that is a normal number: kernels may flush the others to zero.

    >>> canary_in(memoryview(bytes([0, 0, 0x80, 0x3F])), "BF16")
    2
    """
    import numpy as np

    if dtype not in _EXPONENT:
        return 0
    width, mask = _EXPONENT[dtype]
    normal = np.flatnonzero(np.frombuffer(view[: 4096 * width], f"<u{width}") & mask)
    return int(normal[0]) * width if len(normal) else 0


def canaries_of(plan: RefitPlan) -> frozenset[int]:
    """The first tensor of each kind: names that differ in numbers only are of one kind."""
    kinds: dict[tuple[str, ...], int] = {}
    for i, tensor in enumerate(plan.tensors):
        kind = tuple(part for part in tensor.name.split(".") if not part.isdigit())
        if tensor.nbytes:
            kinds.setdefault((*kind, tensor.dtype), i)
    return frozenset(kinds.values())
