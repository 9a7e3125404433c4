"""Comparing stored runs where they lie: no region is laid out first, and each byte is read once.

A compiled loop reads both sides with `pread` into buffers that stay in a core's cache, and compares run by
run. It is a quick way and no other answer: whatever it cannot read or does not fit is left to the slow one.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from convtools.equality.reading import Reader
from convtools.stores.base import DTYPE_NBYTES
from convtools.stores.move import DIRECT, Unit

_MOST_FILES = 32
"""Files a call; a reader keeps 64 open."""
Views = tuple[memoryview, memoryview]
"""Two writable buffers, of a size that stays in a cache; a row has to fit the first."""
Place = tuple[Path, int]
"""A file, and the byte where something begins."""
Part = tuple[int, int, int, tuple[tuple[int, int, int], ...], int]
"""(descriptor, byte of the file, byte of the plain run, loops, bytes a run): what the compiled loop takes."""


@cache
def kernel() -> Any:
    """The compiled module; None where it was not built."""
    try:
        from convtools.equality import fingerprint_kernel
    except ImportError:
        return None
    return fingerprint_kernel if hasattr(fingerprint_kernel, "same_files") else None


def same_run(one: Reader, a: Place, other: Reader, b: Place, nbytes: int, views: Views) -> bool | None:
    """Whether two runs of bytes are the same; None where that cannot be told this way."""
    if kernel() is None or not (one.local(a[0]) and other.local(b[0])):
        return None
    return _told(one, a, ((other.source(b[0]), b[1], 0, (), nbytes),), views)


def same_units(
    plain: Reader, place: Place, other: Reader, units: Iterable[Unit], views: Views
) -> bool | None:
    """Whether a plain run of a file is what the units give; None where that cannot be told this way.

    The units' offsets count from the run's first byte.
    """
    path, start = place
    if kernel() is None or not plain.local(path):
        return None
    for unit in units:
        for at, parts in _calls(unit, other):
            if not (same := _told(plain, (path, start + unit.offset + at), parts, views)):
                return same
    return True


def _calls(unit: Unit, reader: Reader) -> list[tuple[int, tuple[Part, ...]]]:
    """(byte of the unit, the parts to compare from there on); no parts where the slow way is to be taken."""
    slow: list[tuple[int, tuple[Part, ...]]] = [(0, ())]
    paths = {g.path for g in unit.gathers}
    if not unit.as_it_is or sum(g.move.numel for g in unit.gathers) != unit.numel:
        return slow
    if len(paths) > _MOST_FILES or not all(reader.local(path) for path in paths):
        return slow
    files, size = {path: reader.source(path) for path in paths}, DTYPE_NBYTES[unit.src_dtype]
    runs: list[Part] = []
    rows: dict[tuple[int, int, int], list[Part]] = {}
    for g in unit.gathers:
        fd, loops = files[g.path], tuple(s for s in g.move.loops if s.n != 1)
        if not loops or g.move.run * size >= DIRECT:
            runs += [(fd, g.offset + of * size, to * size, (), g.move.run * size) for to, of in g.move.runs()]
        else:
            # Parts that share rows of the plain side go together: each row is then read once.
            n, step = loops[0].n, loops[0].dst * size
            if not step:
                return slow
            first, to = divmod(g.move.dst * size, step)
            nest = tuple((s.n, s.dst * size, s.src * size) for s in loops)
            part = fd, g.offset + g.move.src * size, to, nest, g.move.run * size
            rows.setdefault((first * step, n, step), []).append(part)
    calls = [(at, tuple(parts)) for (at, _, _), parts in rows.items()]
    return [(0, tuple(runs)), *calls] if runs else calls


def _told(plain: Reader, place: Place, parts: tuple[Part, ...], views: Views) -> bool | None:
    """What the compiled loop says; None where it cannot read a file, or the parts do not fit its buffers."""
    if not parts:
        return None
    same: bool | None = kernel().same_files(plain.source(place[0]), place[1], parts, *views)
    return same
