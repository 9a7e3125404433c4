"""Moving bytes: the only place that copies tensor data from file to file.

Runs that are long on both sides go by kernel-side copy (`copy_file_range`); the rest are gathered
into one reused buffer and written in order. Nothing is ever held that grows with the checkpoint.
"""

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from convtools.errors import CheckpointError, StorageError
from convtools.layout.plan import Move
from convtools.stores.base import DTYPE_NBYTES
from convtools.stores.regular_file import open_regular

SLAB = 8 << 20
"""Bytes of a destination that are gathered at once."""
DIRECT = 64 << 10
"""Runs of at least so many bytes are copied by the kernel."""
WINDOW = 8 << 20
"""Bytes of a source that are mapped at once, for a transpose reads all over its file."""
_BUFFER = 4 << 20  # what is read before it is written: it stays in the cache of a core
_STEP = 64 << 20  # between two looks at progress and at a wish to stop
_OPEN_FILES = 64


class Gather(NamedTuple):
    """One source of a unit: a contiguous stored run, and which of its elements go where."""

    path: Path
    offset: int
    """Byte offset of the run's first element in the file."""
    move: Move


@dataclass(frozen=True, slots=True)
class Unit:
    """A contiguous run of a destination file, and where its elements come from; what none gives is zero."""

    offset: int
    """Byte offset in the destination file."""
    numel: int
    src_dtype: str
    dst_dtype: str
    gathers: tuple[Gather, ...]
    plus: int = 0
    """What is added to every number on the way."""

    @property
    def as_it_is(self) -> bool:
        """Whether the bytes need no more than copying."""
        return self.src_dtype == self.dst_dtype and not self.plus


class Mover:
    """Runs units; one per thread. Files are opened once and kept, at most 64 at a time."""

    def __init__(
        self,
        progress: Callable[[int], None] = lambda nbytes: None,
        cast: Callable[[Any, str, str, int], Any] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._progress = progress
        self._cast = cast
        self._stop = stop or threading.Event()
        self._files: OrderedDict[Path, BinaryIO] = OrderedDict()
        self._buffer = bytearray()
        self._kernel_copy = True

    def close(self) -> None:
        """Close every file."""
        while self._files:
            self._files.popitem()[1].close()

    def source(self, path: Path) -> int:
        """A descriptor open for reading. Raises CheckpointError where there is no such file any more."""
        if path in self._files:
            self._files.move_to_end(path)
            return self._files[path].fileno()
        while len(self._files) >= _OPEN_FILES:
            self._files.popitem(last=False)[1].close()
        self._files[path] = open_regular(path)[0]
        return self._files[path].fileno()

    def run(self, dst: int, unit: Unit) -> None:
        """Fill one unit of the file open at descriptor `dst`, which is all holes there.

        Raises CheckpointError where a source ends early or cannot be read, StorageError on a wish to stop.
        """
        if self._stop.is_set():
            raise StorageError("stopped before the end")
        size = DTYPE_NBYTES[unit.src_dtype]
        if unit.as_it_is and all(g.move.run * size >= DIRECT for g in unit.gathers):
            for g in unit.gathers:
                for to, of in g.move.runs():
                    self._copy(g.path, g.offset + of * size, dst, unit.offset + to * size, g.move.run * size)
            if holes := unit.numel - sum(g.move.numel for g in unit.gathers):
                self._progress(holes * size)
            return
        view = self.gather(unit)
        out = view if unit.as_it_is else self._converted(view, unit)
        write_all(dst, out, unit.offset)
        self._progress(len(out))

    def gather(self, unit: Unit) -> memoryview:
        """The elements of a unit, in its source dtype; valid until the next call."""
        size = DTYPE_NBYTES[unit.src_dtype]
        nbytes = unit.numel * size
        view = self._view(nbytes)
        if sum(g.move.numel for g in unit.gathers) != unit.numel:
            view[:] = bytes(nbytes)
        for g in unit.gathers:
            self._gather(g, size, view)
        return view

    def _view(self, nbytes: int) -> memoryview:
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(max(nbytes, SLAB))
        return memoryview(self._buffer)[:nbytes]

    def read(self, path: Path, offset: int, nbytes: int) -> bytes:
        """Bytes of a file."""
        return read_exact(path, self.source(path), offset, nbytes)

    def _converted(self, view: memoryview, unit: Unit) -> memoryview:
        assert self._cast is not None, "a plan that casts needs a cast"
        out: memoryview = self._cast(view, unit.src_dtype, unit.dst_dtype, unit.plus)
        return out

    def _copy(self, path: Path, of: int, dst: int, to: int, nbytes: int) -> None:
        src = self.source(path)
        while nbytes:
            if self._stop.is_set():
                raise StorageError("stopped before the end")
            # The kernel copies page by page: where pages do not line up, through a buffer is quicker,
            # and lets one thread read while another one writes to the same file.
            alike = (of - to) % mmap.PAGESIZE == 0
            step = min(nbytes, _STEP)
            done = self._kernel_step(path, src, of, dst, to, step) if alike and self._kernel_copy else 0
            if not done:
                done = min(nbytes, _BUFFER)
                view = self._view(done)
                _read_into(path, src, of, view)
                write_all(dst, view, to)
            of, to, nbytes = of + done, to + done, nbytes - done
            self._progress(done)

    def _kernel_step(self, path: Path, src: int, of: int, dst: int, to: int, nbytes: int) -> int:
        try:
            done = os.copy_file_range(src, dst, nbytes, of, to)
        except OSError:  # it cannot, or one side is at fault: a plain read or write says which
            self._kernel_copy = False
            return 0
        if done == 0 and os.fstat(src).st_size < of + nbytes:
            raise _short(path, of, nbytes)
        return done

    def _gather(self, g: Gather, size: int, view: memoryview) -> None:
        src, move = self.source(g.path), g.move
        run = move.run * size
        count = move.numel // move.run if move.run else 0
        if count <= 16 or run >= 4096:
            for to, of in move.runs():
                _read_into(g.path, src, g.offset + of * size, view[to * size : to * size + run])
            return
        _gather_strided(g.path, src, g.offset, move, size, view)


def _gather_strided(path: Path, src: int, offset: int, move: Move, size: int, view: memoryview) -> None:
    """Copy many short runs at once, through a window of the file that is unmapped again."""
    import numpy as np

    first = offset + move.src * size
    extent = (sum((s.n - 1) * s.src for s in move.loops) + move.run) * size
    if extent > WINDOW:
        for half in move.halves():
            _gather_strided(path, src, offset, half, size, view)
        return
    start = first - first % mmap.ALLOCATIONGRANULARITY
    try:
        window = mmap.mmap(src, first + extent - start, prot=mmap.PROT_READ, offset=start)
    except ValueError:  # longer than the file
        raise _short(path, first, extent) from None
    except OSError as error:
        raise _unreadable(path, first, error) from None
    # A run is one item of plain bytes, so its offset in the file need not be aligned.
    shape, run = tuple(s.n for s in move.loops), f"V{move.run * size}"
    with window:
        of = np.ndarray(shape, run, window, first - start, tuple(s.src * size for s in move.loops))
        to = np.ndarray(shape, run, view, move.dst * size, tuple(s.dst * size for s in move.loops))
        np.copyto(to, of)
        del of, to


def _short(path: Path, offset: int, nbytes: int) -> CheckpointError:
    return CheckpointError(
        "the file ends before the tensor's bytes do",
        where=f"{path}:{offset}",
        expected=f"{nbytes} more bytes",
        fix="the file changed while it was read, or is damaged; fetch it again",
    )


def _unreadable(path: Path, offset: int, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot read the file: {error.strerror}", where=f"{path}:{offset}")


def _read_into(path: Path, fd: int, offset: int, view: memoryview) -> None:
    at = 0
    while at < len(view):
        try:
            n = os.preadv(fd, [view[at:]], offset + at)
        except OSError as error:
            raise _unreadable(path, offset + at, error) from None
        if n == 0:
            raise _short(path, offset + at, len(view) - at)
        at += n


def read_exact(path: Path, fd: int, offset: int, nbytes: int) -> bytes:
    """Exactly `nbytes` bytes at `offset`. Raises CheckpointError where it cannot."""
    data = bytearray(nbytes)
    _read_into(path, fd, offset, memoryview(data))
    return bytes(data)


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write every byte of `data` at `offset`."""
    view = memoryview(data)
    while view:
        n = os.pwrite(fd, view, offset)
        view, offset = view[n:], offset + n
