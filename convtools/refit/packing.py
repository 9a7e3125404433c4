"""One pass over the source: each part into its bucket, looked at while it is still in the cache."""

import time
from typing import TYPE_CHECKING, Any

from convtools.equality.fingerprint import Fingerprint
from convtools.equality.one_pass import NO_FLOATS, copy_and_look
from convtools.errors import tick
from convtools.refit.bucket import Mark, Unmarked
from convtools.refit.errors import RefitError
from convtools.refit.guard import floats_of, where_not_finite
from convtools.refit.plan import Part, PlannedBucket, RefitPlan, Tensor
from convtools.refit.source import PushSource
from convtools.refit.transaction import packed

if TYPE_CHECKING:
    from typing_extensions import Buffer

_STEP = 1 << 19
"""Bytes that are copied, looked at and marked in one go: they stay in a core's own cache."""

_EXPONENT = {"BF16": (2, 0x7F80), "F16": (2, 0x7C00), "F32": (4, 0x7F800000), "F64": (8, 0x7FF << 52)}
"""dtype -> width, bits of the exponent."""


class Packer:
    """Fills buckets, and collects the fingerprints of what it filled them with."""

    def __init__(
        self, source: PushSource, plan: RefitPlan, *, finite: bool, fingerprints: bool, checksums: bool = True
    ) -> None:
        self._source, self._plan, self._finite, self._wanted = source, plan, finite, fingerprints
        self.checksums = checksums
        self._values: dict[int, Fingerprint] = {}
        self.gather_seconds = self.pack_seconds = self.wait_seconds = 0.0

    def pack(
        self, index: int, bucket: PlannedBucket, data: Any, canaries: frozenset[int] = frozenset()
    ) -> bytes:
        """Fill a bucket; gives its xxh3-128, or zeros. Raises RefitError for NaN and infinity, by tensor.

        Of each tensor in `canaries`, the lowest bit of one of its first elements is turned over.
        """
        self._source.bucket(index, bucket)
        mark, end = Mark() if self.checksums else Unmarked(), 0
        for part in bucket.parts:
            mark.update(data[end : part.offset])
            end = part.offset + part.nbytes
            view = data[part.offset : end]
            lies = None if part.tensor in canaries else self._source.lies(self._plan.tensors[part.tensor])
            if lies is None:
                self._gather(part, view, mark, part.tensor in canaries)
                continue
            began = time.perf_counter()
            for at in range(0, part.nbytes, _STEP):
                step, first = view[at : at + _STEP], part.start + at
                self._look(part.tensor, first, lies[first : first + len(step)], step)
                mark.update(step)
            self.pack_seconds += time.perf_counter() - began
        return mark.digest()

    def values(self) -> list[bytes]:
        """Fingerprints of all tensors, in the order of the plan; none where they are not wanted."""
        if not self._wanted:
            return []
        return [packed(self._values.get(i)) for i in range(len(self._plan.tensors))]

    def _gather(self, part: Part, view: memoryview, mark: Mark | Unmarked, canary: bool) -> None:
        """A part of a tensor that does not lie in memory as it is to be sent."""
        tensor = self._plan.tensors[part.tensor]
        step = _STEP if self._source.piecemeal else part.nbytes
        for at in range(0, part.nbytes, step):
            run = part._replace(start=part.start + at, nbytes=min(step, part.nbytes - at))
            piece = view[at : at + run.nbytes]
            began = time.perf_counter()
            self._source.fill(tensor, run, piece)
            filled = time.perf_counter()
            if canary and run.start == 0:
                piece[canary_in(piece, tensor.dtype)] ^= 1
            for first in range(0, run.nbytes, _STEP):
                self._look(part.tensor, run.start + first, piece[first : first + _STEP], None)
                mark.update(piece[first : first + _STEP])
            self.gather_seconds += filled - began
            self.pack_seconds += time.perf_counter() - filled

    def _look(self, i: int, start: int, data: "Buffer", to: memoryview | None) -> None:
        """Copy a run of a tensor, unless it lies there already, and look at it."""
        tensor = self._plan.tensors[i]
        value = self._values.setdefault(i, Fingerprint()) if self._wanted else None
        floats = floats_of(tensor.dtype) if self._finite else NO_FLOATS
        if not copy_and_look(to, data, start, value, floats):
            raise self._not_finite(tensor, start, data)

    @staticmethod
    def _not_finite(tensor: Tensor, start: int, data: "Buffer") -> RefitError:
        return RefitError(
            f"{tick(tensor.name)} holds NaN or infinity",
            where=where_not_finite(data, tensor.dtype, tensor.shape, start),
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
