"""Bytes of one side of a comparison: from files, from the Hub, from memory; bounded, one reader a thread."""

import os
from collections.abc import Callable, Mapping
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convtools.errors import CheckpointError
from convtools.layout.plan import Move
from convtools.stores.base import StoredTensor
from convtools.stores.move import SLAB, Gather, Mover

if TYPE_CHECKING:
    from convtools.stores.hub import HubCheckpoint

MEMORY = "memory:"
"""Paths of live tensors begin with it."""
_FETCH = 8 << 20
_LONG = 128 << 10
"""Runs of at least so many bytes are read by themselves."""
_EXTENT = 4 << 20

Memory = Mapping[Path, Callable[[], Any]]
"""Path -> a call that gives the bytes of a live tensor."""


class Reader(Mover):
    """A Mover that also reads live tensors, and files that lie on the Hub."""

    def __init__(self, memory: Memory | None = None, hub: "HubCheckpoint | None" = None) -> None:
        super().__init__()
        self._memory: Memory = memory or {}
        self._last: tuple[Path, Any] | None = None
        self._scratch: memoryview | None = None
        self._room: memoryview | None = None
        self._hub: Any = None
        if hub is not None and hub.repository is not None:
            from convtools.stores.hub import HubReader

            self._hub = HubReader(hub)

    def _view(self, nbytes: int) -> memoryview:
        if self._room is None or len(self._room) < nbytes:
            self._room = memoryview(mmap(-1, max(nbytes, SLAB)))  # pages that nobody uses cost nothing
        return self._room[:nbytes]

    def local(self, path: Path) -> bool:
        """Whether `path` is a file here."""
        return path not in self._memory and not (self._hub is not None and _remote(path))

    def into(self, path: Path, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`. Raises CheckpointError where they are not all there."""
        if path in self._memory:
            view[:] = self._live(path)[offset : offset + len(view)]
        elif self.local(path):
            read_into(path, self.source(path), offset, view)
        else:
            self._fetch(path, offset, view)

    def _live(self, path: Path) -> Any:
        # A tensor that is no plain run of memory here (on a GPU, strided) is copied: once for its slabs.
        if self._last is None or self._last[0] != path:
            self._last = (path, self._memory[path]())
        return self._last[1]

    def _fetch(self, path: Path, offset: int, view: memoryview) -> None:
        fd = os.memfd_create("fetched")
        try:
            for at in range(0, len(view), _FETCH):
                n = min(_FETCH, len(view) - at)
                self._hub.copy(path, offset + at, n, fd, 0, lambda _: None)
                read_into(path, fd, 0, view[at : at + n])
        finally:
            os.close(fd)

    def _gather(self, g: Gather, size: int, view: memoryview) -> None:
        move = g.move
        first = g.offset + move.src * size
        extent = (sum((s.n - 1) * s.src for s in move.loops) + move.run) * size
        if g.path in self._memory:
            _scatter(move, size, self._live(g.path), first, view)
        elif not self.local(g.path):
            data = memoryview(bytearray(extent))
            self._fetch(g.path, first, data)
            _scatter(move, size, data, 0, view)
        elif not move.loops or move.run * size >= _LONG or extent > 2 * move.numel * size:
            super()._gather(g, size, view)
        elif extent > _EXTENT:
            for half in move.halves():
                self._gather(g._replace(move=half), size, view)
        else:  # one read of all that lies there, and a copy within the cache: quicker than a read a run
            self._scratch = self._scratch or memoryview(mmap(-1, _EXTENT))
            data = self._scratch[:extent]
            read_into(g.path, self.source(g.path), first, data)
            _scatter(move, size, data, 0, view)


def _scatter(move: Move, size: int, data: Any, start: int, view: memoryview) -> None:
    """The elements of a move from `data`, where the first lies at byte `start`, to where they belong."""
    import numpy as np

    shape, run = tuple(s.n for s in move.loops), f"V{move.run * size}"
    of = np.ndarray(shape, run, data, start, tuple(s.src * size for s in move.loops))
    to = np.ndarray(shape, run, view, move.dst * size, tuple(s.dst * size for s in move.loops))
    np.copyto(to, of)


def _remote(path: Path) -> bool:
    from convtools.stores.hub import is_remote

    return is_remote(path)


def read_into(path: Path, fd: int, offset: int, view: memoryview) -> None:
    """Fill `view` from a file. Raises CheckpointError where it ends early or cannot be read."""
    at = 0
    while at < len(view):
        try:
            n = os.preadv(fd, [view[at:]], offset + at)
        except OSError as error:
            raise CheckpointError(
                f"cannot read the file: {error.strerror}", where=f"{path}:{offset + at}"
            ) from None
        if n == 0:
            raise CheckpointError(
                "the file ends before the tensor's bytes do",
                where=f"{path}:{offset + at}",
                expected=f"{len(view) - at} more bytes",
                fix="the file changed while it was read, or is damaged; fetch it again",
            )
        at += n


Stamp = tuple[int, int, int, int, int]


def stamps(tensors: Mapping[str, StoredTensor]) -> dict[Path, Stamp | None]:
    """What tells that a file has changed, for every local file of these tensors."""
    found: dict[Path, Stamp | None] = {}
    for tensor in tensors.values():
        for blob in tensor.blobs:
            if blob.path not in found and not str(blob.path).startswith((MEMORY, "hf:")):
                found[blob.path] = stamp(blob.path)
    return found


def stamp(path: Path) -> Stamp | None:
    """Size, both times, inode and device of a file; None where there is none."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev
