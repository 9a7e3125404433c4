"""Shared memory in which whole tensors are put together for SGLang, and which its ranks map.

One file, made and touched once, written again at every push. A rank is given a name of its own for each
request, because what opens it removes the name after use. The file is locked while its maker lives: so
another process can tell a trainer that works from one that was killed, and removes what that one left.
"""

import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from convtools.refit.errors import RefitError
from convtools.refit.groups import Group
from convtools.refit.plan import ALIGN, RefitPlan

HEADER_NBYTES = 64
"""torch's, in front of memory that it shares by name: a count of who has it mapped."""
_MANY = 1 << 30  # so that the count never reaches zero, at which torch would remove the memory
_PREFIX = "convtools-sglang-"
SHM = Path("/dev/shm")
_POPULATE_WRITE = 23


class Layout:
    """Group -> its place in the staging memory, and after which bucket it is loaded."""

    def __init__(self, plan: RefitPlan, groups: Sequence[Group]) -> None:
        """Places are reused once a group is loaded; those of the smallest are kept for the commit."""
        self.at: dict[int, int] = {}
        """First byte of each tensor."""
        self.loads: dict[int, tuple[Group, ...]] = {}
        """After a bucket: the groups that are whole by then."""
        whole = [g for g in groups if g.nbytes]
        self.last = min(whole, key=lambda g: g.nbytes, default=None)
        """What is loaded once more by the commit."""
        self.nbytes = 0
        of = {i: g for g in whole for i in g.tensors}
        left = {g.name: g.nbytes for g in whole}
        taken: dict[str, tuple[int, int]] = {}
        for index, bucket in enumerate(plan.buckets):
            done: list[Group] = []
            for part in bucket.parts:
                found = of[part.tensor]
                if found.name not in taken:
                    taken[found.name] = self._place(plan, found, list(taken.values()))
                left[found.name] -= part.nbytes
                if not left[found.name]:
                    done.append(found)
            if done:
                self.loads[index] = tuple(done)
            for found in done:
                if found is not self.last:
                    del taken[found.name]

    def _place(self, plan: RefitPlan, group: Group, taken: list[tuple[int, int]]) -> tuple[int, int]:
        size = sum(_aligned(plan.tensors[i].nbytes) for i in group.tensors)
        start = 0
        for begin, end in sorted(taken):
            if start + size <= begin:
                break
            start = max(start, end)
        at = start
        for i in group.tensors:
            self.at[i] = at
            at += _aligned(plan.tensors[i].nbytes)
        self.nbytes = max(self.nbytes, start + size)
        return start, start + size


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


class SharedStaging:
    """The memory itself; `owner` names it, in words that no other sink uses."""

    def __init__(self, owner: str, nbytes: int) -> None:
        """Raises RefitError where there is no room for it."""
        self.owner, self.nbytes = owner, nbytes
        self._path = SHM / (_PREFIX + owner)
        self._names = 0
        self._fd = -1
        _sweep()
        try:
            # It has no name before it is locked: so nobody takes it for one that was left.
            self._fd = os.open(SHM, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._fd, 0, HEADER_NBYTES + nbytes)
            _name(self._fd, self._path)
            self._mapping = mmap.mmap(self._fd, HEADER_NBYTES + nbytes)
            with suppress(OSError):  # an older kernel: its pages are there, and are mapped as they are used
                self._mapping.madvise(_POPULATE_WRITE)
        except OSError as error:
            self._remove()
            raise RefitError(
                f"no staging memory of {nbytes} bytes in {SHM}: {error.strerror}",
                fix="give /dev/shm more room, or the sink another group of experts a call",
            ) from None
        self._view = memoryview(self._mapping)

    def slice(self, at: int, nbytes: int) -> memoryview:
        """Bytes of it."""
        return self._view[HEADER_NBYTES + at : HEADER_NBYTES + at + nbytes]

    @contextmanager
    def names(self, count: int) -> Iterator[list[str]]:
        """As many names for it, for one request."""
        self._view[:8] = struct.pack("<q", _MANY)
        made: list[Path] = []
        try:
            for _ in range(count):
                self._names += 1
                path = self._path.with_name(f"{self._path.name}.{self._names}")
                os.link(self._path, path)
                made.append(path)
            yield [path.name for path in made]
        finally:
            for path in made:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap and remove it."""
        self._view.release()
        with suppress(BufferError):  # an array still points into it: unmapped when that goes
            self._mapping.close()
        self._remove()

    def _remove(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(fd)


def _name(fd: int, path: Path) -> None:
    """Give a file without a name one. With a folder's descriptor, which is not used: or else Python's
    `link` does not follow the link that /proc has for the file."""
    folder = os.open(SHM, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def new_owner() -> str:
    """A name for a sink's staging memory."""
    return secrets.token_hex(6)


def is_alive(owner: str) -> bool:
    """Whether the process whose staging memory that is still runs, on this machine."""
    return not _is_left(SHM / (_PREFIX + owner))


def _is_left(path: Path) -> bool:
    """Whether nobody holds the lock; also where there is no such file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:  # another user's
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _sweep() -> None:
    """Remove what trainers left that were killed."""
    for path in SHM.glob(_PREFIX + "*"):
        with suppress(OSError):
            if path.stat().st_uid == os.getuid() and _is_left(path):
                path.unlink()
