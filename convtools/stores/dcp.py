"""Reads distributed checkpoints (`.metadata` and `.distcp` files), without torch and without trust.

Every claim of `.metadata` is compared with the others and with the files before a tensor is offered:
chunks tile their tensors, each has one place, places lie inside existing files and do not overlap.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from convtools.errors import CheckpointError, UsageError, capped
from convtools.stores.base import Blob, StoredTensor
from convtools.stores.dcp_check import Place, check_files, read_places, read_tensor
from convtools.stores.dcp_metadata import BytesEntry, TensorEntry, load_metadata
from convtools.stores.dcp_tensor import DcpChunk, DcpTensor
from convtools.stores.dcp_write import write_metadata
from convtools.stores.names import tick
from convtools.stores.torch_zip import read_tensor_item
from convtools.stores.zip_records import open_file

__all__ = [
    "DcpChunk",
    "DcpMetadata",
    "DcpTensor",
    "open_tensor",
    "open_tensors",
    "read_metadata",
    "write_metadata",
]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What a distributed checkpoint holds."""

    path: Path
    """Its directory."""
    tensors: dict[str, DcpTensor]
    objects: dict[str, Place]
    """Name -> (file, offset, length) of a pickled object."""
    unread: tuple[str, ...]
    """Names that the caller did not want; nothing about them was checked."""


def read_metadata(path: Path, *, wanted: Callable[[str], bool] = lambda name: True) -> DcpMetadata:
    """What the checkpoint in the directory `path` holds, every claim compared with the files beside it.

    Only names that are `wanted` are checked and offered: a checkpoint with optimizer state has several
    times as many chunks as its model.

    Raises `CheckpointError` that names the tensor and the file, `UnsafePickle`.
    """
    where = path / ".metadata"
    entries, claims = load_metadata(where)
    places = read_places(claims, where)
    del claims
    tensors: dict[str, DcpTensor] = {}
    objects: dict[str, Place] = {}
    unread: list[str] = []
    for name, entry in entries.items():
        if type(name) is not str:
            raise CheckpointError("a tensor has no name", where=where, found=tick(name))
        if not wanted(name):
            unread.append(name)
        elif isinstance(entry, TensorEntry):
            tensors[name] = read_tensor(name, entry, places, where)
        elif not isinstance(entry, BytesEntry):
            raise CheckpointError(
                f"{tick(name)} is neither a tensor nor an object", where=where, found=tick(entry)
            )
        elif (place := places.pop((name, None), None)) is None:
            raise CheckpointError(f"the object {tick(name)} is stored nowhere", where=where)
        else:
            objects[name] = place
    left = sorted({name for name, _ in places} - set(unread))
    if left:
        what = "chunks are stored that belong to no tensor, or are not listed by theirs"
        raise CheckpointError(what, where=where, found=capped(map(tick, left)))
    check_files(path, _items(tensors, objects))
    return DcpMetadata(path, tensors, objects, tuple(unread))


def _items(tensors: dict[str, DcpTensor], objects: dict[str, Place]) -> Iterator[tuple[Place, str]]:
    for name, tensor in tensors.items():
        for _, path, offset, length in tensor.chunks:
            yield (path, offset, length), name
    for name, place in objects.items():
        yield place, name


def open_tensors(metadata: DcpMetadata, names: Iterable[str]) -> dict[str, StoredTensor]:
    """Where the bytes of these tensors lie. Reads the header of each stored item, file by file.

    Raises `CheckpointError` where an item is not what `.metadata` says, `UsageError` for an unknown name.
    """
    wanted = list(dict.fromkeys(names))
    unknown = [name for name in wanted if name not in metadata.tensors]
    if unknown:
        raise UsageError(
            "the checkpoint has no such tensor", where=metadata.path, found=capped(map(tick, unknown))
        )
    chunks = [
        (chunk.relative_path, chunk.offset, name, number)
        for name in wanted
        for number, chunk in enumerate(metadata.tensors[name].chunks)
        if chunk.region.numel
    ]
    blobs: dict[str, dict[int, Blob]] = {name: {} for name in wanted}
    file, fd, opened = None, -1, ExitStack()
    with opened:
        for path, _, name, number in sorted(chunks):
            if path != file:
                opened.close()
                fd, _ = opened.enter_context(open_file(metadata.path / path))
                file = path
            tensor = metadata.tensors[name]
            blobs[name][number] = _blob(metadata.path / path, fd, name, tensor.dtype, tensor.chunks[number])
    return {
        name: StoredTensor(
            name,
            metadata.tensors[name].dtype,
            metadata.tensors[name].shape,
            tuple(found[number] for number in sorted(found)),
        )
        for name, found in blobs.items()
    }


def open_tensor(metadata: DcpMetadata, name: str) -> StoredTensor:
    """As `open_tensors`, for one."""
    return open_tensors(metadata, [name])[name]


def _blob(path: Path, fd: int, name: str, dtype: str, chunk: DcpChunk) -> Blob:
    """A chunk's bytes, after its own header was compared with `.metadata`."""
    try:
        ref = read_tensor_item(path, chunk.offset, chunk.length, fd=fd)
    except CheckpointError as error:
        raise type(error)(
            f"a stored chunk of {tick(name)}: {error.what}",
            where=error.where,
            expected=error.expected,
            found=error.found,
            fix=error.fix,
        ) from error
    ref.check(name)
    if (ref.dtype, ref.shape) != (dtype, chunk.region.sizes):
        raise CheckpointError(
            f"a stored chunk of {tick(name)} is not what `.metadata` says",
            where=f"{path}:{chunk.offset}",
            expected=f"{dtype}, {list(chunk.region.sizes)}",
            found=f"{ref.dtype}, {list(ref.shape)}",
        )
    return Blob(path, ref.offset, chunk.region)
