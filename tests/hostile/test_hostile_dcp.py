"""Distributed checkpoints whose `.metadata` and files do not agree: each is refused by name, at once."""

import io
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from convtools.errors import CheckpointError
from convtools.stores.dcp import open_tensor, read_metadata
from convtools.stores.torch_frames import empty_tensor, object_frame, tensor_frame

FIXTURES = Path(__file__).parents[2] / "fixtures" / "oracle"
REAL = FIXTURES / "nemotron_mtp/tp2pp2ep1/torch_dist/iter_0000001"
FILE = "__0_0.distcp"


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """A reader that takes long fails instead of hanging."""

    def late(*_: object) -> None:
        raise TimeoutError("took over 20 seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


Size = torch.Size
TOP, BOTTOM = MetadataIndex("w", Size([0, 0])), MetadataIndex("w", Size([2, 0]))
OBJECT = MetadataIndex("o")


class Case:
    """A sound checkpoint: `w` (4 x 3, BF16) in two chunks of two rows, and the object `o`; to be spoilt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        prefix, suffix = tensor_frame("BF16", (2, 3))
        item, other = prefix + bytes(12) + suffix, object_frame([empty_tensor()])
        self.length = len(item)
        self.file = item + item + other
        self.chunks = [ChunkStorageMetadata(i.offset, Size([2, 3])) for i in (TOP, BOTTOM)]
        self.tensor = TensorStorageMetadata(TensorProperties(torch.bfloat16), Size([4, 3]), self.chunks)
        self.entries: dict[Any, Any] = {"w": self.tensor, "o": BytesStorageMetadata()}
        self.places: dict[Any, Any] = {
            TOP: _StorageInfo(FILE, 0, self.length),
            BOTTOM: _StorageInfo(FILE, self.length, self.length),
            OBJECT: _StorageInfo(FILE, 2 * self.length, len(other)),
        }

    def write(self, value: object = None) -> None:
        (self.path / FILE).write_bytes(self.file)
        value = Metadata(self.entries, None, self.places) if value is None else value
        (self.path / ".metadata").write_bytes(pickle.dumps(value))


@pytest.fixture
def case(tmp_path: Path) -> Case:
    (tmp_path / "ckpt").mkdir()
    return Case(tmp_path / "ckpt")


def test_the_sound_checkpoint_is_read(case: Case) -> None:
    case.write()
    found = read_metadata(case.path)
    assert len(open_tensor(found, "w").blobs) == 2 and list(found.objects) == ["o"]


def refused(case: Case, *said: str) -> None:
    case.write()
    with pytest.raises(CheckpointError) as caught:
        read_metadata(case.path)
    message = str(caught.value)
    assert all(part in message for part in (*said, str(case.path))), message
    assert len(message) < 2000


def hole(case: Case) -> None:
    case.chunks.pop()
    case.places.pop(BOTTOM)


def overlap(case: Case) -> None:
    case.chunks[1] = ChunkStorageMetadata(Size([1, 0]), Size([3, 3]))
    case.places[MetadataIndex("w", Size([1, 0]))] = case.places.pop(BOTTOM)


def gap_of_a_row(case: Case) -> None:
    case.chunks[1] = ChunkStorageMetadata(Size([3, 0]), Size([1, 3]))
    case.places[MetadataIndex("w", Size([3, 0]))] = case.places.pop(BOTTOM)


def setter(name: str, value: object) -> Callable[[Case], None]:
    def spoil(case: Case) -> None:
        setattr(case.places[BOTTOM], name, value)

    return spoil


def chunk(offsets: Any, sizes: Any) -> Callable[[Case], None]:
    def spoil(case: Case) -> None:
        case.chunks[1] = ChunkStorageMetadata(offsets, sizes)

    return spoil


def tensor(name: str, value: object) -> Callable[[Case], None]:
    return lambda case: setattr(case.tensor, name, value)


def prop(name: str, value: object) -> Callable[[Case], None]:
    return lambda case: setattr(case.tensor.properties, name, value)


def entry(name: Any, value: object) -> Callable[[Case], None]:
    return lambda case: case.entries.update({name: value})


def place(index: object, value: object) -> Callable[[Case], None]:
    return lambda case: case.places.update({index: value})


SPOILT: dict[str, tuple[Callable[[Case], Any], tuple[str, ...]]] = {
    "a hole": (hole, ("element [2, 0] of `w` is stored 0 times",)),
    "an overlap": (overlap, ("element [1, 0] of `w` is stored 2 times", FILE)),
    "a row missing": (gap_of_a_row, ("element [2, 0] of `w` is stored 0 times",)),
    "no chunks": (lambda c: (hole(c), c.chunks.clear(), c.places.pop(TOP)), ("`w` is stored 0 times",)),
    "a chunk listed twice": (lambda c: c.chunks.append(c.chunks[0]), ("`w`", "listed twice")),
    "a chunk stored nowhere": (lambda c: c.places.pop(BOTTOM), ("`w` is stored nowhere", "[2, 0]")),
    "a chunk of no tensor": (
        place(MetadataIndex("v", Size([0])), _StorageInfo(FILE, 0, 0)),
        ("`v`", "no tensor"),
    ),
    "a chunk not listed": (place(MetadataIndex("w", Size([9, 9])), _StorageInfo(FILE, 0, 0)), ("`w`",)),
    "a chunk past the end": (chunk(Size([2, 0]), Size([3, 3])), ("`w` lies outside of it", "[4, 3]")),
    "a chunk of other dims": (chunk(Size([2]), Size([2])), ("`w` lies outside of it",)),
    "a chunk of dims that differ": (chunk(Size([2, 0]), Size([2])), ("`w` lies outside of it",)),
    "a chunk of negative size": (chunk(Size([2, 0]), Size([-2, 3])), ("a chunk of `w` in an unknown form",)),
    "a chunk of huge size": (chunk(Size([2, 0]), (1 << 80, 3)), ("a chunk of `w` in an unknown form",)),
    "a chunk of no size": (chunk(Size([2, 0]), None), ("a chunk of `w` in an unknown form",)),
    "a chunk of floats": (chunk((2.0, 0.0), (2, 3)), ("a chunk of `w` in an unknown form",)),
    "a chunk of lists": (chunk([2, 0], [2, 3]), ("a chunk of `w` in an unknown form",)),
    "a chunk of another class": (lambda c: c.chunks.append("x"), ("a chunk of `w` in an unknown form",)),  # type: ignore[arg-type]
    "chunks in a tuple": (tensor("chunks", ()), ("the size of `w`",)),
    "no size": (tensor("size", None), ("the size of `w`",)),
    "a larger size": (tensor("size", Size([5, 3])), ("element [4, 0] of `w` is stored 0 times",)),
    "a huge size": (tensor("size", Size([1 << 59, 3])), ("`w` is stored 0 times",)),
    "a scalar": (tensor("size", Size([])), ("`w` lies outside of it",)),
    "no properties": (tensor("properties", None), ("the dtype and layout of `w`",)),
    "an unknown dtype": (
        prop("dtype", torch.complex128),
        ("`w` has a dtype", "torch.complex128", "bfloat16"),
    ),
    "a sparse layout": (prop("layout", torch.sparse_coo), ("`w` is not a dense tensor", "torch.sparse_coo")),
    "a dtype that is none": (prop("dtype", "bfloat16"), ("`w` has a dtype",)),
    "too few bytes": (setter("length", 11), ("`w` is stored in fewer bytes", FILE, "over 12")),
    "bytes past the end": (setter("length", 1 << 40), ("`w`", FILE)),
    "a place past the end": (setter("offset", 1 << 40), ("`w` is stored past the end of its file", FILE)),
    "a negative place": (setter("offset", -1), ("the place of `w`",)),
    "a negative length": (setter("length", -5), ("the place of `w`",)),
    "a place that is a text": (setter("offset", "0"), ("the place of `w`",)),
    "a place that is a truth": (setter("offset", True), ("the place of `w`",)),
    "the place of another": (setter("offset", 0), ("stored in the same bytes", FILE)),
    "a place that overlaps": (setter("offset", 1400), ("stored in the same bytes", FILE)),
    "the place of an object": (
        lambda c: setattr(c.places[OBJECT], "offset", 20),
        ("`o`", "`w`", "same bytes"),
    ),
    "compressed": (
        setter("transform_descriptors", ["zstd"]),
        ("`w` was stored through an extension", "zstd"),
    ),
    "a file that is missing": (
        setter("relative_path", "__7_0.distcp"),
        ("`__7_0.distcp` (not there)", "1 of the 2"),
    ),
    "a file above": (
        setter("relative_path", "../outside"),
        ("`w`", "outside of the checkpoint", "../outside"),
    ),
    "a file from the root": (setter("relative_path", "/etc/passwd"), ("`w`", "outside", "/etc/passwd")),
    "a file in a folder": (setter("relative_path", "sub/__0_0.distcp"), ("`w`", "outside")),
    "the folder": (setter("relative_path", "."), ("`w`", "outside")),
    "the folder above": (setter("relative_path", ".."), ("`w`", "outside")),
    "a file of no name": (setter("relative_path", ""), ("`w`", "outside")),
    "a file with a NUL": (setter("relative_path", "a\0b"), ("`w`", "outside")),
    "a file that is a number": (setter("relative_path", 3), ("the place of `w`",)),
    "a file of a terminal": (setter("relative_path", "\x1b[2J"), ("`\\x1b[2J` (not there)",)),
    "an object stored nowhere": (lambda c: c.places.pop(OBJECT), ("object `o` is stored nowhere",)),
    "an object with offsets": (
        lambda c: c.places.update({MetadataIndex("o", Size([0])): c.places.pop(OBJECT)}),
        ("object `o` is stored nowhere",),
    ),
    "a tensor without offsets": (
        lambda c: c.places.update({MetadataIndex("w"): c.places.pop(BOTTOM)}),
        ("`w` is stored nowhere",),
    ),
    "an entry of another class": (entry("v", "x"), ("`v` is neither a tensor nor an object",)),
    "an entry of no name": (entry(7, BytesStorageMetadata()), ("a tensor has no name",)),
    "an index of another class": (
        place("w", _StorageInfo(FILE, 0, 0)),
        ("a storage entry in an unknown form",),
    ),
    "a place of another class": (place(BOTTOM, (FILE, 0, 0)), ("a storage entry in an unknown form",)),
    "an index of no name": (
        place(MetadataIndex(3, Size([0])), _StorageInfo(FILE, 0, 0)),
        ("storage entry's name",),
    ),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_spoilt_checkpoint_is_refused(case: Case, kind: str) -> None:
    spoil, said = SPOILT[kind]
    spoil(case)
    refused(case, *said)


@pytest.mark.parametrize(
    "value",
    [
        {"state_dict_metadata": {}},
        [],
        7,
        BytesStorageMetadata(),
        Metadata({}, None, None),
        Metadata(None, None, {}),  # type: ignore[arg-type]
        Metadata([], None, {}),  # type: ignore[arg-type]
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_metadata_that_is_none_is_refused(case: Case, value: object) -> None:
    case.write(value)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        read_metadata(case.path)


class Unfilled:
    """Pickles as an object of a class that is never given its fields."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return self.kind, ()


@pytest.mark.parametrize("kind", [MetadataIndex, _StorageInfo, ChunkStorageMetadata, TensorProperties])
def test_an_object_without_fields_is_refused(case: Case, kind: type) -> None:
    bare = Unfilled(kind)
    if kind is MetadataIndex:
        case.places = {bare: case.places[TOP]}
    elif kind is _StorageInfo:
        case.places[TOP] = bare
    elif kind is ChunkStorageMetadata:
        case.chunks[0] = bare  # type: ignore[call-overload]
    else:
        case.tensor.properties = bare  # type: ignore[assignment]
    refused(case, "unknown form" if kind is not TensorProperties else "`w` is not a dense tensor")


def test_an_index_said_twice_is_refused(case: Case) -> None:
    """A dict of real indices cannot hold two that are equal; one of unequal hashes on disk can."""

    class Twin(MetadataIndex):
        def __hash__(self) -> int:
            return id(self)

        def __eq__(self, other: object) -> bool:
            return self is other

        def __reduce__(self) -> Any:
            return MetadataIndex, (), {"fqn": self.fqn, "offset": self.offset, "index": None}

    case.places[Twin("w", Size([0, 0]))] = _StorageInfo(FILE, 7000, 900)
    refused(case, "`w` is stored twice")


def test_a_link_out_of_the_directory_is_refused(case: Case, tmp_path: Path) -> None:
    case.write()
    outside = tmp_path / "outside"
    (case.path / FILE).rename(outside)
    (case.path / FILE).symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"(?s)outside of the checkpoint's directory.*__0_0.*cp -rL"):
        read_metadata(case.path)


def test_links_inside_the_directory_and_to_it_are_followed(case: Case, tmp_path: Path) -> None:
    case.write()
    (case.path / FILE).rename(case.path / "real")
    (case.path / FILE).symlink_to("real")
    (tmp_path / "link").symlink_to(case.path)
    assert len(open_tensor(read_metadata(tmp_path / "link"), "w").blobs) == 2


@pytest.mark.parametrize("kind", ["folder", "loop", "dangling"])
def test_a_file_that_is_none_is_refused(case: Case, kind: str) -> None:
    case.write()
    (case.path / FILE).unlink()
    if kind == "folder":
        (case.path / FILE).mkdir()
    else:
        (case.path / FILE).symlink_to(FILE if kind == "loop" else "gone")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        read_metadata(case.path)


@pytest.mark.parametrize("kind", ["missing", "empty", "folder", "json"])
def test_a_checkpoint_without_metadata_is_refused(tmp_path: Path, kind: str) -> None:
    if kind == "folder":
        (tmp_path / ".metadata").mkdir()
    elif kind != "missing":
        (tmp_path / ".metadata").write_bytes(b"" if kind == "empty" else b'{"sharded_backend": "zarr"}')
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        read_metadata(tmp_path)


# ---- items that are not what .metadata says


def items() -> dict[str, tuple[bytes, str]]:
    def framed(dtype: str, shape: tuple[int, ...], nbytes: int) -> bytes:
        prefix, suffix = tensor_frame(dtype, shape)
        return prefix + bytes(nbytes) + suffix

    turned = io.BytesIO()
    torch.save(torch.zeros(3, 2, dtype=torch.bfloat16).t(), turned)
    return {
        "another dtype": (framed("F16", (2, 3), 12), "F16, [2, 3]"),
        "a wider dtype": (framed("F32", (2, 3), 24), "F32, [2, 3]"),
        "another shape": (framed("BF16", (3, 2), 12), "BF16, [3, 2]"),
        "flattened": (framed("BF16", (6,), 12), "BF16, [6]"),
        "not contiguous": (turned.getvalue(), "strides [1, 2]"),
        "an object": (object_frame([empty_tensor()]), "plain tensor"),
        "a dict": (object_frame({"w": 1}), "plain tensor"),
        "nothing": (bytes(900), "begin like a zip"),
        "a number": (object_frame(1), "plain tensor"),
    }


@pytest.mark.parametrize("kind", items())
def test_an_item_that_is_something_else_is_refused(case: Case, kind: str) -> None:
    item, said = items()[kind]
    start = len(case.file)
    case.file += item
    case.places[BOTTOM] = _StorageInfo(FILE, start, len(item))
    case.write()
    found = read_metadata(case.path)
    with pytest.raises(CheckpointError) as caught:
        open_tensor(found, "w")
    message = str(caught.value)
    assert said in message and "`w`" in message
    assert f"{FILE}:{start}" in message or kind == "not contiguous"  # whose place is that of its data


@pytest.mark.parametrize("shift", [-1, 1, 64])
def test_an_item_shifted_is_refused(case: Case, shift: int) -> None:
    case.file += bytes(100)
    case.places[OBJECT].offset += 64
    case.places[BOTTOM].offset += shift if shift > 0 else 0
    case.places[BOTTOM].length += min(shift, 0)
    case.write()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        open_tensor(read_metadata(case.path), "w")


def test_a_file_that_shrinks_after_it_was_checked_is_refused(case: Case) -> None:
    case.write()
    found = read_metadata(case.path)
    (case.path / FILE).write_bytes(case.file[: case.length + 10])
    with pytest.raises(CheckpointError, match=rf"{FILE}"):
        open_tensor(found, "w")


def test_a_file_that_goes_after_it_was_checked_is_refused(case: Case) -> None:
    case.write()
    found = read_metadata(case.path)
    (case.path / FILE).unlink()
    with pytest.raises(CheckpointError, match=FILE):
        open_tensor(found, "w")


# ---- a real one


def test_a_real_checkpoint_without_one_of_its_files_is_refused(tmp_path: Path) -> None:
    shutil.copytree(REAL, tmp_path / "ckpt", copy_function=shutil.copyfile)
    (tmp_path / "ckpt" / "__2_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"1 of the 4 files(?s:.*)__2_0\.distcp` \(not there\)"):
        read_metadata(tmp_path / "ckpt")


def test_a_real_checkpoint_with_a_file_cut_is_refused(tmp_path: Path) -> None:
    shutil.copytree(REAL, tmp_path / "ckpt", copy_function=shutil.copyfile)
    path = tmp_path / "ckpt" / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"past the end of its file(?s:.*)__1_0\.distcp:\d+"):
        read_metadata(tmp_path / "ckpt")
