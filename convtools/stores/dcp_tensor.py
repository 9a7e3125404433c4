"""A tensor of a distributed checkpoint, as its `.metadata` describes it."""

from typing import NamedTuple

from convtools.layout.region import Region


class DcpChunk(NamedTuple):
    """One stored rectangle of a tensor: a `torch.save` file inside a file."""

    region: Region
    relative_path: str
    """Name of the file, in the checkpoint's directory."""
    offset: int
    length: int


class DcpTensor(NamedTuple):
    """A tensor and where it is stored."""

    dtype: str
    """A key of `DTYPE_NBYTES`."""
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]
    """Disjoint, and together the whole tensor."""
