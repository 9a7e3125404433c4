"""Reads what `torch.save` wrote, as places in a file: no tensor's bytes are read, and nothing is run.

A `.pt` file is one zip; an item of a `.distcp` file is one too. Its pickle says which record each
tensor is a view of; the record's offset makes that a range of bytes of the file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from convtools.errors import CheckpointError
from convtools.stores.base import DTYPE_NBYTES, FROM_TORCH
from convtools.stores.names import tick
from convtools.stores.pickles import load_pickle
from convtools.stores.stand_ins import InertType, stand_in
from convtools.stores.zip_records import Record, Window, open_file, open_window, read_records

MAX_PICKLE = 1 << 30
MAX_DIMS = 64
MAX_SIZE = 1 << 60
"""Of a dim, a stride or an offset; torch's own are 64 bits."""

STORAGE_DTYPE = {
    "BoolStorage": "BOOL", "ByteStorage": "U8", "CharStorage": "I8", "ShortStorage": "I16",
    "IntStorage": "I32", "LongStorage": "I64", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "FloatStorage": "F32", "DoubleStorage": "F64", "ComplexFloatStorage": "C64",
}  # fmt: skip
"""The dtype that a storage class of `torch` implies; tensors of newer dtypes have an untyped storage."""

_STORAGES = {f"{m}.{name}": dtype for m in ("torch", "torch.cuda") for name, dtype in STORAGE_DTYPE.items()}
_UNTYPED = "torch.storage.UntypedStorage"
_TENSOR_CLASSES = frozenset({"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"})
_LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"


# A tuple, because a pickle can change the fields of any object that has a __setstate__ or a __dict__.
class TensorRef(NamedTuple):
    """A tensor as a `torch.save` file describes it."""

    dtype: str
    """A key of `DTYPE_NBYTES`."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, one a dim."""
    path: Path
    offset: int
    """Of its first element, in bytes from the start of the file."""

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return DTYPE_NBYTES[self.dtype] * prod(self.shape)

    def check(self, name: str) -> "TensorRef":
        """This tensor, if its bytes lie C-contiguous; a `CheckpointError` that names it if not."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != expected and self.nbytes:
                raise CheckpointError(
                    f"tensor {tick(name)} does not lie contiguous in its file",
                    where=f"{self.path}:{self.offset}",
                    expected=f"the strides of a C-contiguous tensor of shape {list(self.shape)}",
                    found=f"strides {list(self.strides)}",
                    fix="save it again after .contiguous()",
                )
            expected *= size
        return self


class _Storage(NamedTuple):
    dtype: str | None
    """None where the tensor says it."""
    record: Record
    nbytes: int


@dataclass(frozen=True, slots=True)
class Archive:
    """One `torch.save` file."""

    path: Path
    offset: int
    """Where its zip begins in the file."""
    value: Any
    """What was saved: a `TensorRef` for each plain tensor, stand-ins for other objects."""


def read_archive(path: Path, offset: int = 0, length: int | None = None) -> Archive:
    """The `torch.save` file that lies at [offset, offset + length) of `path`; to its end by default.

    A tensor of a kind that has no plain bytes (sparse, quantised, a subclass, an unknown dtype) is a
    stand-in in the value, so that a caller can tell it from a `TensorRef`.

    Raises `CheckpointError` where the file is damaged, compressed, big-endian or of the format before
    PyTorch 1.6, and `UnsafePickle` where its pickle names code that could do harm.
    """
    with open_file(path) as (fd, size):
        window = open_window(fd, path, size, offset, size - offset if length is None else length)
        return Archive(path, offset, _load(window))


def read_tensor_item(path: Path, offset: int, length: int, *, fd: int | None = None) -> TensorRef:
    """The one tensor saved at [offset, offset + length) of `path`, which may be open already as `fd`.

    Raises as `read_archive` does, and where anything but one plain tensor was saved.
    """
    if fd is None:
        value = read_archive(path, offset, length).value
    else:
        value = _load(Window(fd, path, offset, length))
    if not isinstance(value, TensorRef):
        raise CheckpointError("expected one plain tensor", where=f"{path}:{offset}", found=tick(value))
    return value


def _load(window: Window) -> Any:
    if window.length < 4 or window.read(0, 4) != b"PK\x03\x04":
        raise _not_a_zip(window)
    records = read_records(window)
    stem = next(iter(records), "").partition("/")[0]
    pickled = records.get(f"{stem}/data.pkl")
    if pickled is None or f"{stem}/constants.pkl" in records:
        found = "a TorchScript archive" if pickled else f"no record {tick(stem + '/data.pkl')}"
        raise CheckpointError("not a file that torch.save wrote", where=window.where(), found=found)
    order = records.get(f"{stem}/byteorder")
    if order is not None and (spelled := window.read(order.offset, min(order.nbytes, 8))) != b"little":
        where = window.where(order.offset)
        raise CheckpointError("not saved on a little-endian machine", where=where, found=ascii(spelled))
    if pickled.nbytes > MAX_PICKLE:
        raise CheckpointError(f"its pickle has {pickled.nbytes} bytes", where=window.where(pickled.offset))
    return load_pickle(
        window.read(pickled.offset, pickled.nbytes),
        where=window.where(),
        persistent=lambda pid: _storage(pid, records, stem, window),
        known=_known(window),
    )


def _not_a_zip(window: Window) -> CheckpointError:
    if window.read(0, min(window.length, len(_LEGACY_MAGIC))) == _LEGACY_MAGIC:
        return CheckpointError(
            "the file is in torch.save's format of before PyTorch 1.6, which is not read",
            where=window.where(),
            fix="save it again with a newer one: torch.save(torch.load(path, weights_only=True), path)",
        )
    return window.error("it does not begin like a zip")


def _storage(pid: Any, records: Mapping[str, Record], stem: str, window: Window) -> Any:
    """What a persistent id refers to: a record, or a stand-in where its dtype is unknown."""
    match pid:
        case ("storage", InertType() as kind, str() as key, _, int() as numel) if 0 <= numel < MAX_SIZE:
            dtype = _STORAGES.get(kind.path)
        case _:
            raise window.error("a tensor refers to its bytes in an unknown way")
    if dtype is None and kind.path != _UNTYPED:
        return kind(*pid)
    record = records.get(f"{stem}/data/{key}")
    if record is None:
        raise window.error(f"record {tick('data/' + key)}, the bytes of a tensor, is missing")
    nbytes = numel * (DTYPE_NBYTES[dtype] if dtype else 1)
    if nbytes > record.nbytes:
        what = f"a tensor needs {nbytes} bytes of record {tick('data/' + key)}, which has {record.nbytes}"
        raise window.error(what, record.offset)
    return _Storage(dtype, record, nbytes)


def _known(window: Window) -> dict[tuple[str, str], Any]:
    """What the functions in a tensor's pickle stand for. Made anew for each file: see `load_pickle`."""

    def view(dtype: str | None, metadata: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        whole = isinstance(args[0], _Storage) and not any(metadata)  # conjugated or negated ones are not
        return _tensor(window, dtype, *args[:4]) if whole and dtype else odd(*args)

    def rebuild(*args: Any) -> Any:
        return view(args[0].dtype if isinstance(args[0], _Storage) else None, args[6:], args)

    def rebuild_v3(*args: Any) -> Any:
        kind = args[6].path if isinstance(args[6], InertType) else ""
        return view(FROM_TORCH.get(kind.removeprefix("torch.")), args[7:], args)

    def parameter(data: Any, *_: Any) -> Any:
        return data

    def from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
        whole = isinstance(kind, InertType) and kind.path in _TENSOR_CLASSES and function in plain_functions
        return function(*args) if whole else subclass(function, kind, args, state)

    odd, subclass = stand_in("torch._utils._rebuild_tensor"), stand_in("torch._tensor._rebuild_from_type_v2")
    plain_functions = (rebuild, rebuild_v3)
    return {
        ("torch._utils", "_rebuild_tensor"): rebuild,
        ("torch._utils", "_rebuild_tensor_v2"): rebuild,
        ("torch._utils", "_rebuild_tensor_v3"): rebuild_v3,
        ("torch._utils", "_rebuild_parameter"): parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): from_type,
        ("torch", "Size"): size_tuple(),
    }


def size_tuple() -> Callable[[Any], tuple[int, ...]]:
    """A new stand-in for `torch.Size`, which gives the tuple it is called with."""

    def size(sizes: Any) -> tuple[int, ...]:
        if type(sizes) is not tuple:
            raise TypeError(f"a torch.Size of a {type(sizes).__name__}")
        return sizes

    return size


def _tensor(window: Window, dtype: str, storage: _Storage, offset: Any, size: Any, stride: Any) -> TensorRef:
    """The view of `storage`, whose numbers are compared with it first."""
    for numbers in (size, stride, (offset,)):
        sane = type(numbers) is tuple and len(numbers) <= MAX_DIMS
        if not sane or not all(type(n) is int and 0 <= n < MAX_SIZE for n in numbers):
            raise window.error("a tensor has a size, stride or offset that is not a number of elements")
    if len(size) != len(stride):
        raise window.error(f"a tensor has {len(size)} dims and {len(stride)} strides")
    itemsize = DTYPE_NBYTES[dtype]
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    extent = last + 1 if prod(size) else 0
    if extent * itemsize > storage.nbytes:
        what = f"a tensor reaches to byte {extent * itemsize} of a storage of {storage.nbytes} bytes"
        raise window.error(what, storage.record.offset)
    at = window.offset + storage.record.offset + (offset * itemsize if extent else 0)
    return TensorRef(dtype, size, stride, window.path, at)
