"""Distributed checkpoints: what torch and Megatron wrote is read; what is written here torch reads."""

import io
import pickle
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import given, strategies as st
from torch.distributed._shard.sharded_tensor import metadata as sharded_tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from convtools.errors import CheckpointError, UsageError
from convtools.layout.region import Region
from convtools.stores import dcp_metadata
from convtools.stores.base import DTYPE_NBYTES, TORCH_DTYPE, StoredTensor
from convtools.stores.dcp import (
    DcpChunk,
    DcpMetadata,
    DcpTensor,
    open_tensor,
    open_tensors,
    read_metadata,
    write_metadata,
)
from convtools.stores.pickles import load_pickle
from convtools.stores.torch_frames import empty_tensor, object_frame, tensor_frame
from convtools.stores.torch_zip import read_archive

FIXTURES = Path(__file__).parents[2] / "fixtures" / "oracle"
REAL = sorted(FIXTURES.glob("nemotron*/*/torch_dist/iter_0000001"))
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")


def assembled(tensor: StoredTensor) -> torch.Tensor:
    """The tensor made of its blobs, by nothing but their offsets and regions."""
    whole = torch.zeros(tensor.shape, dtype=getattr(torch, TORCH_DTYPE[tensor.dtype]))
    width = DTYPE_NBYTES[tensor.dtype]
    seen = torch.zeros(tensor.shape, dtype=torch.uint8)
    for path, offset, region in tensor.blobs:
        with open(path, "rb") as file:
            file.seek(offset)
            raw = bytearray(file.read(region.numel * width))
        part = torch.frombuffer(raw, dtype=whole.dtype).reshape(region.sizes)
        where = tuple(slice(o, e) for o, e in zip(region.offsets, region.ends, strict=True))
        whole[where] = part
        seen[where] += 1
    assert bool((seen == 1).all())
    return whole


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def loaded_by_torch(path: Path, tensors: dict[str, DcpTensor]) -> dict[str, torch.Tensor]:
    state = {n: torch.zeros(t.shape, dtype=getattr(torch, TORCH_DTYPE[t.dtype])) for n, t in tensors.items()}
    torch_dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


# ---- what Megatron wrote


@pytest.mark.parametrize("path", REAL, ids=lambda path: "-".join(path.parts[-4:-2]))
def test_a_checkpoint_of_megatron_reads_as_torch_reads_it(path: Path) -> None:
    ours = read_metadata(path)
    theirs = pickle.loads((path / ".metadata").read_bytes())
    tensors = {k: v for k, v in theirs.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
    assert list(ours.tensors) == list(tensors) and len(tensors) > 50
    assert set(ours.objects) == set(theirs.state_dict_metadata) - set(tensors)
    for name, tensor in ours.tensors.items():
        expected = tensors[name]
        assert getattr(torch, TORCH_DTYPE[tensor.dtype]) == expected.properties.dtype
        assert tensor.shape == tuple(expected.size)
        for chunk, known in zip(tensor.chunks, expected.chunks, strict=True):
            assert chunk.region == Region(tuple(known.offsets), tuple(known.sizes))
            place = theirs.storage_data[MetadataIndex(name, known.offsets)]
            assert chunk[1:] == (place.relative_path, place.offset, place.length)
    values = loaded_by_torch(path, ours.tensors)
    opened = open_tensors(ours, ours.tensors)
    assert list(opened) == list(ours.tensors)
    assert all(same_bytes(assembled(opened[name]), values[name]) for name in values)
    for file, offset, length in ours.objects.values():
        assert isinstance(read_archive(path / file, offset, length).value, list)


def test_there_are_checkpoints_of_megatron_to_read() -> None:
    assert {path.parts[-4] for path in REAL} >= {"nemotron_mtp", "nemotron_nomtp_core016", "nemotron_tp4"}


@pytest.mark.parametrize("path", REAL, ids=lambda path: "-".join(path.parts[-4:-2]))
def test_without_its_save_plans_a_metadata_says_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (path / ".metadata").read_bytes()
    cut = dcp_metadata._without_plans(data)
    assert cut is not None and len(cut) < 0.75 * len(data) and b"all_local_plans" not in cut
    short = read_metadata(path)
    monkeypatch.setattr(dcp_metadata, "_without_plans", lambda data: None)
    assert read_metadata(path) == short


# ---- what torch writes, in its several spellings


def torch_metadata(**more: Any) -> Metadata:
    sizes = [(torch.Size([0, 0]), torch.Size([2, 3])), (torch.Size([2, 0]), torch.Size([2, 3]))]
    chunks = [ChunkStorageMetadata(*pair) for pair in sizes]
    tensor = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([4, 3]), chunks)
    places = {
        MetadataIndex("w", o, i): _StorageInfo("__0_0.distcp", i * 900, 900) for i, (o, _) in enumerate(sizes)
    }
    places[MetadataIndex("x")] = _StorageInfo("__1_0.distcp", 0, 50)
    value = Metadata({"w": tensor, "x": BytesStorageMetadata()}, None, places, None)
    for name, item in more.items():
        setattr(value, name, item)
    return value


def claimed(path: Path, data: bytes) -> DcpMetadata:
    (path / ".metadata").write_bytes(data)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        (path / name).write_bytes(bytes(2000))
    return read_metadata(path)


EXPECTED = {
    "w": DcpTensor(
        "BF16",
        (4, 3),
        (
            DcpChunk(Region((0, 0), (2, 3)), "__0_0.distcp", 0, 900),
            DcpChunk(Region((2, 0), (2, 3)), "__0_0.distcp", 900, 900),
        ),
    )
}


@pytest.mark.parametrize("protocol", range(2, 6))
def test_every_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    for value in (torch_metadata(), torch_metadata(version="1.0.0", all_local_plans=[1], mcore_data={})):
        found = claimed(tmp_path, pickle.dumps(value, protocol))
        assert (found.tensors, found.objects) == (EXPECTED, {"x": ("__1_0.distcp", 0, 50)})


def test_the_subclass_of_core_015_is_read(tmp_path: Path) -> None:
    theirs = b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"
    data = pickle.dumps(torch_metadata(mcore_data={"w": {"nd_reformulated_orig_global_shape": (4, 3)}}), 2)
    found = claimed(tmp_path, data.replace(b"ctorch.distributed.checkpoint.metadata\nMetadata\n", theirs))
    assert theirs in (tmp_path / ".metadata").read_bytes() and found.tensors == EXPECTED


def test_properties_of_the_class_before_torch_23_are_read(tmp_path: Path) -> None:
    value = torch_metadata()
    value.state_dict_metadata["w"].properties = sharded_tensor.TensorProperties(torch.bfloat16)
    data = pickle.dumps(value)
    assert b"sharded_tensor" in data and claimed(tmp_path, data).tensors == EXPECTED


def test_a_storage_entry_with_every_field_is_read(tmp_path: Path) -> None:
    value = torch_metadata()
    for place in value.storage_data.values():
        place.transform_descriptors = ()
    data = pickle.dumps(value)
    assert b"transform_descriptors" in data and claimed(tmp_path, data).tensors == EXPECTED


def test_a_checkpoint_of_torchs_own_is_read(tmp_path: Path) -> None:
    state = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
        "half": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
        "scale": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "nested": {"w": torch.ones(2, 3, 1, 2)},
        "step": 7,
    }
    torch_dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    found = read_metadata(tmp_path)
    assert set(found.objects) == {"step"}
    opened = open_tensors(found, found.tensors)
    flat = {**state, **{f"nested.{k}": v for k, v in state["nested"].items()}}  # type: ignore[attr-defined]
    assert set(opened) == set(flat) - {"nested", "step"}
    assert all(same_bytes(assembled(t), flat[name]) for name, t in opened.items())
    assert opened["empty"].blobs == () and opened["empty"].shape == (0, 4)


def test_only_what_is_wanted_is_checked(tmp_path: Path) -> None:
    value = torch_metadata()
    value.state_dict_metadata["optimizer.w"] = TensorStorageMetadata(
        TensorProperties(torch.complex128), torch.Size([9]), []
    )
    data = pickle.dumps(value)
    with pytest.raises(CheckpointError, match=r"optimizer\.w"):
        claimed(tmp_path, data)
    found = read_metadata(tmp_path, wanted=lambda name: not name.startswith("optimizer."))
    assert (found.tensors, found.unread) == (EXPECTED, ("optimizer.w",))


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    found = claimed(tmp_path, pickle.dumps(torch_metadata()))
    with pytest.raises(UsageError, match=r"no such tensor(?s:.*)`v`"):
        open_tensor(found, "v")


# ---- what is written here


class Writer:
    """A checkpoint of one file, written with frames."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, io.BytesIO()
        self.tensors: dict[str, DcpTensor] = {}
        self.objects: dict[str, tuple[str, int, int]] = {}

    def item(self, raw: bytes) -> tuple[str, int, int]:
        offset = self.data.tell()
        self.data.write(raw)
        return "__0_0.distcp", offset, len(raw)

    def tensor(self, name: str, dtype: str, value: torch.Tensor, regions: list[Region]) -> None:
        chunks = []
        for region in regions:
            prefix, suffix = tensor_frame(dtype, region.sizes)
            part = value[tuple(slice(o, e) for o, e in zip(region.offsets, region.ends, strict=True))]
            raw = part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            chunks.append(DcpChunk(region, *self.item(prefix + raw + suffix)))
        self.tensors[name] = DcpTensor(dtype, tuple(value.shape), tuple(chunks))

    def close(self) -> None:
        (self.path / "__0_0.distcp").write_bytes(self.data.getvalue())
        (self.path / ".metadata").write_bytes(write_metadata(self.tensors, self.objects))


def grid(shape: tuple[int, ...], cuts: tuple[int, ...]) -> Iterator[Region]:
    spans = []
    for size, parts in zip(shape, cuts, strict=True):
        edges = [size * i // parts for i in range(parts + 1)]
        spans.append([(a, b - a) for a, b in pairwise(edges)])
    for cell in product(*spans):
        yield Region(tuple(o for o, _ in cell), tuple(n for _, n in cell))


def random(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    raw = torch.randint(
        0, 2 if dtype == "BOOL" else 120, (prod(shape) * DTYPE_NBYTES[dtype],), dtype=torch.uint8
    )
    return raw.view(getattr(torch, TORCH_DTYPE[dtype])).reshape(shape)


@pytest.fixture
def ours(tmp_path: Path) -> Writer:
    writer = Writer(tmp_path)
    for dtype in TORCH_DTYPE:
        writer.tensor(f"whole.{dtype}", dtype, random(dtype, (6, 4)), [Region.whole((6, 4))])
        writer.tensor(f"cut.{dtype}", dtype, random(dtype, (5, 4, 3)), list(grid((5, 4, 3), (2, 2, 3))))
    writer.tensor("scalar", "F32", random("F32", ()), [Region((), ())])
    writer.tensor("empty", "BF16", torch.empty(0, 4, dtype=torch.bfloat16), [Region.whole((0, 4))])
    writer.tensor("stacked", "BF16", random("BF16", (2, 8, 4, 3)), list(grid((2, 8, 4, 3), (2, 8, 2, 1))))
    writer.objects["layer._extra_state/shard_0_1"] = writer.item(object_frame([empty_tensor()]))
    writer.close()
    return writer


def test_torch_reads_what_is_written(ours: Writer) -> None:
    values = loaded_by_torch(ours.path, ours.tensors)
    opened = open_tensors(read_metadata(ours.path), ours.tensors)
    for name, tensor in ours.tensors.items():
        assert same_bytes(values[name], assembled(opened[name])), name
        parts = {(b.offset, b.region) for b in opened[name].blobs}
        assert len(parts) == sum(chunk.region.numel > 0 for chunk in tensor.chunks)
    state = {"layer._extra_state/shard_0_1": io.BytesIO()}
    torch_dcp.load(state, checkpoint_id=ours.path, no_dist=True)
    (found,) = state["layer._extra_state/shard_0_1"]
    assert (found.dtype, found.shape) == (torch.uint8, (0,))


def test_the_metadata_is_what_torch_would_write(ours: Writer) -> None:
    found = torch_dcp.FileSystemReader(ours.path).read_metadata()
    expected: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, tensor in ours.tensors.items():
        chunks = [
            ChunkStorageMetadata(torch.Size(c.region.offsets), torch.Size(c.region.sizes))
            for c in tensor.chunks
        ]
        properties = TensorProperties(getattr(torch, TORCH_DTYPE[tensor.dtype]))
        expected[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        places.update({MetadataIndex(name, c.region.offsets): _StorageInfo(*c[1:]) for c in tensor.chunks})
    expected.update(dict.fromkeys(ours.objects, BytesStorageMetadata()))
    places.update({MetadataIndex(name): _StorageInfo(*place) for name, place in ours.objects.items()})
    assert type(found) is Metadata
    assert (found.state_dict_metadata, found.storage_data, found.planner_data) == (expected, places, None)
    assert list(found.state_dict_metadata) == list(expected)
    first = found.state_dict_metadata["cut.BF16"]
    assert type(first.size) is torch.Size and type(first.chunks[1].offsets) is torch.Size
    assert {type(i.offset) for i in found.storage_data} == {torch.Size, type(None)}


def test_only_attributes_of_torch_24_are_written(ours: Writer) -> None:
    """A later torch fills in what is missing; an earlier one would keep what it does not know."""
    value = load_pickle((ours.path / ".metadata").read_bytes(), where="here")
    assert list(value.state) == ["state_dict_metadata", "planner_data", "storage_data", "storage_meta"]
    entries = {type(e).path.rsplit(".", 1)[1]: e for e in value.state["state_dict_metadata"].values()}
    assert list(entries["TensorStorageMetadata"].state) == ["properties", "size", "chunks"]
    assert entries["BytesStorageMetadata"].state is None
    for index, place in value.state["storage_data"].items():
        assert list(index.state) == ["fqn", "offset", "index"] or list(index.state) == ["fqn", "index"]
        assert list(place.state) == ["relative_path", "offset", "length"]


@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(1, 3)), min_size=1, max_size=5), st.integers(0, 2**40)
)
def test_what_is_written_is_read(tmp_path_factory: Any, dims: list[tuple[int, int]], start: int) -> None:
    path = tmp_path_factory.mktemp("dcp")
    shape = tuple(max(size, cuts) for size, cuts in dims)
    regions = list(grid(shape, tuple(cuts for _, cuts in dims)))
    chunks = tuple(
        DcpChunk(r, f"__{i % 3}_0.distcp", start + i * 20000, 20000) for i, r in enumerate(regions)
    )
    tensors = {"é.w": DcpTensor("F8_E5M2", shape, chunks)}
    (path / ".metadata").write_bytes(write_metadata(tensors, {"o": ("o.distcp", 0, 1)}))
    for name in {chunk.relative_path for chunk in chunks} | {"o.distcp"}:
        with open(path / name, "wb") as file:
            file.truncate(start + len(chunks) * 20000)
    found = read_metadata(path)
    assert (found.tensors, found.objects) == (tensors, {"o": ("o.distcp", 0, 1)})


# ---- how a tensor may be cut


def cut_into(path: Path, shape: tuple[int, ...], regions: list[Region]) -> DcpMetadata:
    chunks = [DcpChunk(r, "a.distcp", 2000 * i, 2000) for i, r in enumerate(regions)]
    (path / ".metadata").write_bytes(write_metadata({"w": DcpTensor("BF16", shape, tuple(chunks))}, {}))
    with open(path / "a.distcp", "wb") as file:
        file.truncate(2000 * len(regions))
    return read_metadata(path)


IRREGULAR = {
    "rows of different cuts": [Region((0, 0), (1, 4)), Region((1, 0), (1, 1)), Region((1, 1), (1, 3))],
    "columns of different cuts": [Region((0, 0), (1, 2)), Region((1, 0), (1, 2)), Region((0, 2), (2, 2))],
    "a chunk of nothing": [Region((0, 0), (2, 4)), Region((2, 0), (0, 4))],
}


@pytest.mark.parametrize("kind", IRREGULAR)
def test_irregular_chunks_are_read(tmp_path: Path, kind: str) -> None:
    found = cut_into(tmp_path, (2, 4), IRREGULAR[kind])
    assert [chunk.region for chunk in found.tensors["w"].chunks] == IRREGULAR[kind]


def test_a_pinwheel_is_read(tmp_path: Path) -> None:
    regions = [Region((0, 0), (2, 1)), Region((0, 1), (1, 2)), Region((1, 2), (2, 1)), Region((2, 0), (1, 2))]
    cut_into(tmp_path, (3, 3), [*regions, Region((1, 1), (1, 1))])
    with pytest.raises(CheckpointError, match=r"element \[1, 1\] of `w` is stored 0 times"):
        cut_into(tmp_path, (3, 3), regions)


def test_many_layers_each_cut_at_its_own_places_are_read(tmp_path: Path) -> None:
    """As flattened shards of an optimizer are, which cut every layer of a stack anew."""
    regions = []
    for layer in range(500):
        edges = sorted({0, 1000, *((layer * 37 + k * 131) % 1000 for k in range(5))})
        regions += [Region((layer, a), (1, b - a)) for a, b in pairwise(edges)]
    found = cut_into(tmp_path, (500, 1000), regions)
    assert len(found.tensors["w"].chunks) == len(regions) > 2000


def test_many_chunks_like_bricks_are_refused_at_once(tmp_path: Path) -> None:
    bricks = []
    for column in range(100):
        edges = [0, *range(column % 7 + 1, 200, 7), 200]
        bricks += [Region((a, column), (b - a, 1)) for a, b in pairwise(edges)]
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match="not cut along its dims"):
        cut_into(tmp_path, (200, 100), bricks)
    assert time.perf_counter() - start < 5


# ---- size


def large(path: Path, layers: int) -> tuple[dict[str, DcpTensor], int]:
    tensors = {}
    for layer in range(layers):
        regions = grid((512, 1024, 64), (512, 8, 1))
        base = layer * 512 * 9000
        chunks = (
            DcpChunk(r, f"__{i % 8}_0.distcp", base + i // 8 * 9000, 9000) for i, r in enumerate(regions)
        )
        tensors[f"decoder.layers.{layer}.mlp.experts.experts.linear_fc1.weight"] = DcpTensor(
            "F8_E4M3", (512, 1024, 64), tuple(chunks)
        )
    for rank in range(8):
        with open(path / f"__{rank}_0.distcp", "wb") as file:
            file.truncate(layers * 512 * 9000)
    return tensors, sum(len(t.chunks) for t in tensors.values())


def test_forty_thousand_chunks_take_no_time(tmp_path: Path) -> None:
    tensors, count = large(tmp_path, 10)
    start = time.perf_counter()
    data = write_metadata(tensors, {})
    wrote = time.perf_counter() - start
    (tmp_path / ".metadata").write_bytes(data)
    start = time.perf_counter()
    assert read_metadata(tmp_path).tensors == tensors
    assert count == 40_960 and wrote < 3 and time.perf_counter() - start < 4


@pytest.mark.slow
def test_four_hundred_thousand_chunks_fit_in_memory(tmp_path: Path) -> None:
    tensors, count = large(tmp_path, 98)
    assert count == 401_408
    (tmp_path / ".metadata").write_bytes(write_metadata(tensors, {}))
    script = """
        import sys, time
        from pathlib import Path
        from convtools.stores.dcp import read_metadata
        start = time.perf_counter()
        found = read_metadata(Path(sys.argv[1]))
        seconds = time.perf_counter() - start
        # Not ru_maxrss, which begins at what the process that started this one had.
        peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
        print(len(found.tensors), seconds, peak)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    root = str(Path(__file__).parents[2])
    run = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
    names, seconds, kib = run.stdout.split()
    assert int(names) == 98 and float(seconds) < 20 and int(kib) < 1_000_000, run.stdout


def test_an_item_is_opened_in_little_time(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.tensor("w", "BF16", random("BF16", (2000, 8)), list(grid((2000, 8), (1000, 2))))
    writer.close()
    found = read_metadata(tmp_path)
    start = time.perf_counter()
    opened = open_tensor(found, "w")
    assert time.perf_counter() - start < 2 and len(opened.blobs) == 2000
