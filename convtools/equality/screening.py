"""The first pass: which pairs of tensors are the same bytes. As fast as memory, and nothing but bytes.

Files are read with `pread` into buffers that stay in a core's cache, so a file that is cut short while it
is read is an error and not a signal; `memcmp` runs without the interpreter's lock.
"""

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import islice
from mmap import mmap
from pathlib import Path
from typing import NamedTuple, TypeVar

from convtools.conversion.source import Source
from convtools.equality import in_place
from convtools.equality.canonical import Canonical, Run
from convtools.equality.numbers import widened
from convtools.equality.pairing import Pair
from convtools.equality.reading import Reader
from convtools.errors import ConvtoolsError
from convtools.layout.plan import slabs
from convtools.layout.region import Region
from convtools.stores.base import DTYPE_NBYTES

STEP = 1 << 20
"""Bytes that are compared at once where both sides are files as they are."""
SLAB = 2 << 20
"""Bytes of either side that are gathered at once."""
_TASK = 64 << 20
_TASKS_AT_ONCE, _NBYTES_AT_ONCE = 64, 16 << 20

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int

Work = TypeVar("Work")
Done = TypeVar("Done")


def address(view: memoryview | bytearray) -> int:
    """Where a writable buffer lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def same_bytes(a: memoryview, b: memoryview) -> bool:
    """Whether two writable buffers hold the same bytes."""
    if len(a) != len(b):
        return False
    return not len(a) or _memcmp(address(a), address(b), len(a)) == 0


class Task(NamedTuple):
    """A part of a pair."""

    pair: Pair
    region: Region
    run_a: tuple[Path, int] | None
    """Where A is a plain run of a file: of which file, from which byte on."""
    run_b: tuple[Path, int] | None
    nbytes: int


class Lanes:
    """Threads, each with a reader a side and its own buffers."""

    def __init__(self, a: Canonical, b: Canonical, workers: int) -> None:
        self.a, self.b, self._workers = a, b, workers
        self._local = threading.local()
        self._readers: list[Reader] = []
        self._lock = threading.Lock()
        for side in (a, b):
            if isinstance(side.side.source, Source) or side.relation is not None:
                side.prepare()

    def close(self) -> None:
        """Close every file."""
        for reader in self._readers:
            reader.close()

    def readers(self) -> tuple[Reader, Reader]:
        """This thread's readers of A and B."""
        if not hasattr(self._local, "readers"):
            self._local.readers = self.a.side.reader(), self.b.side.reader()
            with self._lock:
                self._readers += self._local.readers
        found: tuple[Reader, Reader] = self._local.readers
        return found

    def buffers(self) -> tuple[memoryview, memoryview, int, int]:
        """This thread's two step buffers, and their addresses."""
        if not hasattr(self._local, "buffers"):
            one, two = memoryview(mmap(-1, STEP)), memoryview(mmap(-1, STEP))
            self._local.buffers = one, two, address(one), address(two)
        found: tuple[memoryview, memoryview, int, int] = self._local.buffers
        return found

    def each(self, work: Callable[[Work], Done], items: Iterable[Work]) -> Iterator[Done]:
        """`work` of every item on the threads; results come as they are done. `work` raises nothing."""
        stream = iter(items)
        if self._workers == 1:
            yield from map(work, stream)
            return
        with ThreadPoolExecutor(self._workers) as pool:
            pending = {pool.submit(work, item) for item in islice(stream, 2 * self._workers)}
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
                pending |= {pool.submit(work, item) for item in islice(stream, len(done))}

    def slabs(self, pair: Pair, region: Region) -> Iterator[tuple[Region, memoryview, memoryview]]:
        """(region, A's bytes, B's bytes) of a pair, in order; each valid until the next."""
        (reader_a, reader_b), a, b = self.readers(), self.a, self.b
        width = max(DTYPE_NBYTES[a.dtypes[pair.a]], DTYPE_NBYTES[b.dtypes[pair.b]], DTYPE_NBYTES[pair.dtype])
        for slab in slabs(region, SLAB // width):
            if slab.numel:
                left = _one(a.read(pair.a, slab, reader_a))
                right = _one(b.read(pair.b, slab, reader_b))
                yield (
                    slab,
                    widened(left, a.dtypes[pair.a], pair.dtype),
                    widened(right, b.dtypes[pair.b], pair.dtype),
                )


def _one(parts: Iterator[memoryview]) -> memoryview:
    data = next(parts)
    if next(parts, None) is not None:
        raise AssertionError("a slab is one unit")
    return data


def tasks(lanes: Lanes, pairs: Iterable[Pair]) -> Iterator[list[Task]]:
    """The pairs in parts of one size, small ones together."""
    batch: list[Task] = []
    nbytes = 0
    for pair in pairs:
        for task in _parts(lanes, pair):
            batch.append(task)
            nbytes += task.nbytes
            if nbytes >= _NBYTES_AT_ONCE or len(batch) >= _TASKS_AT_ONCE:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def _parts(lanes: Lanes, pair: Pair) -> Iterator[Task]:
    runs = lanes.a.run_of(pair.a), lanes.b.run_of(pair.b)
    width, at = DTYPE_NBYTES[pair.dtype], 0
    for region in slabs(Region.whole(pair.shape), _TASK // width):
        n = region.numel * width
        here = [None if run is None else (run[0], run[1] + at) for run in runs]
        yield Task(pair, region, here[0], here[1], n)
        at += n


class Screened(NamedTuple):
    """What the first pass says of a task."""

    pair: Pair
    same: bool
    fault: str | None
    """Why it could not be read."""


def screen(lanes: Lanes, batch: list[Task]) -> list[Screened]:
    """Whether each task's bytes are the same on both sides. Raises nothing that reading raises."""
    out, unequal = [], set()
    for task in batch:
        if task.pair.name in unequal:
            continue
        fault = None
        try:
            same = _same(lanes, task)
        except (ConvtoolsError, OSError) as error:
            same, fault = False, told(error)
        if not same:
            unequal.add(task.pair.name)
        out.append(Screened(task.pair, same, fault))
    return out


def told(error: ConvtoolsError | OSError) -> str:
    """An error in one line."""
    if isinstance(error, ConvtoolsError):
        return error.what + (f" ({error.where})" if error.where is not None else "")
    return str(error)


def _same(lanes: Lanes, task: Task) -> bool:
    sides, given = (lanes.a, lanes.b), (task.run_a, task.run_b)
    if given == (None, None) or not task.nbytes:
        return _gathered(lanes, task)
    if (quick := _in_place(lanes, task)) is not None:
        return quick
    found: list[list[Run]] = []
    for side, name, run, reader in zip(
        sides, (task.pair.a, task.pair.b), given, lanes.readers(), strict=True
    ):
        runs = [Run(0, *run, task.nbytes)] if run else side.runs(name, task.region)
        if runs is None or (task.nbytes > STEP and not all(reader.local(r.path) for r in runs)):
            return _gathered(lanes, task)  # short runs; larger requests to the Hub; no copy of live tensors
        found.append(runs)
    whole, parts, swap = (
        (found[0][0], found[1], False) if len(found[0]) == 1 else (found[1][0], found[0], True)
    )
    if len(found[0]) > 1 and len(found[1]) > 1:
        return _gathered(lanes, task)
    return all(
        _same_run(lanes, (whole.path, whole.offset + part.to - whole.to), part, swap) for part in parts
    )


def _in_place(lanes: Lanes, task: Task) -> bool | None:
    """Whether a plain run of a file is the same as what the other side stores; None: read and see."""
    (one, other), views = lanes.readers(), lanes.buffers()[:2]
    if task.run_a is not None and task.run_b is not None:
        return in_place.same_run(one, task.run_a, other, task.run_b, task.nbytes, views)
    if task.run_a is not None:
        units = lanes.b.units(task.pair.b, task.region)
        return in_place.same_units(one, task.run_a, other, units, views)
    assert task.run_b is not None
    units = lanes.a.units(task.pair.a, task.region)
    return in_place.same_units(other, task.run_b, one, units, views)


def _same_run(lanes: Lanes, whole: tuple[Path, int], part: Run, swap: bool) -> bool:
    readers, (view_a, view_b, left, right) = lanes.readers(), lanes.buffers()
    one, other = (readers[1], readers[0]) if swap else readers
    for done in range(0, part.nbytes, STEP):
        n = min(STEP, part.nbytes - done)
        one.into(whole[0], whole[1] + done, view_a[:n])
        other.into(part.path, part.offset + done, view_b[:n])
        if _memcmp(left, right, n):
            return False
    return True


def _gathered(lanes: Lanes, task: Task) -> bool:
    readers, pair = lanes.readers(), task.pair
    for run, here, there in ((task.run_a, 0, 1), (task.run_b, 1, 0)):
        if run is not None and readers[here].local(run[0]):
            side, name = (lanes.a, pair.a) if there == 0 else (lanes.b, pair.b)
            return _against_run(lanes, task, readers[here], run, side, name, readers[there])
    return all(same_bytes(a, b) for _, a, b in lanes.slabs(pair, task.region))


def _against_run(
    lanes: Lanes, task: Task, plain: Reader, run: tuple[Path, int], side: Canonical, name: str, reader: Reader
) -> bool:
    """What is gathered, against a plain run that is read step by step into the cache."""
    (path, at), (view, _, left, _) = run, lanes.buffers()
    for slab in slabs(task.region, SLAB // DTYPE_NBYTES[task.pair.dtype]):
        data = _one(side.read(name, slab, reader)) if slab.numel else memoryview(b"")
        for done in range(0, len(data), STEP):
            n = min(STEP, len(data) - done)
            plain.into(path, at + done, view[:n])
            if _memcmp(left, address(data[done : done + n]), n):
                return False
        at += len(data)
    return True


def same_runs(lanes: Lanes, reader: Reader, a: tuple[Path, int], b: tuple[Path, int], nbytes: int) -> bool:
    """Whether two runs of bytes are the same. Raises CheckpointError where one cannot be read."""
    views = lanes.buffers()[:2]
    if nbytes and (quick := in_place.same_run(reader, a, reader, b, nbytes, views)) is not None:
        return quick
    for done in range(0, nbytes, STEP):
        n = min(STEP, nbytes - done)
        for view, (path, at) in zip(views, (a, b), strict=True):
            reader.into(path, at + done, view[:n])
        if not same_bytes(views[0][:n], views[1][:n]):
            return False
    return True
