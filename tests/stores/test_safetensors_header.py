"""The header reader and writer, held against the format's own library."""

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st

from convtools.errors import AccountingError, CheckpointError, UnsupportedEncoding, UsageError
from convtools.stores.base import DTYPE_NBYTES, TORCH_DTYPE
from convtools.stores.safetensors_header import SUB_BYTE_BITS, HeaderEntry, encode_header, read_header

FIXTURES = Path(__file__).parents[2] / "fixtures" / "oracle"
GOLDEN = (
    b"\x58\x00\x00\x00\x00\x00\x00\x00"
    b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}} '
    b"\x00\x00\x80?\x00\x00\x00@"
)


def raw(table: object, data: bytes = b"") -> bytes:
    """A safetensors file from a header that need not be valid."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    return str(caught.value)


def test_golden_bytes_are_what_the_library_writes(tmp_path: Path) -> None:
    array = np.array([[1.0], [2.0]], dtype="f4")
    made = encode_header([("w", "F32", (2, 1))]) + array.tobytes()
    assert made == GOLDEN
    assert safetensors.numpy.save({"w": array}, {"format": "pt"}) == GOLDEN
    (tmp_path / "x").write_bytes(GOLDEN)
    header = read_header(tmp_path / "x")
    assert header.tensors == {"w": HeaderEntry("F32", (2, 1), 96, 104)}
    assert (header.metadata, header.data_start, header.file_size) == ({"format": "pt"}, 96, 104)


def test_every_dtype_written_by_the_library_is_read_identically(tmp_path: Path) -> None:
    tensors = {}
    for i, (dtype, name) in enumerate(sorted(TORCH_DTYPE.items())):
        if not hasattr(torch, name):  # a torch older than the dtype
            continue
        count = (i + 2) * 3 * DTYPE_NBYTES[dtype]
        data = torch.arange(count, dtype=torch.int64).remainder(2).to(torch.uint8)
        tensors[dtype] = data.view(getattr(torch, name)).reshape(i + 2, 3)
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(tensors, path, {"format": "pt", "é": "\n"})
    header, content = read_header(path), path.read_bytes()
    assert header.metadata == {"format": "pt", "é": "\n"}
    assert header.tensors.keys() == tensors.keys()
    for name, found in header.tensors.items():
        assert (found.dtype, found.shape) == (name, tuple(tensors[name].shape))
        assert content[found.start : found.end] == tensors[name].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("path", sorted(FIXTURES.rglob("*.safetensors")), ids=lambda p: p.parts[-4] + p.stem)
def test_real_files_are_read_as_the_library_reads_them(path: Path) -> None:
    header, content = read_header(path), path.read_bytes()
    known = dict(safetensors.deserialize(content))
    assert header.tensors.keys() == known.keys() != set()
    for name, found in header.tensors.items():
        assert (found.dtype, list(found.shape)) == (known[name]["dtype"], known[name]["shape"])
        assert content[found.start : found.end] == known[name]["data"]


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda n: n != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
entries = st.lists(
    st.tuples(names, st.sampled_from(sorted(DTYPE_NBYTES)), shapes), max_size=8, unique_by=lambda e: e[0]
)


@settings(max_examples=150, deadline=None)
@given(entries=entries, metadata=st.dictionaries(names, names, max_size=3))
def test_written_headers_are_read_back_by_us_and_by_the_library(
    entries: list[tuple[str, str, tuple[int, ...]]],
    metadata: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    sizes = [math.prod(shape) * DTYPE_NBYTES[dtype] for _, dtype, shape in entries]
    head = encode_header(entries, metadata)
    assert len(head) % 8 == 0
    path = tmp_path_factory.getbasetemp() / "round-trip.safetensors"
    path.write_bytes(head + bytes(range(256)) * (sum(sizes) // 256) + bytes(sum(sizes) % 256))
    header = read_header(path)
    assert header.metadata == metadata
    assert [(name, e.dtype, e.shape) for name, e in header.tensors.items()] == entries
    at = len(head)
    for found, size in zip(header.tensors.values(), sizes, strict=True):
        assert (found.start, found.end) == (at, at + size)
        at += size
    theirs = {n: (t["dtype"], tuple(t["shape"])) for n, t in safetensors.deserialize(path.read_bytes())}
    assert theirs == {name: (dtype, shape) for name, dtype, shape in entries}


@pytest.mark.parametrize(
    ("table", "data", "said"),
    [
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, 4, "`a` and `b` are the same bytes"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, 8, "`a` and `b` overlap"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [0], 4, 4)}, 8, "`a` and `b` overlap"),
        ({"a": entry("F32", [1], 4, 8)}, 8, "has a hole: 4 bytes before tensor `a`"),
        (
            {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 6, 10)},
            10,
            "has a hole: 2 bytes before tensor `b`",
        ),
        ({"a": entry("F32", [1], 0, 4)}, 7, "has a hole: 3 bytes after the last tensor"),
        ({}, 1, "has a hole: 1 bytes after the last tensor"),
        (
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
            b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
            8,
            "the key `a` is there twice",
        ),
        (
            b'{"a":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}',
            4,
            "the key `dtype` is there twice",
        ),
    ],
)
def test_b40_says_which_of_overlap_hole_and_repeated_name_it_is(
    tmp_path: Path, table: object, data: int, said: str
) -> None:
    content = raw(table, bytes(data))
    if b'"dtype":"F32","dtype"' not in content and table:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(content)
    assert said in refusal(tmp_path / "x.safetensors", content)


def test_b40_the_writer_never_shares_bytes_between_names() -> None:
    head = encode_header([("a", "F32", (1,)), ("b", "F32", (1,))])
    table = json.loads(head[8:])
    assert [table[n]["data_offsets"] for n in "ab"] == [[0, 4], [4, 8]]
    with pytest.raises(AccountingError, match="`a` would be written twice"):
        encode_header([("a", "F32", (1,)), ("a", "F32", (1,))])


@pytest.mark.parametrize("metadata", [b"", b'"__metadata__":{}', b'"__metadata__":null'])
def test_b41_absent_empty_and_null_metadata_are_alike(tmp_path: Path, metadata: bytes) -> None:
    tensor = b'"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw(b"{" + b",".join(filter(None, [metadata, tensor])) + b"}", b"\7"))
    assert read_header(path).metadata == {}
    assert list(read_header(path).tensors) == ["w"]


@pytest.mark.parametrize("value", [1, None, 1.5, True, ["pt"], {"a": "b"}])
def test_b41_a_metadata_value_that_is_no_string_is_named(tmp_path: Path, value: object) -> None:
    table = {"__metadata__": {"format": "pt", "step": value}}
    said = refusal(tmp_path / "x.safetensors", raw(table))
    assert "a value that is not a string, under `step`" in said


def test_b41_a_tensor_saved_under_the_reserved_name_is_recognised(tmp_path: Path) -> None:
    content = safetensors.numpy.save({"__metadata__": np.zeros(2, "f4")})
    assert "a tensor named `__metadata__` was written" in refusal(tmp_path / "x.safetensors", content)


def test_b41_the_writer_refuses_the_reserved_name_and_always_says_pt() -> None:
    with pytest.raises(UsageError, match="reserved"):
        encode_header([("__metadata__", "F32", (1,))])
    with pytest.raises(UsageError, match="strings only: `step` is `1`"):
        encode_header([], {"step": 1})  # type: ignore[dict-item]
    assert json.loads(encode_header([])[8:]) == {"__metadata__": {"format": "pt"}}


def test_b43_empty_and_scalar_tensors_keep_their_shapes(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(3.0),
        "empty": torch.zeros(0),
        "flat": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
        "z": torch.ones(2, 1),
    }
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(tensors, path)
    found = read_header(path).tensors
    assert {name: e.shape for name, e in found.items()} == {
        "a": (3,),
        "empty": (0,),
        "flat": (0, 4),
        "scalar": (),
        "z": (2, 1),
    }
    assert found["scalar"].end - found["scalar"].start == 4
    assert found["flat"].end == found["flat"].start
    listed = [(name, e.dtype, e.shape) for name, e in found.items()]
    made = encode_header(listed) + path.read_bytes()[read_header(path).data_start :]
    loaded = safetensors.torch.load(made)
    assert all(torch.equal(loaded[n], t) and loaded[n].shape == t.shape for n, t in tensors.items())


@pytest.mark.parametrize("dtype", sorted({**DTYPE_NBYTES, **SUB_BYTE_BITS}))
def test_b44_every_dtype_of_the_format_is_read_by_its_bytes(tmp_path: Path, dtype: str) -> None:
    bits = SUB_BYTE_BITS.get(dtype) or 8 * DTYPE_NBYTES[dtype]
    content = raw({"w": entry(dtype, [3, 4], 0, 12 * bits // 8)}, bytes(12 * bits // 8))
    assert safetensors.deserialize(content)[0][1]["dtype"] == dtype
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    found = read_header(path).tensors["w"]
    assert (found.dtype, found.shape, found.end - found.start) == (dtype, (3, 4), 12 * bits // 8)


@pytest.mark.parametrize(("dtype", "shape"), [("F4", [3, 1]), ("F6_E2M3", [2]), ("F6_E3M2", [5])])
def test_b44_sub_byte_tensors_must_fill_whole_bytes(tmp_path: Path, dtype: str, shape: list[int]) -> None:
    said = refusal(tmp_path / "x", raw({"w": entry(dtype, shape, 0, 2)}, bytes(2)))
    assert f"tensor `w`: {math.prod(shape)} elements of {dtype} do not fill whole bytes" in said


def test_b44_sub_byte_and_unknown_dtypes_are_never_written(tmp_path: Path) -> None:
    for dtype in SUB_BYTE_BITS:
        with pytest.raises(UnsupportedEncoding, match=f"`w` has the sub-byte dtype {dtype}"):
            encode_header([("w", dtype, (4,))])
    with pytest.raises(UsageError, match="`w` has the dtype `float32`"):
        encode_header([("w", "float32", (4,))])
    said = refusal(tmp_path / "x", raw({"w": entry("F8_E3M4", [1], 0, 1)}, b"\0"))
    assert "tensor `w`: unknown dtype" in said
    assert "found: `F8_E3M4`" in said


@pytest.mark.parametrize("shape", [(-1,), (2**63,), (2**32, 2**32, 0), (1,) * 65, (1.0,), (True,)])
def test_a_shape_that_cannot_be_is_not_written(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="tensor `w` has the shape"):
        encode_header([("w", "U8", shape)])


def test_a_lone_surrogate_is_not_written() -> None:
    with pytest.raises(UsageError, match="not valid Unicode"):
        encode_header([("w\ud800", "U8", (1,))])


def test_a_shard_of_five_thousand_tensors_is_read_quickly(tmp_path: Path) -> None:
    listed = [
        (f"backbone.layers.{i // 512}.mixer.experts.{i % 512}.up_proj.weight", "U8", (1, 1))
        for i in range(5000)
    ]
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode_header(listed) + bytes(5000))
    took = []
    for _ in range(3):
        start = time.perf_counter()
        assert len(read_header(path).tensors) == 5000
        took.append(time.perf_counter() - start)
    assert min(took) < 0.25  # about 0.015 on a quiet machine
