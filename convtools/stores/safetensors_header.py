"""The header of a safetensors file, read with every rule of the format checked, or written.

Bytes are copied by these offsets, so they are not taken on trust. The format's own library says
"invalid offset" for three different faults (two names on one range, a repeated name, a hole) and
needs the dtype to exist in numpy or torch; here a fault is named, and a dtype is only a number of bits.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

from convtools.errors import AccountingError, CheckpointError, UnsupportedEncoding, UsageError
from convtools.stores.base import DTYPE_NBYTES
from convtools.stores.json_file import strict_json
from convtools.stores.names import is_unicode, tick
from convtools.stores.regular_file import DAMAGED, open_regular

MAX_HEADER_NBYTES = 100_000_000
"""The format's own limit, as its library has it."""

SUB_BYTE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Dtypes of the format that are narrower than a byte: listed, never converted."""

_BITS = {**{dtype: 8 * nbytes for dtype, nbytes in DTYPE_NBYTES.items()}, **SUB_BYTE_BITS}
_METADATA = "__metadata__"
_FIELDS = frozenset(("dtype", "shape", "data_offsets"))
_MAX_NUMEL = 2**63
_MAX_DIMS = 64


class HeaderEntry(NamedTuple):
    """One tensor of a safetensors file."""

    dtype: str
    """A key of `DTYPE_NBYTES` or of `SUB_BYTE_BITS`."""
    shape: tuple[int, ...]
    start: int
    """First byte, from the start of the file."""
    end: int
    """One past the last byte, from the start of the file."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the head of a safetensors file says, checked against the file's size."""

    tensors: dict[str, HeaderEntry]
    """By name, in the header's order."""
    metadata: dict[str, str]
    """`__metadata__`; empty where the file has none."""
    data_start: int
    """Offset of the first tensor byte."""
    file_size: int


def read_header(path: Path) -> Header:
    """The header of `path`, with the whole data range accounted for.

    Raises `CheckpointError` where the file is not regular, is cut short, or breaks a rule of the
    format. Sub-byte dtypes are listed, by their own size rule; refusing them is the caller's part.
    """
    file, size = open_regular(path)
    with file:
        return check_header(file, size, path)


def check_header(file: BinaryIO, size: int, path: Path) -> Header:
    """The same of a file of `size` bytes of which `file` gives the first ones, the header at least.

    `path` is for messages. Raises as `read_header` does.
    """
    text, data_start = _header_text(file, size, path)
    table = strict_json(text, path, base=8)
    if not isinstance(table, dict):
        raise CheckpointError("the safetensors header is not a JSON object", where=f"{path}:8", fix=DAMAGED)
    metadata = _metadata(table.pop(_METADATA, None), path)
    tensors = {name: _entry(name, raw, path, data_start, size) for name, raw in table.items()}
    _check_coverage(tensors, path, data_start, size)
    return Header(tensors, metadata, data_start, size)


def encode_header(
    entries: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The head of a file that holds `entries` (name, dtype, shape) back to back in this order.

    >>> encode_header([("w", "BF16", (2, 3))])[8:]
    b'{"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}       '

    `metadata` is `{"format": "pt"}` unless given: transformers refuses a file without it. The length
    is a multiple of 8, so that the data is aligned. Raises `AccountingError` for a name given twice,
    `UnsupportedEncoding` for a sub-byte dtype, `UsageError` for what the format cannot express.
    """
    metadata = {"format": "pt"} if metadata is None else metadata
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise UsageError(f"safetensors metadata holds strings only: {tick(key)} is {tick(value)}")
    table: dict[str, object] = {_METADATA: dict(metadata)}
    offset = 0
    for name, dtype, shape in entries:
        if name == _METADATA:
            raise UsageError(f"`{_METADATA}` is reserved by the safetensors format: no tensor can have it")
        if name in table:
            raise AccountingError(f"tensor {tick(name)} would be written twice into one file")
        if dtype in SUB_BYTE_BITS:
            raise UnsupportedEncoding(f"tensor {tick(name)} has the sub-byte dtype {dtype}")
        if dtype not in DTYPE_NBYTES:
            raise UsageError(f"tensor {tick(name)} has the dtype {tick(dtype)}, unknown to safetensors")
        fault, numel = _numel(list(shape))
        if fault:
            raise UsageError(f"tensor {tick(name)} has the shape {tick(shape)}: {fault}")
        end = offset + numel * DTYPE_NBYTES[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    try:
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"a tensor name is not valid Unicode: {tick(error.object)}") from None
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_NBYTES:
        raise UsageError(
            f"a safetensors header of {len(text)} bytes: no reader takes one over {MAX_HEADER_NBYTES}",
            fix="write smaller shards",
        )
    return len(text).to_bytes(8, "little") + text


def header_nbytes(head: bytes, size: int, path: Path) -> int:
    """How long the header is that follows `head`, the first 8 bytes of a file of `size` bytes.

    Raises `CheckpointError` where no file of that size can have it.
    """
    if len(head) < 8:
        raise CheckpointError(
            f"{tick(path.name)} is too short for a safetensors file",
            where=path,
            expected="at least 10 bytes",
            found=f"{size} bytes",
            fix=DAMAGED,
        )
    length = int.from_bytes(head, "little")
    if length > MAX_HEADER_NBYTES or length > size - 8:
        limit = min(MAX_HEADER_NBYTES, size - 8)
        raise CheckpointError(
            f"{tick(path.name)} claims a safetensors header that cannot be",
            where=f"{path}:0",
            expected=f"at most {limit} bytes ({'the format' if limit == MAX_HEADER_NBYTES else 'the file'})",
            found=f"{length} bytes",
            fix=f"{DAMAGED} (or it is no safetensors file)",
        )
    return length


def _header_text(file: BinaryIO, size: int, path: Path) -> tuple[str, int]:
    """(header without its length, offset of the data), read only once its length is known to be sane."""
    length = header_nbytes(file.read(8), size, path)
    raw = file.read(length)
    if len(raw) < length:
        raise CheckpointError(f"{tick(path.name)} shrank while it was read", where=path)
    if raw[:1] != b"{":
        raise CheckpointError(
            f"the header of {tick(path.name)} is no JSON object",
            where=f"{path}:8",
            expected="`{` as its first byte",
            found=repr(raw[:1]) if raw else "an empty header",
            fix=f"{DAMAGED} (or it is no safetensors file)",
        )
    try:
        return raw.decode(), 8 + length
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"the header of {tick(path.name)} is not UTF-8", where=f"{path}:{8 + error.start}", fix=DAMAGED
        ) from None


def _metadata(raw: object, path: Path) -> dict[str, str]:
    """`__metadata__`; absent, null and {} are alike."""
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise CheckpointError(f"`{_METADATA}` is not an object of strings", where=path, found=tick(raw))
    for key, value in raw.items():
        if not isinstance(value, str):
            raise CheckpointError(
                f"`{_METADATA}` has a value that is not a string, under {tick(key)}",
                where=path,
                expected="strings only",
                found=tick(value),
                fix=f"a tensor named `{_METADATA}` was written: rename it"
                if "data_offsets" in raw
                else "write the file again with string metadata",
            )
    return dict(raw)


def _entry(name: str, raw: object, path: Path, data_start: int, size: int) -> HeaderEntry:
    """One tensor's entry, each field checked, its offsets moved to count from the start of the file."""
    if not is_unicode(name):
        raise _refusal(name, path, "the name is not valid Unicode")
    if not isinstance(raw, dict) or raw.keys() != _FIELDS:
        keys = ", ".join(map(tick, list(raw)[:8])) if isinstance(raw, dict) else tick(raw)
        raise _refusal(name, path, "not a tensor's entry", ", ".join(sorted(_FIELDS)), keys)
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _refusal(name, path, "unknown dtype", f"one of {', '.join(_BITS)}", tick(dtype))
    fault, numel = _numel(shape)
    if fault:
        raise _refusal(name, path, f"its shape is not possible: {fault}", found=tick(shape))
    if type(offsets) is not list or len(offsets) != 2 or not all(type(o) is int for o in offsets):
        raise _refusal(name, path, "its data_offsets are not two integers", found=tick(offsets))
    begin, end = offsets
    if not 0 <= begin <= end <= size - data_start:
        wanted = f"0 <= begin <= end <= {size - data_start}"
        raise _refusal(name, path, "its data_offsets lie outside the file's data", wanted, tick(offsets))
    bits = numel * _BITS[dtype]
    if bits % 8:
        raise _refusal(name, path, f"{numel} elements of {dtype} do not fill whole bytes", found=tick(shape))
    if end - begin != bits // 8:
        wanted = f"{bits // 8} bytes for {dtype} of shape {tick(shape)}"
        raise _refusal(name, path, "its bytes do not fit its shape", wanted, f"{end - begin} bytes")
    return HeaderEntry(dtype, tuple(shape), data_start + begin, data_start + end)


def _refusal(
    name: str, path: Path, what: str, expected: object = None, found: object = None
) -> CheckpointError:
    return CheckpointError(
        f"tensor {tick(name)}: {what}", where=path, expected=expected, found=found, fix=DAMAGED
    )


def _numel(shape: object) -> tuple[str, int]:
    """(what is wrong with `shape`, or an empty string; its number of elements)."""
    if type(shape) is not list:
        return "not a list", 0
    if len(shape) > _MAX_DIMS:
        return f"{len(shape)} dims, more than {_MAX_DIMS}", 0
    numel = 1
    for dim in shape:
        if type(dim) is not int or dim < 0:  # type(), for a bool is an int too
            return f"{tick(dim)} is not a non-negative integer", 0
        numel *= dim
        if dim >= _MAX_NUMEL or numel >= _MAX_NUMEL:
            return "more than 2^63 elements", 0
    return "", numel


def _check_coverage(tensors: dict[str, HeaderEntry], path: Path, data_start: int, size: int) -> None:
    """The data is covered once, without overlap and without hole; else say which of them it is."""
    at, before = data_start, ""
    for start, end, name in sorted((e.start, e.end, name) for name, e in tensors.items()):
        if start < at:
            how = "are the same bytes" if tensors[before][2:] == (start, end) else "overlap"
            raise CheckpointError(
                f"tensors {tick(before)} and {tick(name)} {how}",
                where=f"{path}:{start}",
                expected="each byte to belong to one tensor",
                found=f"{tick(before)} ends at {at}, {tick(name)} is {start} to {end}",
                fix="write the file again with each tensor in full, once",
            )
        if start > at:
            _refuse_hole(path, at, start, f"before tensor {tick(name)}")
        at, before = end, name
    if at < size:
        _refuse_hole(path, at, size, "after the last tensor")


def _refuse_hole(path: Path, start: int, end: int, place: str) -> NoReturn:
    raise CheckpointError(
        f"{tick(path.name)} has a hole: {end - start} bytes {place} belong to no tensor",
        where=f"{path}:{start}",
        expected="the tensors to cover the whole data",
        found=f"nothing from {start} to {end}",
        fix=DAMAGED,
    )
