"""What every store speaks: dtypes by name, tensors by header, bytes by blob.

A store never holds numbers. It knows, for each tensor, its dtype, its shape and where its bytes
lie: one or more *blobs*, each a C-contiguous run of bytes of one file that holds one rectangle.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from convtools.layout.region import Region

DTYPE_NBYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes an element, by the dtype names of the safetensors format."""

TORCH_DTYPE = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32",
    "I64": "int64", "U64": "uint64", "F64": "float64", "C64": "complex64",
}  # fmt: skip
"""`torch.<name>` of each dtype."""

FROM_TORCH = {name: dtype for dtype, name in TORCH_DTYPE.items()}


class Blob(NamedTuple):
    """One rectangle of one tensor, lying C-contiguous in one file."""

    path: Path
    """The file."""
    offset: int
    """Bytes from the start of the file."""
    region: Region
    """Which rectangle of the tensor."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a store's headers describe it."""

    name: str
    dtype: str
    """A key of `DTYPE_NBYTES`."""
    shape: tuple[int, ...]
    blobs: tuple[Blob, ...]
    """Disjoint, and together the whole tensor (checked when the store is opened)."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return Region.whole(self.shape).numel * DTYPE_NBYTES[self.dtype]


class Payload(NamedTuple):
    """A place in a file being written that takes one rectangle of one tensor."""

    name: str
    """The destination's own name for the tensor (HF name, `torch_dist` key, or rank tensor)."""
    region: Region
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the rectangle."""
        return self.region.numel * DTYPE_NBYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file to be written front to back: literal bytes (headers, frames) and payloads, in order."""

    path: str
    """Relative to the destination's root."""
    parts: tuple["bytes | Payload", ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return sum(len(p) if isinstance(p, bytes) else p.nbytes for p in self.parts)
