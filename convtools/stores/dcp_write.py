"""Writes the `.metadata` of a distributed checkpoint, without torch.

Only classes and attributes that torch 2.4 knows are used; newer ones fill in their defaults. Three
objects for each of 400,000 chunks are slow to make and to walk, so their opcodes are emitted directly.
"""

from collections.abc import Iterable, Mapping
from struct import pack

from convtools.stores.base import TORCH_DTYPE
from convtools.stores.dcp_tensor import DcpTensor
from convtools.stores.pickle_write import int_opcode

_METADATA = "torch.distributed.checkpoint.metadata"
_TUPLES = {0: (b"", b")"), 1: (b"", b"\x85"), 2: (b"", b"\x86"), 3: (b"", b"\x87")}


def write_metadata(tensors: Mapping[str, DcpTensor], objects: Mapping[str, tuple[str, int, int]]) -> bytes:
    """The bytes of `.metadata`, for tensors and for objects as (file, offset, length).

    Loaded by torch, they are the `Metadata` that `torch.distributed.checkpoint` would have saved.
    """
    memo = _Memo()
    out = [b"\x80\x02", memo.new("Metadata"), memo.text("state_dict_metadata"), b"}"]
    for name, tensor in tensors.items():
        out.append(memo.text(name))
        out.append(b"".join(_tensor(tensor, memo)))
    for name in objects:
        out += [memo.text(name), memo.named(_METADATA, "BytesStorageMetadata"), b")\x81s"]
    out += [memo.text("planner_data"), b"N", memo.text("storage_data"), b"}"]
    for name, tensor in tensors.items():
        for region, path, offset, length in tensor.chunks:
            out.append(b"".join(_stored(name, region.offsets, path, offset, length, memo)))
    for name, (path, offset, length) in objects.items():
        out.append(b"".join(_stored(name, None, path, offset, length, memo)))
    out += [memo.text("storage_meta"), b"Nub."]
    return b"".join(out)


class _Memo:
    """The opcodes of names and strings: in full at first, from then on a reference to the first."""

    def __init__(self) -> None:
        self._seen: dict[object, bytes] = {}

    def text(self, text: str) -> bytes:
        seen = self._seen.get(text)
        if seen is None:
            encoded = text.encode("utf-8", "surrogatepass")
            return self._first(text, b"X" + pack("<I", len(encoded)) + encoded)
        return seen

    def named(self, module: str, name: str) -> bytes:
        seen = self._seen.get((module, name))
        return seen or self._first((module, name), f"c{module}\n{name}\n".encode())

    def new(self, name: str, module: str = _METADATA) -> bytes:
        """A new object of a class, and the beginning of the dict that it is restored from."""
        return self.named(module, name) + b")\x81}("

    def _first(self, key: object, opcodes: bytes) -> bytes:
        index = pack("<I", len(self._seen))
        self._seen[key] = b"j" + index
        return opcodes + b"r" + index


def _tensor(tensor: DcpTensor, memo: _Memo) -> Iterable[bytes]:
    """A `TensorStorageMetadata`, set as the value of the name before it."""
    yield memo.new("TensorStorageMetadata")
    yield memo.text("properties")
    yield memo.named(_METADATA, "TensorProperties") + b")\x81("
    yield memo.named("torch", TORCH_DTYPE[tensor.dtype])
    yield memo.named("torch.serialization", "_get_layout") + memo.text("torch.strided") + b"\x85R"
    yield b"\x89"  # requires_grad
    yield memo.named(_METADATA, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R"  # contiguous
    yield b"\x89tb"  # pin_memory
    yield memo.text("size")
    yield _size(tensor.shape, memo)
    yield memo.text("chunks")
    yield b"]("
    for chunk in tensor.chunks:
        yield memo.new("ChunkStorageMetadata")
        yield memo.text("offsets")
        yield _size(chunk.region.offsets, memo)
        yield memo.text("sizes")
        yield _size(chunk.region.sizes, memo)
        yield b"ub"
    yield b"eubs"


def _stored(
    name: str, offsets: tuple[int, ...] | None, path: str, offset: int, length: int, memo: _Memo
) -> Iterable[bytes]:
    """A `MetadataIndex`, which has no offset for an object, and a `_StorageInfo` set as its value."""
    yield memo.new("MetadataIndex")
    yield memo.text("fqn")
    yield memo.text(name)
    if offsets is not None:
        yield memo.text("offset")
        yield _size(offsets, memo)
    yield memo.text("index")
    yield b"Nub"
    yield memo.new("_StorageInfo", "torch.distributed.checkpoint.filesystem")
    yield memo.text("relative_path")
    yield memo.text(path)
    yield memo.text("offset")
    yield int_opcode(offset)
    yield memo.text("length")
    yield int_opcode(length)
    yield b"ubs"


def _size(sizes: tuple[int, ...], memo: _Memo) -> bytes:
    """A `torch.Size`."""
    mark, end = _TUPLES.get(len(sizes), (b"(", b"t"))
    return b"".join([memo.named("torch", "Size"), mark, *map(int_opcode, sizes), end, b"\x85R"])
