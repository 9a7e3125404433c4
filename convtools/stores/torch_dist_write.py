"""Write Megatron's `torch_dist` files: `.distcp` items back to back, `.metadata`, `common.pt`."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from convtools.layout.region import Region
from convtools.stores.base import DTYPE_NBYTES, FilePlan, Payload
from convtools.stores.dcp_tensor import DcpChunk, DcpTensor
from convtools.stores.dcp_write import write_metadata
from convtools.stores.torch_frames import common_file, empty_tensor, object_frame, tensor_frame

METADATA_JSON = (
    b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, '
    b'"common_backend": "torch", "common_backend_version": 1}'
)
"""All four fields: core up to 0.18 wants them, later ones drop what they do not know."""

_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""What core from 0.13 on asks of the common state to know how keys are spelled."""


class Chunk(NamedTuple):
    """One stored rectangle of a key."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole key."""
    region: Region

    @property
    def nbytes(self) -> int:
        """Bytes of the rectangle."""
        return self.region.numel * DTYPE_NBYTES[self.dtype]


class DistFile:
    """One `.distcp` file being planned: items back to back, each a `torch.save` file of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nbytes = 0
        self.chunks: list[tuple[Chunk, int, int]] = []
        """(chunk, offset of its item, length of its item)."""
        self.objects: list[tuple[str, int, int]] = []
        self._parts: list[bytes | Payload] = []

    def add(self, chunk: Chunk) -> None:
        """Append a chunk."""
        prefix, suffix = tensor_frame(chunk.dtype, chunk.region.sizes)
        length = len(prefix) + chunk.nbytes + len(suffix)
        self.chunks.append((chunk, self.nbytes, length))
        self._parts += [prefix, Payload(chunk.key, chunk.region, chunk.dtype), suffix]
        self.nbytes += length

    def add_object(self, name: str) -> None:
        """Append an empty extra state, as Transformer Engine saves it for bf16."""
        self.objects.append((name, self.nbytes, len(_EMPTY_STATE)))
        self._parts.append(_EMPTY_STATE)
        self.nbytes += len(_EMPTY_STATE)

    def plan(self, folder: str) -> FilePlan:
        """The file, ready to be written."""
        return FilePlan(f"{folder}/{self.name}", tuple(self._parts))


_EMPTY_STATE = object_frame([empty_tensor()])


def dist_metadata(files: Iterable[DistFile]) -> bytes:
    """The `.metadata` of all files."""
    chunks: dict[str, list[DcpChunk]] = defaultdict(list)
    headers: dict[str, tuple[str, tuple[int, ...]]] = {}
    objects: dict[str, tuple[str, int, int]] = {}
    for file in files:
        for chunk, offset, length in file.chunks:
            headers[chunk.key] = (chunk.dtype, chunk.shape)
            chunks[chunk.key].append(DcpChunk(chunk.region, file.name, offset, length))
        objects.update({name: (file.name, offset, length) for name, offset, length in file.objects})
    tensors = {key: DcpTensor(dtype, shape, tuple(chunks[key])) for key, (dtype, shape) in headers.items()}
    return write_metadata(tensors, objects)


def common_pt(args: dict[str, Any], iteration: int | str) -> bytes:
    """The bytes of `common.pt`."""
    number = iteration if isinstance(iteration, int) else 0
    return common_file(args, number, _CONTENT, {"num_floating_point_operations_so_far": 0})
