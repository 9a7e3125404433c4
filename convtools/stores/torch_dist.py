"""Read Megatron's `torch_dist` format: `.metadata`, `.distcp` items, and the common state in either place."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convtools.errors import CheckpointError
from convtools.stores.base import StoredTensor
from convtools.stores.dcp import DcpMetadata, open_tensors, read_metadata
from convtools.stores.dcp_tensor import DcpTensor
from convtools.stores.json_file import read_json
from convtools.stores.pickles import plain
from convtools.stores.torch_zip import read_archive

COMMON_FILE, COMMON_OBJECT = "common.pt", "common_state/shard_0_1"


@dataclass(frozen=True, slots=True)
class DistCheckpoint:
    """One saved iteration."""

    path: Path
    metadata: DcpMetadata
    args: dict[str, Any]
    """Megatron's args as plain values; empty where none were saved."""

    @property
    def tensors(self) -> dict[str, DcpTensor]:
        """Key -> dtype, shape and chunks."""
        return self.metadata.tensors

    @property
    def objects(self) -> dict[str, int]:
        """Key -> stored bytes, of everything that is pickled."""
        return {name: length for name, (_, _, length) in self.metadata.objects.items()}

    def open(self, keys: list[str]) -> dict[str, StoredTensor]:
        """Where the bytes of these keys lie. Raises CheckpointError where an item belies `.metadata`."""
        return open_tensors(self.metadata, keys)


def open_torch_dist(path: Path) -> DistCheckpoint:
    """Open one iteration's folder. Raises CheckpointError, UnsafePickle."""
    _check_backend(path / "metadata.json")
    metadata = read_metadata(path)
    return DistCheckpoint(path, metadata, _args(path, metadata))


def _check_backend(path: Path) -> None:
    _, found = read_json(path, 1_000_000, constants=False)
    backend = found.get("sharded_backend")
    if backend != "torch_dist":
        raise CheckpointError(
            "this is no torch_dist checkpoint",
            where=path,
            expected="sharded_backend torch_dist",
            found=repr(backend)[:60],
            fix="load it with Megatron and save it with --ckpt-format torch_dist",
        )


def _args(path: Path, metadata: DcpMetadata) -> dict[str, Any]:
    """Core up to 0.18 writes `common.pt`, and later cores prefer it where it is there."""
    file = path / COMMON_FILE
    if os.path.lexists(file):
        where, value = f"{file}", read_archive(file).value
    elif COMMON_OBJECT in metadata.objects:
        name, offset, length = metadata.objects[COMMON_OBJECT]
        where, value = f"{path / name}:{offset}", read_archive(path / name, offset, length).value
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
    else:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError("the common state is not a dict", where=where)
    args = plain(value["args"], where) if value.get("args") is not None else {}
    if not isinstance(args, dict):
        raise CheckpointError("the common state's args are not a namespace", where=where)
    return args
