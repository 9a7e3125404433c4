"""The records of a zip that lies somewhere inside a file: which bytes each one is.

`torch.save` writes an uncompressed zip, and a `.distcp` file is hundreds of thousands of them end to
end. All that is needed is where a record's bytes lie. Every number in the zip is a claim until it has
been compared with the others: records are stored as they are, inside the zip, and never overlap.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from convtools.errors import CheckpointError
from convtools.stores.names import tick
from convtools.stores.regular_file import open_regular

_END = Struct("<IHHHHIIH")  # end of central directory
_END64_LOCATOR = Struct("<IIQI")
_END64 = Struct("<IQHHIIQQQQ")
_ENTRY = Struct("<IHHHHHHIIIHHHHHII")  # of the central directory
_LOCAL = Struct("<IHHHHHIIIHH")
_END_MAGIC, _END64_LOCATOR_MAGIC, _END64_MAGIC = 0x06054B50, 0x07064B50, 0x06064B50
_ENTRY_MAGIC, _LOCAL_MAGIC = 0x02014B50, 0x04034B50
_SEE_ZIP64 = 0xFFFFFFFF
_ENCRYPTED, _SIZES_FOLLOW = 0x1, 0x8

EDGE = 2048
"""Bytes read at once from either end: all but the payload of a `torch.save` of one tensor."""
MAX_DIRECTORY = 1 << 28
"""Bytes of the largest directory read: about three million records."""


class Record(NamedTuple):
    """Where one record's bytes lie."""

    offset: int
    """From the start of the zip."""
    nbytes: int


class Window:
    """Bytes [offset, offset + length) of an open file, read as seldom as possible."""

    __slots__ = ("_fd", "_head", "_tail", "_tail_at", "length", "offset", "path")

    def __init__(self, fd: int, path: Path, offset: int, length: int) -> None:
        self._fd, self.path, self.offset, self.length = fd, path, offset, length
        whole = length <= 2 * EDGE
        self._head = read_exactly(fd, path, offset, length if whole else EDGE)
        self._tail_at = 0 if whole else length - EDGE
        self._tail = self._head if whole else read_exactly(fd, path, offset + self._tail_at, EDGE)

    def read(self, start: int, nbytes: int) -> bytes:
        """`nbytes` bytes at `start`; a `CheckpointError` where they pass the window's end."""
        if start < 0 or nbytes < 0 or start + nbytes > self.length:
            raise self.error(
                f"{nbytes} bytes are said to lie at {start} of a zip of {self.length} bytes", start
            )
        if start + nbytes <= len(self._head):
            return self._head[start : start + nbytes]
        if start >= self._tail_at:
            return self._tail[start - self._tail_at : start - self._tail_at + nbytes]
        return read_exactly(self._fd, self.path, self.offset + start, nbytes)

    def where(self, at: int = 0) -> str:
        """The place in the file of byte `at` of the window, for an error."""
        return f"{self.path}:{self.offset + max(at, 0)}"

    def error(self, what: str, at: int = 0) -> CheckpointError:
        """An error about byte `at` of the window."""
        return CheckpointError(f"not a file that torch.save wrote, or damaged: {what}", where=self.where(at))


@contextmanager
def open_file(path: Path) -> Iterator[tuple[int, int]]:
    """(file descriptor, size) of a regular file; a `CheckpointError` where there is none."""
    file, size = open_regular(path)
    with file:
        yield file.fileno(), size


def open_window(fd: int, path: Path, size: int, offset: int, length: int) -> Window:
    """[offset, offset + length) of an open file of `size` bytes; a `CheckpointError` if it ends before."""
    if offset < 0 or length < 0 or offset + length > size:
        raise CheckpointError(
            f"{length} bytes are said to lie at {offset} of a file of {size} bytes", where=f"{path}:{offset}"
        )
    return Window(fd, path, offset, length)


def read_records(window: Window) -> dict[str, Record]:
    """Name -> place of every record of the zip that fills `window`.

    Raises `CheckpointError` where the zip is damaged, or holds anything but plain stored records.
    """
    count, start, end = _directory(window)
    data = window.read(start, end - start)
    records: dict[str, Record] = {}
    spans: list[tuple[int, int, str]] = []
    at = 0
    for _ in range(count):
        name, nbytes, header, flags, at = _entry(window, data, at, start)
        if name in records:
            raise window.error(f"record {tick(name)} is there twice", start)
        offset = _payload(window, name, nbytes, header, flags)
        records[name] = Record(offset, nbytes)
        sizes = 24 if max(header, nbytes) >= _SEE_ZIP64 else 16  # what follows a payload
        spans.append((header, offset + nbytes + (sizes if flags & _SIZES_FOLLOW else 0), name))
    if at != len(data):
        raise window.error(f"the directory of {count} records has {len(data) - at} bytes more", start + at)
    end = 0
    for header, stop, name in [*sorted(spans), (start, start, "")]:
        if header != end:  # a length that lies by a byte would shift a payload, and nothing else would tell
            what = f"record {tick(name)} begins at {header}" if name else f"its directory begins at {header}"
            raise window.error(f"{what}, the record before it ends at {end}", min(header, end))
        end = stop
    return records


def _directory(window: Window) -> tuple[int, int, int]:
    """(number of records, start, end) of the central directory."""
    end = window.length - _END.size
    if end < 0:
        raise window.error(f"{window.length} bytes are too few for a zip")
    magic, _, _, _, count, nbytes, start, comment = _END.unpack(window.read(end, _END.size))
    if magic != _END_MAGIC or comment:
        raise window.error("the end of a zip is missing: it is cut short, or is no zip", end)
    short = (count, nbytes, start)
    locator = end - _END64_LOCATOR.size
    if locator >= 0:
        magic, _, at, _ = _END64_LOCATOR.unpack(window.read(locator, _END64_LOCATOR.size))
        if magic == _END64_LOCATOR_MAGIC:
            magic, _, _, _, _, _, _, count, nbytes, start = _END64.unpack(window.read(at, _END64.size))
            if magic != _END64_MAGIC or at + _END64.size != locator:
                raise window.error("its zip64 end does not lie where it is said to", at)
            if short != (min(count, 0xFFFF), min(nbytes, _SEE_ZIP64), min(start, _SEE_ZIP64)):
                raise window.error("its two ends do not say the same", end)
            end = at
    if start + nbytes != end or nbytes > MAX_DIRECTORY or count * _ENTRY.size > nbytes:
        raise window.error(
            f"a directory of {count} records in {nbytes} bytes at {start} cannot end at {end}", end
        )
    return count, start, end


def _entry(window: Window, data: bytes, at: int, start: int) -> tuple[str, int, int, int, int]:
    """(name, bytes, offset of its header, flags, end of the entry) of the directory entry at `at`."""
    where = start + at
    if at + _ENTRY.size > len(data):
        raise window.error("the directory is cut short", where)
    fields = _ENTRY.unpack_from(data, at)
    magic, _, _, flags, method, _, _, _, packed, nbytes, name_size, extra_size, comment, _, _, _, header = (
        fields
    )
    at += _ENTRY.size
    end = at + name_size + extra_size + comment
    if magic != _ENTRY_MAGIC or end > len(data):
        raise window.error("the directory is damaged", where)
    try:
        name = data[at : at + name_size].decode()
    except UnicodeDecodeError:
        raise window.error("a record's name is not UTF-8", where) from None
    if method or flags & _ENCRYPTED:
        raise window.error(f"record {tick(name)} is compressed or encrypted, as in a TorchScript file", where)
    if _SEE_ZIP64 in (nbytes, packed, header):
        wide = _zip64(data[at + name_size : at + name_size + extra_size])
        try:  # the fields that did not fit, in this order
            nbytes = next(wide) if nbytes == _SEE_ZIP64 else nbytes
            packed = next(wide) if packed == _SEE_ZIP64 else packed
            header = next(wide) if header == _SEE_ZIP64 else header
        except StopIteration:
            raise window.error(f"record {tick(name)} lacks its zip64 sizes", where) from None
    if nbytes != packed:
        raise window.error(f"record {tick(name)} is {packed} bytes stored and {nbytes} unpacked", where)
    return name, nbytes, header, flags, end


def _zip64(extra: bytes) -> Iterator[int]:
    """The 8-byte fields of the zip64 part of an extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = (
            int.from_bytes(extra[at : at + 2], "little"),
            int.from_bytes(extra[at + 2 : at + 4], "little"),
        )
        if kind == 1:
            part = extra[at + 4 : at + 4 + size]
            return (int.from_bytes(part[i : i + 8], "little") for i in range(0, len(part) - 7, 8))
        at += 4 + size
    return iter(())


def _payload(window: Window, name: str, nbytes: int, header: int, flags: int) -> int:
    """Where a record's bytes begin, by its local header."""
    head = window.read(header, _LOCAL.size)
    magic, _, flagged, method, _, _, _, packed, plain, name_size, extra_size = _LOCAL.unpack(head)
    same = name.encode() == window.read(header + _LOCAL.size, name_size)
    sizes = {packed, plain} <= {0, _SEE_ZIP64, nbytes}  # 0: they follow the payload
    if magic != _LOCAL_MAGIC or method or flagged != flags or not same or not sizes:
        raise window.error(f"record {tick(name)} has another header than the directory says", header)
    return int(header + _LOCAL.size + name_size + extra_size)


def read_exactly(fd: int, path: Path, offset: int, nbytes: int) -> bytes:
    """`nbytes` bytes at `offset` of an open file; a `CheckpointError` where it ends before."""
    parts: list[bytes] = []
    while nbytes or not parts:
        try:
            part = os.pread(fd, min(nbytes, 1 << 30), offset)
        except OSError as error:
            raise CheckpointError(f"cannot read: {error.strerror}", where=f"{path}:{offset}") from error
        if not part and nbytes:
            raise CheckpointError(f"the file ends {nbytes} bytes early", where=f"{path}:{offset}")
        parts.append(part)
        offset += len(part)
        nbytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
