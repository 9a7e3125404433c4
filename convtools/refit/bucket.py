"""The ring of buckets: memory that both ends see, which only its maker can write and nobody can shrink.

One sealed memfd for the life of a sync. Its pages are touched before the first push, because the first
touch of a page costs several times the copy into it.
"""

import fcntl
import mmap
import os
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import xxhash

from convtools.errors import UsageError
from convtools.refit.errors import PeerError, RefitError
from convtools.refit.plan import ALIGN

if TYPE_CHECKING:
    from convtools.refit.protocol import DeviceRow

F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python 3.11 has no name for it
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
MAX_STAGING = 1 << 40
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


Mark = xxhash.xxh3_128
"""The checksum of a bucket as it is filled."""


class Unmarked:
    """In its place where none is wanted."""

    def update(self, data: object) -> None:
        """Nothing."""

    def digest(self) -> bytes:
        """Zeros."""
        return bytes(16)


def checksum(data: memoryview) -> bytes:
    """xxh3-128 of a bucket's bytes."""
    return xxhash.xxh3_128_digest(data)


class Slots(Protocol):
    """The buffers that buckets arrive in."""

    def slot(self, i: int, nbytes: int) -> Any:
        """The bytes of one: a memoryview, or a torch tensor. Raises RefitError outside of them."""


class Equal(Protocol):
    """Buffers of one size."""

    bucket_bytes: int
    slots: int


def check_slot(ring: Equal, i: int, nbytes: int) -> None:
    """Raises RefitError where there is no such buffer."""
    if not (0 <= i < ring.slots and 0 <= nbytes <= ring.bucket_bytes):
        raise RefitError(
            "a bucket lies outside of the ring",
            expected=f"{ring.slots} buffers of {ring.bucket_bytes} bytes",
            found=f"{nbytes} bytes of buffer {i}",
        )


def check_ring(bucket_bytes: int, slots: int, least: int) -> None:
    """Raises UsageError for sizes that cannot be."""
    if slots < least or bucket_bytes <= 0 or bucket_bytes % ALIGN or bucket_bytes * slots > MAX_STAGING:
        raise UsageError(
            f"no ring of {slots} buckets of {bucket_bytes} bytes",
            expected=f"at least {least}, of a multiple of {ALIGN} bytes, {MAX_STAGING} in all",
        )


class _Slots:
    """Equal buffers in one mapping."""

    windows = False
    """Whether the buffers are not filled, but are the tensors' own memory."""

    def __init__(self, mapping: mmap.mmap, bucket_bytes: int, slots: int) -> None:
        self.bucket_bytes, self.slots = bucket_bytes, slots
        self._mapping: mmap.mmap | None = mapping
        self._view = memoryview(mapping)

    def slot(self, i: int, nbytes: int) -> memoryview:
        """The first `nbytes` of buffer `i`. Raises RefitError where there is no such buffer."""
        check_slot(self, i, nbytes)
        return self._view[i * self.bucket_bytes : i * self.bucket_bytes + nbytes]

    @property
    def nbytes(self) -> int:
        """All staging memory."""
        return self.bucket_bytes * self.slots

    def memory(self) -> mmap.mmap:
        """All of it. Raises RefitError once it was given back."""
        if self._mapping is None:
            raise RefitError("this memory was given back")
        return self._mapping

    def close(self) -> None:
        """Unmap it. What still looks at a slot keeps the pages until it lets go."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            self._view.release()
            with suppress(BufferError):  # a numpy array still points into it: unmapped when that goes
                mapping.close()


class Ring(_Slots):
    """The producer's end: `slots` buffers of `bucket_bytes`, made, touched and sealed."""

    least = 2
    """Fewer buffers are refused: one is filled while another is consumed."""
    device: Any = None
    """Where it lies, if not in memory of the CPU: a `DeviceMemory`."""

    def __init__(self, bucket_bytes: int, slots: int = 2) -> None:
        """Raises UsageError for sizes that cannot be, RefitError where there is no memory for it."""
        check_ring(bucket_bytes, slots, self.least)
        self.fd = -1
        try:
            self.fd = os.memfd_create("convtools-refit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, bucket_bytes * slots)
            mapping = mmap.mmap(self.fd, bucket_bytes * slots)
            _touch(mapping)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)  # the mapping that exists stays writable
        except OSError as error:
            self._close_fd()
            raise RefitError(f"no memory for the staging buffers: {error.strerror}") from None
        super().__init__(mapping, bucket_bytes, slots)

    def export(self) -> "DeviceRow | None":
        """What a reader must know beside the descriptor."""
        return None

    @property
    def ahead(self) -> int:
        """Buckets that are handed over before the first is consumed."""
        return self.slots

    @property
    def staging_bytes(self) -> int:
        """Memory that a push needs beside the tensors."""
        return self.nbytes

    def close(self) -> None:
        """Give the memory back."""
        super().close()
        self._close_fd()

    def _close_fd(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RingView(_Slots):
    """The consumer's end, which cannot write."""

    def __init__(self, fd: int, bucket_bytes: int, slots: int) -> None:
        """Takes `fd` and closes it. Raises PeerError unless it is sealed and of that size."""
        try:
            if bucket_bytes <= 0 or slots <= 0 or bucket_bytes * slots > MAX_STAGING:
                raise PeerError("a ring cannot be of that size", found=f"{slots} of {bucket_bytes} bytes")
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError:
                raise PeerError("what was passed is no memory that can be sealed") from None
            if seals & SEALS != SEALS:
                raise PeerError("the ring is not sealed", expected=f"{SEALS:#x}", found=f"{seals:#x}")
            if (size := os.fstat(fd).st_size) != bucket_bytes * slots:
                raise PeerError("the ring is of another size", expected=bucket_bytes * slots, found=size)
            try:
                mapping = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
            except OSError as error:
                raise PeerError(f"the ring cannot be mapped: {error.strerror}") from None
        finally:
            os.close(fd)
        super().__init__(mapping, bucket_bytes, slots)


def _touch(mapping: mmap.mmap) -> None:
    try:
        mapping.madvise(_POPULATE_WRITE)
    except OSError:  # an older kernel
        for at in range(0, len(mapping), mmap.PAGESIZE):
            mapping[at] = 0
