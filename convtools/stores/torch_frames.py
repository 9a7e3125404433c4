"""Writes `torch.save` files around tensors whose bytes come from elsewhere, without torch.

A file is a list of parts in order: literal bytes, and payloads that the writer streams in between (or
lets the kernel copy). The layout is that of PyTorch's own writer: stored records, each payload on a
64-byte boundary of the file, sizes in a descriptor after it, zip64 from 4 GiB on.
"""

from binascii import crc32
from collections.abc import Iterable, Mapping
from functools import lru_cache
from struct import pack
from typing import Any

from convtools.errors import UsageError
from convtools.layout.region import Region
from convtools.stores.base import Payload
from convtools.stores.pickle_write import Call, Global, Outside, dump_pickle, namespace, torch_dtype
from convtools.stores.torch_zip import STORAGE_DTYPE

ALIGNMENT = 64
_WIDE = 0xFFFFFFFF  # a 32-bit field that says: see the 64-bit one
_UTF8, _SIZES_FOLLOW = 0x0800, 0x0008
_STORAGE_CLASS = {dtype: name for name, dtype in STORAGE_DTYPE.items()}
_OrderedDict = Global("collections", "OrderedDict")


@lru_cache(maxsize=4096)
def tensor_frame(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """The bytes before and after those of one contiguous tensor, in a `torch.save` file of it.

    >>> prefix, suffix = tensor_frame("BF16", (4, 8))
    >>> prefix[:4], len(prefix) % 64
    (b'PK\\x03\\x04', 0)
    """
    parts = torch_file(Payload("", Region.whole(shape), dtype))
    literal = [part for part in parts if isinstance(part, bytes)]
    return literal[0], b"".join(literal[1:])  # an empty tensor has no bytes to place


def object_frame(value: Any, stem: str = "archive") -> bytes:
    """A whole `torch.save` file of a value without tensor data; empty tensors are allowed.

    Raises `UsageError` on a value that holds data or an object that cannot be written.
    """
    parts = torch_file(value, stem)
    if any(isinstance(part, Payload) for part in parts):
        raise UsageError("a tensor with data cannot be part of a small object")
    return b"".join(part for part in parts if isinstance(part, bytes))


def empty_tensor(dtype: str = "U8") -> Payload:
    """A tensor of no elements, as a value for `object_frame`; Megatron's empty `_extra_state`."""
    return Payload("", Region.whole((0,)), dtype)


def common_file(
    args: Mapping[str, Any],
    iteration: int,
    content_metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> bytes:
    """The bytes of Megatron's `common.pt`."""
    return object_frame(common_state(args, iteration, content_metadata, extra), "common")


def common_state(
    args: Mapping[str, Any],
    iteration: int,
    content_metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What Megatron keeps apart from the tensors: its arguments and where training stood."""
    state = {"args": namespace(args), "checkpoint_version": 3.0, "iteration": iteration, **(extra or {})}
    return state if content_metadata is None else {**state, "content_metadata": dict(content_metadata)}


def torch_file(value: Any, stem: str = "archive") -> tuple[bytes | Payload, ...]:
    """The parts, in order, of a `torch.save` file of `value`, in which each tensor is a `Payload`.

    Each payload becomes a record of its own, `<stem>/data/N`; the same payload twice is one tensor.
    Raises `UsageError` on a value that cannot be written.
    """
    payloads: list[Payload] = []
    pickled = dump_pickle(_with_tensors(value, payloads, {}))
    zip_file = _Zip(stem)
    zip_file.add("data.pkl", pickled)
    zip_file.add(".format_version", b"1")
    zip_file.add(".storage_alignment", b"%d" % ALIGNMENT)
    zip_file.add("byteorder", b"little")
    for number, payload in enumerate(payloads):
        zip_file.add(f"data/{number}", payload)
    zip_file.add("version", b"3\n")
    return _joined([*zip_file.parts, *zip_file.end()])


def _with_tensors(value: Any, payloads: list[Payload], seen: dict[Payload, Call]) -> Any:
    """The value with each `Payload` in a list, tuple or dict replaced by a call that rebuilds a tensor."""
    if isinstance(value, Payload):
        if value not in seen:
            seen[value] = _tensor(value, str(len(payloads)))
            payloads.append(value)
        return seen[value]
    if isinstance(value, dict):
        return type(value)((key, _with_tensors(item, payloads, seen)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(item, payloads, seen) for item in value)
    return value


def _tensor(payload: Payload, key: str) -> Call:
    """The call that makes a tensor of the record `data/<key>`, as PyTorch writes it."""
    shape = payload.region.sizes
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    view = (0, tuple(shape), tuple(reversed(strides)), False, Call(_OrderedDict, ()))
    if (storage_class := _STORAGE_CLASS.get(payload.dtype)) is not None:
        storage = Outside(("storage", Global("torch", storage_class), key, "cpu", payload.region.numel))
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), (storage, *view))
    storage = Outside(("storage", Global("torch.storage", "UntypedStorage"), key, "cpu", payload.nbytes))
    dtype = torch_dtype(payload.dtype)
    return Call(Global("torch._utils", "_rebuild_tensor_v3"), (storage, *view, dtype))


class _Zip:
    """A zip written front to back, of records whose sizes are known before their bytes."""

    def __init__(self, stem: str) -> None:
        self.parts: list[bytes | Payload] = []
        self._stem = stem
        self._at = 0
        self._directory: list[bytes] = []

    def add(self, name: str, content: bytes | Payload) -> None:
        nbytes = len(content) if isinstance(content, bytes) else content.nbytes
        # Readers of torch.save files do not check CRCs; 0 lets a payload be copied without being read.
        crc = crc32(content) if isinstance(content, bytes) else 0
        encoded = f"{self._stem}/{name}".encode()
        at, wide = self._at, max(self._at, nbytes) >= _WIDE
        flags = _UTF8 | (_SIZES_FOLLOW if nbytes else 0)
        zip64 = _zip64(nbytes, at)
        padding = -(at + 30 + len(encoded) + len(zip64) + 4) % ALIGNMENT
        extra = zip64 + b"FB" + pack("<H", padding) + b"Z" * padding
        local = pack("<IHHHHHIIIHH", 0x04034B50, 0, flags, 0, 0, 0, 0, 0, 0, len(encoded), len(extra))
        self._put(local + encoded + extra)
        self._put(content)
        if nbytes:
            self._put(pack("<IIQQ" if wide else "<IIII", 0x08074B50, crc, nbytes, nbytes))
        short = min(nbytes, _WIDE)
        fields = (0x02014B50, 0, 0, flags, 0, 0, 0, crc, short, short, len(encoded), len(zip64), 0, 0, 0, 0)
        self._directory.append(pack("<IHHHHHHIIIHHHHHII", *fields, min(at, _WIDE)) + encoded + zip64)

    def end(self) -> Iterable[bytes]:
        """The directory and the ends, both the one with 64-bit fields and the one that points to it."""
        count, start = len(self._directory), self._at
        directory = b"".join(self._directory)
        nbytes = len(directory)
        yield directory
        yield pack("<IQHHIIQQQQ", 0x06064B50, 44, 0x031E, 45, 0, 0, count, count, nbytes, start)
        yield pack("<IIQI", 0x07064B50, 0, start + nbytes, 1)
        few = min(count, 0xFFFF)
        yield pack("<IHHHHIIH", 0x06054B50, 0, 0, few, few, min(nbytes, _WIDE), min(start, _WIDE), 0)

    def _put(self, part: bytes | Payload) -> None:
        self.parts.append(part)
        self._at += len(part) if isinstance(part, bytes) else part.nbytes


def _zip64(nbytes: int, at: int) -> bytes:
    """The extra field that holds what does not fit into 32 bits, or nothing."""
    wide = [nbytes, nbytes] * (nbytes >= _WIDE) + [at] * (at >= _WIDE)
    return pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""


def _joined(parts: Iterable[bytes | Payload]) -> tuple[bytes | Payload, ...]:
    """The same parts, neighbouring literals made one, empty ones left out."""
    joined: list[bytes | Payload] = []
    literal: list[bytes] = []
    for part in parts:
        if isinstance(part, bytes):
            literal.append(part)
        elif part.nbytes:
            joined += [b"".join(literal), part]
            literal = []
    return (*joined, b"".join(literal))
