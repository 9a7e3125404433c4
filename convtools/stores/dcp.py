"""Reads distributed checkpoints (`.metadata` and `.distcp` files), without torch and without trust.

Every claim of `.metadata` is compared with the others and with the files before a tensor is offered:
chunks tile their tensors, each has one place, places lie inside existing files and do not overlap.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from convtools.errors import CheckpointError, capped
from convtools.layout.cover import first_fault
from convtools.layout.region import Region
from convtools.stores.base import DTYPE_NBYTES, FROM_TORCH, Blob, StoredTensor
from convtools.stores.dcp_metadata import (
    BytesEntry,
    ChunkEntry,
    IndexEntry,
    PlaceEntry,
    PropertiesEntry,
    TensorEntry,
    load_metadata,
)
from convtools.stores.stand_ins import Inert, InertType, shown
from convtools.stores.torch_zip import MAX_DIMS, read_tensor_item
from convtools.stores.zip_records import open_file

METADATA = ".metadata"
MAX_SIZE = 1 << 60
MAX_IRREGULAR = 256
"""Chunks of a tensor that is not cut by planes across it: those take time in the cube of their number."""


class DcpChunk(NamedTuple):
    """One stored rectangle of a tensor: a `torch.save` file inside a file."""

    region: Region
    relative_path: str
    """Name of the file, in the checkpoint's directory."""
    offset: int
    length: int


class DcpTensor(NamedTuple):
    """A tensor as `.metadata` describes it."""

    dtype: str
    """A key of `DTYPE_NBYTES`."""
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]
    """Disjoint, and together the whole tensor."""


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What a distributed checkpoint holds."""

    path: Path
    """Its directory."""
    tensors: dict[str, DcpTensor]
    objects: dict[str, tuple[str, int, int]]
    """Name -> (file, offset, length) of a pickled object."""
    unread: tuple[str, ...]
    """Names that the caller did not want; nothing about them was checked."""
