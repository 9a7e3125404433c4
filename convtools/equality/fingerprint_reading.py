"""Reading and hashing on threads: what lies where is hashed as it lies, and the parts add up."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from threading import Event, Lock, local
from typing import Any, NamedTuple

from convtools.equality.fingerprint import Fingerprint, combine
from convtools.equality.reading import Reader
from convtools.layout.plan import Move, Stride

_CHUNK = 1 << 20  # what is read before it is hashed: it stays in the cache of a core
_JOB = 32 << 20
_JOB_PARTS = 500
_LONG = 16 << 10  # runs of at least so many bytes are read one by one where most between them is not wanted


class Part(NamedTuple):
    """A nest of runs of one file that belong to one tensor."""

    name: str
    path: Path
    offset: int
    """Byte offset in the file from which `move.src` counts."""
    move: Move
    """In bytes: `dst` of the tensor, `src` of the file."""


class InOrder(NamedTuple):
    """A tensor whose bytes are to be seen in their own order."""

    name: str
    nbytes: int
    read: Callable[[Reader], Iterator[memoryview]]
    """Its bytes, piece by piece."""


class Hashes(NamedTuple):
    """What was found, by name."""

    values: dict[str, int]
    in_order: dict[str, str]
    """`xxh3-128` of what was read in order, where it was wanted."""


def in_bytes(move: Move, size: int) -> Move:
    """A move that counts elements of `size` bytes, counted in bytes.

    >>> in_bytes(Move(1, 2, (), 3), 2)
    Move(dst=2, src=4, loops=(), run=6)
    """
    loops = tuple(Stride(s.n, s.dst * size, s.src * size) for s in move.loops)
    return Move(move.dst * size, move.src * size, loops, move.run * size)


def cut(move: Move, most: int) -> Iterator[Move]:
    """The same bytes as moves that span at most `most` bytes of the source, or one run's part of it.

    >>> [(m.dst, m.src, m.run) for m in cut(Move(0, 0, (Stride(2, 4, 100),), 4), 50)]
    [(0, 0, 4), (4, 100, 4)]
    """
    move = move._replace(loops=tuple(s for s in move.loops if s.n != 1))
    if _extent(move) <= most and not _sparse(move):
        yield move
    elif move.loops:
        for half in move.halves():
            yield from cut(half, most)
    else:
        for at in range(0, move.run, most):
            yield Move(move.dst + at, move.src + at, (), min(most, move.run - at))


def _extent(move: Move) -> int:
    """Bytes of the source from the first to the last."""
    return sum((s.n - 1) * s.src for s in move.loops) + move.run


def _sparse(move: Move) -> bool:
    return bool(move.loops) and move.run >= _LONG and _extent(move) > 2 * move.numel


def hash_all(
    items: Iterable[Part | InOrder],
    reader: Callable[[], Reader],
    *,
    workers: int,
    progress: Callable[[int], None] = lambda nbytes: None,
    xxh3: bool = False,
    path: str | None = None,
) -> Hashes:
    """Read and hash everything on `workers` threads. The first error stops all and is raised.

    Raises CheckpointError where a file ends early or cannot be read.
    """
    run = _Run(reader, progress, xxh3, path)
    stream = _jobs(items)
    with ThreadPoolExecutor(workers) as pool:
        try:
            pending = {pool.submit(run.job, job) for job in islice(stream, 2 * workers)}
            while pending:
                done, pending = wait(pending, return_when="FIRST_COMPLETED")
                for future in done:
                    future.result()
                pending |= {pool.submit(run.job, job) for job in islice(stream, len(done))}
        except BaseException:
            run.stop.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            run.close()
    return Hashes({name: combine(values) for name, values in run.values.items()}, run.in_order)


def _jobs(items: Iterable[Part | InOrder]) -> Iterator[list[Part | InOrder]]:
    """Large parts cut up, small ones together."""
    job: list[Part | InOrder] = []
    held = 0
    for item in items:
        pieces = (
            [item] if isinstance(item, InOrder) else (item._replace(move=m) for m in cut(item.move, _JOB))
        )
        for piece in pieces:
            job.append(piece)
            held += piece.nbytes if isinstance(piece, InOrder) else piece.move.numel
            if held >= _JOB or len(job) >= _JOB_PARTS:
                yield job
                job, held = [], 0
    if job:
        yield job


class _Run:
    """The state that threads share, and what each has of its own."""

    def __init__(
        self, reader: Callable[[], Reader], progress: Callable[[int], None], xxh3: bool, path: str | None
    ) -> None:
        self._reader, self._progress, self._xxh3, self._path = reader, progress, xxh3, path
        self._local, self._lock = local(), Lock()
        self._readers: list[Reader] = []
        self.stop = Event()
        self.values: dict[str, list[int]] = defaultdict(list)
        self.in_order: dict[str, str] = {}

    def close(self) -> None:
        """Close every file."""
        for reader in self._readers:
            reader.close()

    def job(self, items: list[Part | InOrder]) -> None:
        """Hash one job's items."""
        for item in items:
            if self.stop.is_set():
                return
            value = self._part(item) if isinstance(item, Part) else self._ordered(item)
            with self._lock:
                self.values[item.name].append(value)

    def _mine(self) -> tuple[Reader, memoryview]:
        if not hasattr(self._local, "reader"):
            self._local.reader, self._local.buffer = self._reader(), memoryview(bytearray(_CHUNK))
            with self._lock:
                self._readers.append(self._local.reader)
        return self._local.reader, self._local.buffer

    def _part(self, part: Part) -> int:
        reader, buffer = self._mine()
        made = Fingerprint(self._path)
        for move in cut(part.move, _CHUNK):
            if self.stop.is_set():
                break
            view = buffer[: _extent(move)]
            reader.into(part.path, part.offset + move.src, view)
            made.add_move(move._replace(src=0), 1, view)
            self._progress(move.numel)
        return made.value

    def _ordered(self, item: InOrder) -> int:
        reader, _ = self._mine()
        made, at, state = Fingerprint(self._path), 0, self._hash()
        for view in item.read(reader):
            if self.stop.is_set():
                break
            made.add(at, view)
            if state is not None:
                state.update(view)
            at += view.nbytes
            self._progress(view.nbytes)
        if state is not None:
            with self._lock:
                self.in_order[item.name] = state.hexdigest()
        return made.value

    def _hash(self) -> Any:
        if not self._xxh3:
            return None
        import xxhash

        return xxhash.xxh3_128()
