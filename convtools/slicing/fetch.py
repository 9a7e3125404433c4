"""The bytes of a slice from the Hub: only the ranges it needs, many at a time, neighbours in one request."""

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from convtools.conversion.plan import Resolver
from convtools.conversion.run import Progress, in_threads
from convtools.disk import writing
from convtools.stores.base import DTYPE_NBYTES, FilePlan
from convtools.stores.hub import HubCheckpoint, HubReader, is_remote
from convtools.stores.move import read_exact, write_all
from convtools.stores.regular_file import open_regular

_REQUESTS = 8
"""Requests at a time."""
_MOST = 64 << 20
"""Bytes a request."""
_STEP = 4 << 20


class Range(NamedTuple):
    """A run of bytes that lies in one piece on both sides."""

    file: str
    """File of the slice."""
    to: int
    path: Path
    """File of the source."""
    of: int
    nbytes: int


def fetch(
    hub: HubCheckpoint,
    resolver: Resolver,
    files: Iterable[FilePlan],
    root: Path,
    progress: Progress,
    stop: threading.Event,
) -> int:
    """Fill the files under `root`; returns the bytes that came over the network.

    Raises CheckpointError where they cannot be had; the first error stops all requests.
    """
    reader, fetched, lock = HubReader(hub, stop=stop), 0, threading.Lock()

    def run(one: Range) -> None:
        nonlocal fetched
        path = root / one.file
        with writing(path):
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                if is_remote(one.path):
                    reader.copy(one.path, one.of, one.nbytes, fd, one.to, progress)
                    with lock:
                        fetched += one.nbytes
                else:
                    _copy(one, fd, progress)
            finally:
                os.close(fd)

    jobs = (part for one in ranges(resolver, files) for part in _cut(one))
    in_threads(run, jobs, workers=_REQUESTS, stop=stop)
    literals(files, root)
    return fetched


def literals(files: Iterable[FilePlan], root: Path) -> None:
    """Write the headers."""
    for file in files:
        path, at = root / file.path, 0
        with writing(path), open(path, "r+b") as out:
            for part in file.parts:
                if isinstance(part, bytes):
                    write_all(out.fileno(), part, at)
                at += len(part) if isinstance(part, bytes) else part.nbytes


def _copy(one: Range, fd: int, progress: Progress) -> None:
    """From a file of the cache."""
    file, _ = open_regular(one.path)
    with file:
        for at in range(0, one.nbytes, _STEP):
            n = min(_STEP, one.nbytes - at)
            write_all(fd, read_exact(one.path, file.fileno(), one.of + at, n), one.to + at)
            progress(n)


def _cut(one: Range) -> Iterator[Range]:
    for at in range(0, one.nbytes, _MOST):
        yield one._replace(to=one.to + at, of=one.of + at, nbytes=min(_MOST, one.nbytes - at))


def ranges(resolver: Resolver, files: Iterable[FilePlan]) -> Iterator[Range]:
    """What to fetch, neighbours joined: a request costs more than the bytes of a small tensor."""
    last: Range | None = None
    for one in _runs(resolver, files):
        if (
            last is not None
            and (last.file, last.path) == (one.file, one.path)
            and (last.to + last.nbytes, last.of + last.nbytes) == (one.to, one.of)
        ):
            last = last._replace(nbytes=last.nbytes + one.nbytes)
            continue
        if last is not None:
            yield last
        last = one
    if last is not None:
        yield last


def _runs(resolver: Resolver, files: Iterable[FilePlan]) -> Iterator[Range]:
    for file in files:
        at = 0
        for part in file.parts:
            if isinstance(part, bytes):
                at += len(part)
                continue
            for unit in resolver.units(part, at):
                size = DTYPE_NBYTES[unit.src_dtype]
                for g in unit.gathers:
                    for to, of in g.move.runs():
                        begin, run = unit.offset + to * size, g.move.run * size
                        if run:
                            yield Range(file.path, begin, g.path, g.offset + of * size, run)
            at += part.nbytes
