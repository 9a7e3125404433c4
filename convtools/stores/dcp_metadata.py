"""The pickle in `.metadata`, which says what a distributed checkpoint holds and where.

It names about ten classes of `torch.distributed.checkpoint`, and holds three objects for each stored
chunk: with 400,000 chunks, most of the time and memory of opening a checkpoint is spent on them. So
each has a stand-in of two to four slots, which empties the dict it was restored from.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from convtools.errors import CheckpointError
from convtools.stores.names import tick
from convtools.stores.pickles import load_pickle
from convtools.stores.stand_ins import InertType
from convtools.stores.torch_zip import size_tuple
from convtools.stores.zip_records import open_file, read_exactly

MAX_METADATA = 1 << 31
"""Bytes of the largest `.metadata` read; 400,000 chunks are 80 MB, or 140 MB with their save plans."""

_PLANS = b"\x8c\x0fall_local_plans"


class ChunkEntry(metaclass=InertType):
    """Stands for `ChunkStorageMetadata`: a rectangle of a tensor."""

    __slots__ = ("offsets", "sizes")
    path = "torch.distributed.checkpoint.metadata.ChunkStorageMetadata"

    def __setstate__(self, state: Any) -> None:
        self.offsets, self.sizes = state["offsets"], state["sizes"]
        state.clear()


class IndexEntry(metaclass=InertType):
    """Stands for `MetadataIndex`: the name and the offsets of a stored chunk."""

    __slots__ = ("fqn", "offset")
    path = "torch.distributed.checkpoint.metadata.MetadataIndex"

    def __setstate__(self, state: Any) -> None:
        self.fqn, self.offset = state["fqn"], state.get("offset")
        state.clear()


class PlaceEntry(metaclass=InertType):
    """Stands for `_StorageInfo`: the place of a stored chunk."""

    __slots__ = ("length", "offset", "relative_path", "transforms")
    path = "torch.distributed.checkpoint.filesystem._StorageInfo"

    def __setstate__(self, state: Any) -> None:
        self.relative_path, self.offset, self.length = (
            state["relative_path"],
            state["offset"],
            state["length"],
        )
        self.transforms = state.get("transform_descriptors")
        state.clear()


class Fields(metaclass=InertType):
    """Stands for the classes that are few: what each was restored from."""

    __slots__ = ("state",)
    path = ""
    state: Any

    def __new__(cls) -> "Fields":
        """Take no arguments: these classes are restored, never called."""
        self = object.__new__(cls)
        self.state = {}
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class MetadataEntry(Fields):
    """Stands for `Metadata`, and for the subclass of it that Megatron core up to 0.15 pickles."""

    __slots__ = ()
    path = "torch.distributed.checkpoint.metadata.Metadata"


class TensorEntry(Fields):
    """Stands for `TensorStorageMetadata`."""

    __slots__ = ()
    path = "torch.distributed.checkpoint.metadata.TensorStorageMetadata"


class BytesEntry(Fields):
    """Stands for `BytesStorageMetadata`, the mark of an object."""

    __slots__ = ()
    path = "torch.distributed.checkpoint.metadata.BytesStorageMetadata"


class PropertiesEntry(Fields):
    """Stands for `TensorProperties`."""

    __slots__ = ()
    path = "torch.distributed.checkpoint.metadata.TensorProperties"


def load_metadata(path: Path) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """(name -> entry, index -> place), as the `.metadata` file claims them: nothing is checked yet.

    Raises `CheckpointError`, `UnsafePickle`.
    """
    with open_file(path) as (fd, size):
        if size > MAX_METADATA:
            raise CheckpointError(
                f"a `.metadata` of {size} bytes", where=path, expected=f"at most {MAX_METADATA}"
            )
        data = read_exactly(fd, path, 0, size)
    without_plans = _without_plans(data)
    if without_plans is not None:
        with suppress(CheckpointError):  # then the whole pickle is read, and says what is wrong
            return _parts(without_plans, path)
    return _parts(data, path)


def _parts(data: bytes, path: Path) -> tuple[dict[Any, Any], dict[Any, Any]]:
    value = load_pickle(data, where=str(path), known=_known())
    if not isinstance(value, MetadataEntry):
        raise CheckpointError(
            "not the `.metadata` of a distributed checkpoint", where=path, found=tick(value)
        )
    state = value.state if isinstance(value.state, dict) else {}
    entries, places = state.get("state_dict_metadata"), state.get("storage_data")
    if type(entries) is not dict or type(places) is not dict:
        raise CheckpointError(
            "the `.metadata` does not list its tensors and where they lie",
            where=path,
            expected="state_dict_metadata and storage_data, both dicts",
            found=f"a {type(entries).__name__} and a {type(places).__name__}",
        )
    return entries, places


def _without_plans(data: bytes) -> bytes | None:
    """The pickle cut before `all_local_plans`, Megatron's last attribute and half of the file.

    None where it has none, or not the shape that Python's pickler gives it: frames end to end.
    """
    at = data.rfind(_PLANS)
    frame = 2  # after the protocol
    while data[frame : frame + 1] == b"\x95":
        end = frame + 9 + int.from_bytes(data[frame + 1 : frame + 9], "little")
        if frame + 9 <= at < end:
            last = data[frame + 9 : at] + b"ub."  # set the attributes so far, build, stop
            return data[: frame + 1] + len(last).to_bytes(8, "little") + last
        frame = end
    return None


def _known() -> dict[tuple[str, str], Any]:
    classes = (ChunkEntry, IndexEntry, PlaceEntry, MetadataEntry, TensorEntry, BytesEntry, PropertiesEntry)
    known: dict[tuple[str, str], Any] = {tuple(kind.path.rsplit(".", 1)): kind for kind in classes}  # type: ignore[misc]
    known["torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"] = PropertiesEntry
    known["megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"] = MetadataEntry
    known["torch", "Size"] = size_tuple()
    return known
