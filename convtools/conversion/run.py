"""Run a plan: check what must be equal, move every byte, write small files. Publishing is the caller's."""

import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from convtools.codecs.cast import cast, overflows
from convtools.conversion.plan import Resolver, SideFile, Target
from convtools.conversion.source import Duplicate, Padding, Stored
from convtools.disk import writing
from convtools.errors import AccountingError, CheckpointError, StorageError
from convtools.layout.piece import block
from convtools.layout.plan import move, slabs
from convtools.layout.region import Region
from convtools.staging import Joined
from convtools.stores.base import DTYPE_NBYTES, FilePlan, Payload
from convtools.stores.move import SLAB, Gather, Mover, Unit, write_all
from convtools.stores.regular_file import open_regular

_JOB_NBYTES = 64 << 20
_JOB_PARTS = 2000

Progress = Callable[[int], None]


class _Job(NamedTuple):
    """A run of parts of one file."""

    file: Path
    offset: int
    parts: tuple[bytes | Payload, ...]


class PaddingFound(NamedTuple):
    """What stood in the rows past the vocabulary."""

    name: str
    rows: int
    nonzero_rows: int


def in_threads(
    work: Callable[[Any], None], items: Iterable[Any], *, workers: int, stop: threading.Event
) -> None:
    """Call `work` on every item, on threads, asking for a few items ahead only.

    The first error sets `stop`, which the work looks at, and is raised when all threads have ended.
    """
    stream = iter(items)
    with ThreadPoolExecutor(workers) as pool:
        pending = {pool.submit(work, item) for item in islice(stream, 2 * workers)}
        try:
            while pending:
                done, pending = wait(pending, return_when="FIRST_COMPLETED")
                for future in done:
                    future.result()
                pending |= {pool.submit(work, item) for item in islice(stream, len(done))}
        except BaseException:
            stop.set()
            raise


class Runner:
    """Runs the parts of a plan on threads; each thread reuses one buffer and its own descriptors."""

    def __init__(
        self,
        source: Stored,
        resolver: Resolver | None,
        *,
        workers: int,
        progress: Progress,
        stop: threading.Event,
        written: Callable[[Path, int, Payload], None] | None = None,
    ) -> None:
        # `written(file, offset, payload)` is called by the thread that has just filled a payload
        self._source, self._resolver, self._progress, self._stop = source, resolver, progress, stop
        self._written = written
        self._workers = workers
        self._local = threading.local()
        self._movers: list[Mover] = []
        self._lock = threading.Lock()

    def write(self, files: Iterable[FilePlan], staging: Joined) -> None:
        """Fill files that `make_files` made. The first error stops all threads and is raised."""
        self._all(self._write, _jobs(files, staging))

    def check_duplicates(self, pairs: Iterable[Duplicate]) -> None:
        """Raise AccountingError where two stored copies of one tensor differ."""
        self._all(lambda pair: self._compare(*pair), pairs)

    def padding(self, rows: Iterable[Padding]) -> list[PaddingFound]:
        """Look at rows past the vocabulary."""
        found: list[PaddingFound] = []
        self._all(lambda one: found.append(self._look(one)), rows)
        return found

    def close(self) -> None:
        """Close every file."""
        for mover in self._movers:
            mover.close()

    def _all(self, work: Callable[[Any], None], items: Iterable[Any]) -> None:
        in_threads(work, items, workers=self._workers, stop=self._stop)

    def _mover(self) -> Mover:
        mover: Mover | None = getattr(self._local, "mover", None)
        if mover is None:
            mover = self._local.mover = Mover(self._progress, self._cast, self._stop)
            with self._lock:
                self._movers.append(mover)
        return mover

    def _cast(self, data: memoryview, src: str, dst: str, plus: int) -> memoryview:
        out: memoryview = cast(data, src, dst, plus)
        if lost := overflows(data, src, out, dst):
            raise AccountingError(
                f"`{self._local.name}`: {lost} numbers are too large for {dst} and would become infinite",
                fix="choose a --dtype with a wider range (bf16, fp32)",
            )
        return out

    def _write(self, job: _Job) -> None:
        mover = self._mover()
        with writing(job.file):
            self._write_parts(mover, job)

    def _write_parts(self, mover: Mover, job: _Job) -> None:
        assert self._resolver is not None, "to write, a runner must know what comes from where"
        fd = os.open(job.file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            at, literal = job.offset, bytearray()
            for part in job.parts:
                if isinstance(part, bytes):
                    literal += part
                    at += len(part)
                    continue
                if literal:
                    write_all(fd, bytes(literal), at - len(literal))
                    literal.clear()
                self._local.name = part.name
                for unit in self._resolver.units(part, at):
                    mover.run(fd, unit)
                if self._written is not None:
                    self._written(job.file, at, part)
                at += part.nbytes
            write_all(fd, bytes(literal), at - len(literal))
        finally:
            os.close(fd)

    def _compare(self, kept: str, repeated: str) -> None:
        a, b = self._source.tensors[kept], self._source.tensors[repeated]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            raise _differ(kept, repeated, f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
        mover, left, right = self._mover(), a.blobs[0], b.blobs[0]
        assert len(a.blobs) == len(b.blobs) == 1, "copies are compared where each lies in one piece"
        for at in range(0, a.nbytes, SLAB):
            n = min(SLAB, a.nbytes - at)
            if mover.read(left.path, left.offset + at, n) != mover.read(right.path, right.offset + at, n):
                raise _differ(kept, repeated, f"they differ within bytes {at} to {at + n}")

    def _look(self, rows: Padding) -> PaddingFound:
        import numpy as np

        tensor, mover, nonzero = self._source.tensors[rows.name], self._mover(), 0
        size = DTYPE_NBYTES[tensor.dtype]
        for blob in tensor.blobs:
            part = blob.region.intersect(rows.region)
            for slab in slabs(part, SLAB // size) if part else ():
                at = Region(
                    tuple(o - b for o, b in zip(slab.offsets, blob.region.offsets, strict=True)), slab.sizes
                )
                gather = Gather(blob.path, blob.offset, move(block("", "", at), at.sizes, blob.region.sizes))
                data = mover.gather(Unit(0, slab.numel, tensor.dtype, tensor.dtype, (gather,)))
                lines = np.frombuffer(data, "u1").reshape(slab.sizes[0], -1)
                nonzero += int(lines.any(axis=1).sum())
        return PaddingFound(rows.name, rows.region.sizes[0], nonzero)


def _differ(kept: str, repeated: str, found: str) -> AccountingError:
    return AccountingError(
        f"two copies of one tensor differ: `{kept}` and `{repeated}`",
        expected="the same bytes",
        found=found,
        fix="the checkpoint mixes two states of the model; save it again",
    )


def make_files(files: Iterable[FilePlan], staging: Joined) -> None:
    """Create every file at its full size, all holes."""
    for file in files:
        with staging.open(file.path) as f:
            f.truncate(file.nbytes)


def check_files(files: Iterable[FilePlan], staging: Joined) -> None:
    """Raise StorageError unless every file is there, as long as planned."""
    for file in files:
        path = staging.path / file.path
        found = path.stat().st_size if path.is_file() else None
        if found != file.nbytes:
            raise StorageError(
                f"`{path}` was changed by another process while it was written",
                expected=f"{file.nbytes} bytes",
                found="nothing there" if found is None else f"{found} bytes",
                fix="run it again",
            )


def write_side_files(files: Iterable[SideFile], staging: Joined) -> None:
    """Write small files, and copy the ones that come from a folder."""
    for file in files:
        with staging.open(file.path) as f:
            if isinstance(file.content, bytes):
                f.write(file.content)
            else:
                source, size = open_regular(file.content)
                with source:
                    shutil.copyfileobj(source, f, 1 << 20)
                    if f.tell() != size or os.fstat(source.fileno()).st_size != size:
                        raise CheckpointError("the file changed while it was copied", where=file.content)


def _jobs(files: Iterable[FilePlan], staging: Joined) -> Iterator[_Job]:
    """Jobs of all files in turn: threads that write to one file wait for each other."""
    waiting = deque(_jobs_of(file, staging.path) for file in files)
    while waiting:
        turn = waiting.popleft()
        job = next(turn, None)
        if job is not None:
            waiting.append(turn)
            yield job


def _jobs_of(file: FilePlan, root: Path) -> Iterator[_Job]:
    start = at = 0
    parts: list[bytes | Payload] = []
    for part in file.parts:
        parts.append(part)
        at += len(part) if isinstance(part, bytes) else part.nbytes
        if at - start >= _JOB_NBYTES or len(parts) >= _JOB_PARTS:
            yield _Job(root / file.path, start, tuple(parts))
            start, parts = at, []
    if parts:
        yield _Job(root / file.path, start, tuple(parts))


def file_shares(target: Target, world: int) -> list[list[FilePlan]]:
    """Deal the files to so many ranks, the largest first, each to the rank with the fewest bytes."""
    shares: list[list[FilePlan]] = [[] for _ in range(world)]
    load = [0] * world
    for file in sorted(target.files, key=lambda f: -f.nbytes):
        rank = load.index(min(load))
        shares[rank].append(file)
        load[rank] += file.nbytes
    return shares
