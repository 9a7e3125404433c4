"""What SGLang's `update_weights_from_tensor` takes: the bytes of a pickle, written here opcode by opcode.

SGLang reads a dict of a flat uint8 tensor and where each tensor lies in it, made by its own serializer.
Its classes and torch's are only named in the pickle: neither is needed here, nothing is pickled that
could be code, and nothing is ever unpickled. The tensor's bytes are not in it; they lie in shared memory.
"""

import base64
import struct
from collections.abc import Iterable
from typing import NamedTuple

from convtools.refit.plan import Tensor
from convtools.stores.base import TORCH_DTYPE


class Placed(NamedTuple):
    """A tensor, and its first byte in the flat tensor."""

    tensor: Tensor
    at: int


class _Writer:
    """Pickle opcodes, protocol 2."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")

    def name(self, module: str, name: str) -> None:
        self.out += f"c{module}\n{name}\n".encode()

    def text(self, value: str) -> None:
        data = value.encode()
        self.out += b"X" + struct.pack("<I", len(data)) + data

    def number(self, value: int) -> None:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        self.out += b"\x8a" + bytes([len(data)]) + data

    def numbers(self, values: Iterable[int]) -> None:
        self.out += b"("
        for value in values:
            self.number(value)
        self.out += b"t"

    def data(self, value: str) -> None:
        """Bytes, as protocol 2 has none: an encoding of text."""
        self.name("_codecs", "encode")
        self.out += b"("
        self.text(value)
        self.text("latin1")
        self.out += b"tR"

    def size(self, shape: Iterable[int]) -> None:
        self.name("torch", "Size")
        self.out += b"("
        self.numbers(shape)
        self.out += b"tR"


def payload(shm_name: str, nbytes: int, placed: Iterable[Placed]) -> str:
    """Base64 of the pickle for `nbytes` bytes of the shared memory `shm_name`, as torch opens it by name.

    The memory must have torch's header of 64 bytes in front of the data.
    """
    out = _Writer()
    out.out += b"}("
    out.text("flattened_tensor")
    _tensor(out, shm_name, nbytes)
    out.text("metadata")
    out.out += b"]("
    for tensor, at in placed:
        _metadata(out, tensor, at)
    out.out += b"eu."
    return base64.b64encode(out.out).decode()


def _tensor(out: _Writer, shm_name: str, nbytes: int) -> None:
    """rebuild_tensor(Tensor, storage, (offset, size, stride, requires_grad))."""
    reductions = "torch.multiprocessing.reductions"
    out.name(reductions, "rebuild_tensor")
    out.out += b"("
    out.name("torch", "Tensor")
    out.name(reductions, "rebuild_typed_storage")
    out.out += b"("
    out.name(reductions, "rebuild_storage_filename")
    out.out += b"("
    out.name("torch.storage", "UntypedStorage")
    out.data("")  # no manager of ours: the server's own process takes part in the memory's bookkeeping
    out.data("/" + shm_name)
    out.number(nbytes)
    out.out += b"tR"
    out.name("torch", "uint8")
    out.out += b"tR("
    out.number(0)
    out.size([nbytes])
    out.numbers([1])
    out.out += b"\x89ttR"


def _metadata(out: _Writer, tensor: Tensor, at: int) -> None:
    out.name("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
    out.out += b")\x81}("
    out.text("name")
    out.text(tensor.name)
    out.text("shape")
    out.size(tensor.shape)
    out.text("dtype")
    out.name("torch", TORCH_DTYPE[tensor.dtype])
    for field, value in (("start_idx", at), ("end_idx", at + tensor.nbytes), ("numel", tensor.nbytes)):
        out.text(field)
        out.number(value)
    out.out += b"ub"
