"""What is sent: a model's tensors packed into buckets, once, and the same at every push.

Both ends derive the plan from the list of tensors and the size of a bucket, and compare its digest
before a tensor moves: so neither has to believe the other about what lies where.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from convtools.errors import UsageError, tick
from convtools.layout.plan import slabs
from convtools.layout.region import Region
from convtools.refit.errors import RefitError
from convtools.stores.base import DTYPE_NBYTES

ALIGN = 256
"""Every part begins at a multiple of it."""
MAX_NBYTES = 1 << 50
MAX_BUCKETS = 1 << 20
MAX_PARTS = 1 << 17
"""Of one bucket."""


class Tensor(NamedTuple):
    """A tensor under its Hugging Face name."""

    name: str
    dtype: str
    """A key of `DTYPE_NBYTES`."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * DTYPE_NBYTES[self.dtype]


class Part(NamedTuple):
    """A region of a tensor that is one run of its bytes, and where it lies in its bucket."""

    tensor: int
    """Place of the tensor in the plan."""
    region: Region
    start: int
    """Its first byte in the tensor."""
    nbytes: int
    offset: int
    """Its first byte in the bucket."""


class PlannedBucket(NamedTuple):
    """What is sent together."""

    parts: tuple[Part, ...]
    nbytes: int
    """Bytes from the first part to the end of the last, the gaps between them included."""


@dataclass(frozen=True)
class RefitPlan:
    """Tensors -> buckets."""

    tensors: tuple[Tensor, ...]
    bucket_bytes: int
    """Size of every buffer; no bucket is larger."""
    buckets: tuple[PlannedBucket, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of a canonical description of all of it."""
        made = hashlib.sha256(f"convtools refit plan/1 {self.bucket_bytes} {ALIGN}\n".encode())
        for tensor in self.tensors:
            made.update(json.dumps([tensor.name, tensor.dtype, list(tensor.shape)]).encode() + b"\n")
        for bucket in self.buckets:
            made.update(json.dumps([[p.tensor, p.start, p.nbytes, p.offset] for p in bucket.parts]).encode())
        return made.digest()


def make_plan(tensors: Iterable[Tensor], bucket_bytes: int) -> RefitPlan:
    """Pack tensors, in order, into buckets of at most `bucket_bytes`; larger tensors are split.

    Raises RefitError for a name given twice or a tensor that cannot be, UsageError for a bucket size that
    is not a positive multiple of 256.

    >>> plan = make_plan([Tensor("a", "BF16", (3,)), Tensor("b", "F32", (128,))], 512)
    >>> [[(p.tensor, p.start, p.nbytes, p.offset) for p in b.parts] for b in plan.buckets]
    [[(0, 0, 6, 0), (1, 0, 256, 256)], [(1, 256, 256, 0)]]
    """
    listed = _listed(tensors, bucket_bytes)
    buckets: list[PlannedBucket] = []
    parts: list[Part] = []
    at = 0
    for i, tensor in enumerate(listed):
        for part in _parts(i, tensor, bucket_bytes, at):
            if (part.offset == 0 and parts) or len(parts) == MAX_PARTS:
                buckets.append(_bucket(parts))
                parts = []
            parts.append(part)
            at = _aligned(part.offset + part.nbytes)
    if parts:
        buckets.append(_bucket(parts))
    return RefitPlan(listed, bucket_bytes, tuple(buckets))


def make_windows(tensors: Iterable[Tensor], bucket_bytes: int) -> RefitPlan:
    """Tensors one after another in one run of memory, each at a multiple of 256, cut into windows.

    A part's region is one of the flat tensor. Raises what `make_plan` raises.

    >>> plan = make_windows([Tensor("a", "BF16", (3,)), Tensor("b", "F32", (2, 65))], 512)
    >>> [[(p.tensor, p.start, p.nbytes, p.offset) for p in b.parts] for b in plan.buckets]
    [[(0, 0, 6, 0), (1, 0, 256, 256)], [(1, 256, 264, 0)]]
    """
    listed = _listed(tensors, bucket_bytes)
    windows: list[list[Part]] = []
    at = 0
    for i, tensor in enumerate(listed):
        size, done = DTYPE_NBYTES[tensor.dtype], 0
        while done < tensor.nbytes:
            window, offset = divmod(at, bucket_bytes)
            nbytes = min(tensor.nbytes - done, bucket_bytes - offset)
            if window == len(windows):
                windows.append([])
            windows[window].append(Part(i, Region((done // size,), (nbytes // size,)), done, nbytes, offset))
            done, at = done + nbytes, at + nbytes
        at = _aligned(at)
    return RefitPlan(listed, bucket_bytes, tuple(map(_bucket, windows)))


def _listed(tensors: Iterable[Tensor], bucket_bytes: int) -> tuple[Tensor, ...]:
    if type(bucket_bytes) is not int or bucket_bytes <= 0 or bucket_bytes % ALIGN:
        raise UsageError(f"a bucket of {bucket_bytes!r} bytes", expected=f"a positive multiple of {ALIGN}")
    listed = tuple(tensors)
    _check(listed)
    if sum(t.nbytes for t in listed) // bucket_bytes > MAX_BUCKETS:
        raise UsageError(f"buckets of {bucket_bytes} bytes are too small for this model")
    return listed


def _parts(i: int, tensor: Tensor, bucket_bytes: int, at: int) -> list[Part]:
    """The parts of a tensor, of which the first may go to byte `at` of a bucket that is begun."""
    out: list[Part] = []
    size, done = DTYPE_NBYTES[tensor.dtype], 0
    whole = Region.whole(tensor.shape)
    if not tensor.nbytes:
        return out
    room = bucket_bytes - at
    # A tensor that fits a bucket is not split, unless most of a bucket would stay empty.
    most = room if tensor.nbytes <= room or (room >= bucket_bytes // 4 and room >= size) else bucket_bytes
    for region in _runs(whole, most // size, bucket_bytes // size):
        nbytes = region.numel * size
        if at + nbytes > bucket_bytes:
            at = 0
        out.append(Part(i, region, done, nbytes, at))
        done += nbytes
        at = _aligned(at + nbytes)
    return out


def _runs(whole: Region, first: int, most: int) -> list[Region]:
    """C-contiguous regions in order: rows that fit `first` elements, then as many as fit `most`."""
    sizes = whole.sizes
    inner = prod(sizes[1:]) if sizes else 1
    rows = first // inner if inner else 0
    if whole.numel <= first or not sizes or rows < 1 or rows >= sizes[0]:
        return list(slabs(whole, min(first, most) if whole.numel <= first else most))
    head = Region(whole.offsets, (rows, *sizes[1:]))
    tail = Region((rows, *whole.offsets[1:]), (sizes[0] - rows, *sizes[1:]))
    return [head, *slabs(tail, most)]


def _bucket(parts: Sequence[Part]) -> PlannedBucket:
    return PlannedBucket(tuple(parts), parts[-1].offset + parts[-1].nbytes)


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def _check(tensors: tuple[Tensor, ...]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise RefitError(f"{tick(tensor.name)} is there twice", fix="give every tensor one name")
        if tensor.dtype not in DTYPE_NBYTES:
            raise RefitError(f"{tick(tensor.name)} is of a dtype that is not known", found=tick(tensor.dtype))
        if any(n < 0 for n in tensor.shape) or tensor.nbytes > MAX_NBYTES:
            raise RefitError(f"{tick(tensor.name)} cannot be of that shape", found=list(tensor.shape))
        seen.add(tensor.name)
    if not seen:
        raise RefitError("there are no tensors to send")
