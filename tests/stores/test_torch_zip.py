"""What torch.save wrote is found byte for byte, and what is written here torch loads bit for bit."""

import argparse
import io
import json
import os
import random as pyrandom
import time
import zipfile
from collections import OrderedDict
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convtools.errors import CheckpointError, UsageError
from convtools.layout.region import Region
from convtools.stores.base import DTYPE_NBYTES, TORCH_DTYPE, Payload
from convtools.stores.pickle_write import namespace, torch_dtype
from convtools.stores.pickles import plain
from convtools.stores.stand_ins import Inert
from convtools.stores.torch_frames import (
    common_file,
    common_state,
    empty_tensor,
    object_frame,
    tensor_frame,
    torch_file,
)
from convtools.stores.torch_zip import TensorRef, read_archive, read_tensor_item

FIXTURES = Path(__file__).parents[2] / "fixtures" / "oracle"
LEGACY = sorted(FIXTURES.glob("nemotron*/*/torch_legacy/iter_0000001/mp_rank_*/model_optim_rng.pt"))
SHAPES = [(), (0,), (0, 4), (4, 0, 3), (7,), (1,), (3, 5), (2, 3, 4), (2, 1, 3, 2)]
GIB = 1 << 30


def pattern(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Bytes that are all different from their neighbours, and valid as the dtype."""
    nbytes = prod(shape) * DTYPE_NBYTES[dtype]
    return bytes((i * 37 + 11) % (2 if dtype == "BOOL" else 251) for i in range(nbytes))


def tensor(dtype: str, shape: tuple[int, ...], raw: bytes) -> torch.Tensor:
    if not raw:
        return torch.empty(shape, dtype=getattr(torch, TORCH_DTYPE[dtype]))
    flat = torch.tensor(list(raw), dtype=torch.uint8)
    return flat.view(getattr(torch, TORCH_DTYPE[dtype])).reshape(shape)


def raw_of(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def stored(ref: TensorRef) -> bytes:
    with open(ref.path, "rb") as file:
        file.seek(ref.offset)
        return file.read(ref.nbytes)


def safetensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:begin])
    table.pop("__metadata__", None)
    return {
        name: (entry["dtype"], tuple(entry["shape"]), data[begin + entry["data_offsets"][0] :][: end - start])
        for name, entry in table.items()
        for start, end in [entry["data_offsets"]]
    }


# ---- reading


@pytest.mark.parametrize("path", LEGACY, ids=lambda path: "-".join(path.parts[-6:-1]))
def test_a_legacy_file_holds_the_tensors_of_its_rank(path: Path) -> None:
    tp, pp = [int(part) for part in [*path.parent.name.split("_")[2:], "0"][:2]]
    rank = safetensors(path.parents[3] / "state_dict" / f"tp{tp}_pp{pp}_ep0.safetensors")
    model = read_archive(path).value["model"]
    found = {n: t.check(n) for n, t in model.items() if not n.endswith("_extra_state")}
    assert {n: (t.dtype, t.shape, stored(t)) for n, t in found.items()} == rank
    states = [state for name, state in model.items() if name not in found]
    assert states and all(state is None or state.nbytes == 0 for state in states)


def test_there_are_legacy_files_to_read() -> None:
    assert len(LEGACY) >= 4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TORCH_DTYPE)
def test_a_saved_tensor_is_found(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    raw = pattern(dtype, shape)
    item = saved(tensor(dtype, shape, raw))
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(b"x" * 77 + item + b"y" * 5000)
    ref = read_tensor_item(path, 77, len(item)).check("w")
    assert (ref.dtype, ref.shape, stored(ref), ref.path) == (dtype, shape, raw, path)
    fd = os.open(path, os.O_RDONLY)
    assert read_tensor_item(path, 77, len(item), fd=fd) == ref
    os.close(fd)


@pytest.mark.parametrize("name", ["w.pt", "longer_name.with.dots.pt"])
def test_views_of_one_storage_are_found(tmp_path: Path, name: str) -> None:
    flat = torch.arange(100, dtype=torch.float32)
    value = {
        "a": flat[3:15].view(3, 4),
        "b": flat[50:],
        "all": torch.nn.Parameter(flat),
        "list": [flat[-1], torch.nn.Parameter(flat[:0])],
    }
    torch.save(value, tmp_path / name)
    found = read_archive(tmp_path / name).value
    refs = [found["a"], found["b"], found["all"], *found["list"]]
    for ref, real in zip(refs, [value["a"], value["b"], flat, flat[-1], flat[:0]], strict=True):
        assert ref.dtype == "F32" and ref.shape == tuple(real.shape)
        assert stored(ref.check("w")) == raw_of(real.detach())
    assert found["b"].offset - found["all"].offset == 200


def test_what_is_not_contiguous_is_told_with_its_strides(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    base = torch.arange(24.0)
    torch.save([base.view(4, 6).t(), base.view(4, 6)[:, :3], base[:1].expand(5), base.view(1, 24).t()], path)
    transposed, cut, expanded, column = read_archive(path).value
    with pytest.raises(CheckpointError, match=r"(?s)`w`.*strides \[1, 6\].*contiguous\(\)"):
        transposed.check("w")
    with pytest.raises(CheckpointError, match=r"strides \[6, 1\]"):
        cut.check("w")
    with pytest.raises(CheckpointError, match=r"strides \[0\]"):
        expanded.check("w")
    assert stored(column.check("w")) == raw_of(base)  # only the strides of dims of size 1 differ


NOT_PLAIN = {
    "sparse": lambda: torch.ones(2, 2).to_sparse(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "complex128": lambda: torch.ones(2, dtype=torch.complex128),
    "meta": lambda: torch.empty(2, device="meta"),
    "storage": lambda: torch.ones(4).untyped_storage(),
    "string": lambda: "a string",
    "dict": lambda: {"w": torch.ones(2)},
}


@pytest.mark.filterwarnings(
    "ignore::UserWarning:", "ignore::FutureWarning:"
)  # of torch, about quantised ones
@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_what_has_no_plain_bytes_is_no_tensor(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "w.pt"
    torch.save(NOT_PLAIN[kind](), path)
    assert not isinstance(read_archive(path).value, TensorRef)
    with pytest.raises(CheckpointError, match=r"(?s)expected one plain tensor.*w\.pt:0"):
        read_tensor_item(path, 0, path.stat().st_size)


def test_a_tensor_with_attributes_of_its_own_is_found(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]  # as Megatron marks its own
    marked = torch.ones(2)
    marked.mark = [1]  # type: ignore[attr-defined]
    torch.save([parameter, marked], path)
    found = read_archive(path).value
    assert [(ref.dtype, ref.shape) for ref in found] == [("F32", (3,)), ("F32", (2,))]
    assert [stored(ref) for ref in found] == [raw_of(parameter.detach()), raw_of(torch.ones(2))]


def test_a_tensor_of_a_subclass_is_not_taken_for_its_numbers(tmp_path: Path) -> None:
    class Scaled(torch.Tensor):
        pass

    globals()["Scaled"] = Scaled
    Scaled.__qualname__ = "Scaled"
    torch.save(torch.ones(2).as_subclass(Scaled), tmp_path / "w.pt")
    found = read_archive(tmp_path / "w.pt").value
    assert isinstance(found, Inert) and type(found).path == "torch._tensor._rebuild_from_type_v2"


def test_the_state_of_random_generators_is_no_obstacle(tmp_path: Path) -> None:
    """Megatron saves those of Python and numpy beside torch's own."""
    path = tmp_path / "model_optim_rng.pt"
    states = {
        "random_rng_state": pyrandom.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
    }
    torch.save({"model": {"w": torch.ones(2)}, "rng_state": [states]}, path)
    found = read_archive(path).value
    assert stored(found["model"]["w"]) == raw_of(torch.ones(2))
    (state,) = found["rng_state"]
    assert state["random_rng_state"] == pyrandom.getstate()
    assert isinstance(state["np_rng_state"][1], Inert)
    assert stored(state["torch_rng_state"]) == raw_of(states["torch_rng_state"])


@pytest.mark.parametrize("zipped", [True, False], ids=["new", "before 1.6"])
def test_the_old_format_is_refused_by_name(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "w.pt"
    torch.save(torch.ones(2), path, _use_new_zipfile_serialization=zipped)
    if zipped:
        assert read_tensor_item(path, 0, path.stat().st_size).shape == (2,)
        return
    with pytest.raises(CheckpointError, match=r"(?s)before PyTorch 1\.6.*w\.pt.*save it again"):
        read_archive(path)


def test_torchscript_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "script.pt"
    module = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))
    torch.jit.save(module, path)
    with pytest.raises(CheckpointError, match="TorchScript"):
        read_archive(path)


def test_many_records_are_read_in_little_time(tmp_path: Path) -> None:
    path = tmp_path / "many.pt"
    torch.save({f"w{i}": torch.full((3,), i) for i in range(3000)}, path)
    start = time.perf_counter()
    found = read_archive(path).value
    assert time.perf_counter() - start < 5
    assert len(found) == 3000 and stored(found["w2999"]) == raw_of(torch.full((3,), 2999))


# ---- writing one tensor


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TORCH_DTYPE)
def test_a_framed_tensor_is_what_torch_would_save(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    raw = pattern(dtype, shape)
    real = tensor(dtype, shape, raw)
    prefix, suffix = tensor_frame(dtype, shape)
    item = prefix + raw + suffix
    if raw:
        assert saved(real).startswith(prefix)
        assert len(prefix) % 64 == 0
    path = tmp_path / "w.pt"
    path.write_bytes(item)
    for mmap in (False, True):
        found = torch.load(path, weights_only=True, mmap=mmap)
        assert (found.dtype, found.shape, found.stride()) == (real.dtype, real.shape, real.stride())
        assert raw_of(found) == raw
    assert stored(read_tensor_item(path, 0, len(item)).check("w")) == raw


def test_a_frame_is_a_zip_to_others_but_for_the_checksum_of_its_payload() -> None:
    prefix, suffix = tensor_frame("BF16", (2,))
    with zipfile.ZipFile(io.BytesIO(prefix + bytes(4) + suffix)) as archive:
        sizes = {
            i.filename: (i.file_size, i.compress_size, i.compress_type, i.CRC) for i in archive.infolist()
        }
        names = [n for n in archive.namelist() if n != "archive/data/0"]
        assert archive.testzip() == "archive/data/0"  # whose checksum is 0
        assert archive.read("archive/version") == b"3\n" and archive.read("archive/byteorder") == b"little"
    assert sizes["archive/data/0"] == (4, 4, zipfile.ZIP_STORED, 0)
    assert names == [
        f"archive/{n}" for n in ("data.pkl", ".format_version", ".storage_alignment", "byteorder", "version")
    ]


def test_frames_are_made_once() -> None:
    assert tensor_frame("BF16", (12, 3)) is tensor_frame("BF16", (12, 3))


# ---- writing objects


def test_an_empty_extra_state_is_what_megatron_saves() -> None:
    frame = object_frame([empty_tensor()])
    real = saved([torch.empty(0, dtype=torch.uint8)])
    assert frame[:471] == real[:471]  # up to where torch adds an id of its own
    (found,) = torch.load(io.BytesIO(frame), weights_only=True)
    assert (found.dtype, found.shape) == (torch.uint8, (0,))


def test_a_small_object_holds_no_data() -> None:
    with pytest.raises(UsageError, match="with data"):
        object_frame([Payload("w", Region.whole((2,)), "F32")])


def test_a_common_file_is_what_megatron_saves(tmp_path: Path) -> None:
    args = {"hidden_size": 64, "params_dtype": torch_dtype("BF16"), "spec": ["a", "b"], "nothing": None}
    path = tmp_path / "common.pt"
    path.write_bytes(common_file(args, 7, {"singleton_local_shards": False}, {"num_flops": 0}))
    found = torch.load(path, weights_only=False)
    assert type(found["args"]) is argparse.Namespace
    assert vars(found.pop("args")) == {**args, "params_dtype": torch.bfloat16}
    content = {"singleton_local_shards": False}
    assert found == {"checkpoint_version": 3.0, "iteration": 7, "content_metadata": content, "num_flops": 0}
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert torch.load(path, weights_only=True)["args"].hidden_size == 64
    assert plain(read_archive(path).value)["args"] == {**args, "params_dtype": "torch.bfloat16"}


# ---- writing a whole file


def written(path: Path, parts: tuple[bytes | Payload, ...], raws: dict[str, bytes]) -> None:
    with open(path, "wb") as file:
        for part in parts:
            file.write(part if isinstance(part, bytes) else raws[part.name])


def test_a_legacy_file_is_what_megatron_saves(tmp_path: Path) -> None:
    headers = {f"{d}.{i}": (d, shape) for d in TORCH_DTYPE for i, shape in enumerate(SHAPES)}
    raws = {name: pattern(*header) for name, header in headers.items()}
    model = OrderedDict((n, Payload(n, Region.whole(s), d)) for n, (d, s) in headers.items())
    state = {**common_state({"hidden_size": 64}, 3), "model": model}
    path = tmp_path / "model_optim_rng.pt"
    parts = torch_file(state, "model_optim_rng")
    written(path, parts, raws)
    assert path.stat().st_size == sum(len(p) if isinstance(p, bytes) else p.nbytes for p in parts)
    assert not any(type(a) is type(b) is bytes for a, b in pairwise(parts))
    for mmap in (False, True):
        found = torch.load(path, weights_only=False, mmap=mmap)
        assert type(found["args"]) is argparse.Namespace and found["args"].hidden_size == 64
        assert (found["checkpoint_version"], found["iteration"]) == (3.0, 3)
        assert type(found["model"]) is OrderedDict and list(found["model"]) == list(headers)
        for name, (dtype, shape) in headers.items():
            value = found["model"][name]
            assert value.dtype == getattr(torch, TORCH_DTYPE[dtype]) and value.shape == shape
            assert raw_of(value) == raws[name]
            assert value.untyped_storage().nbytes() == len(raws[name])  # a storage of its own
    ours = read_archive(path).value["model"]
    assert {n: (t.dtype, t.shape, stored(t.check(n))) for n, t in ours.items()} == {
        name: (*headers[name], raws[name]) for name in headers
    }


def test_a_legacy_file_is_laid_out_as_torch_lays_it_out(tmp_path: Path) -> None:
    raws = {"a": pattern("BF16", (3, 5)), "b": pattern("F32", ()), "c": b"", "d": pattern("F8_E4M3", (100,))}
    headers: dict[str, Any] = {
        "a": ("BF16", (3, 5)),
        "b": ("F32", ()),
        "c": ("F32", (0,)),
        "d": ("F8_E4M3", (100,)),
    }
    payloads = {n: Payload(n, Region.whole(s), d) for n, (d, s) in headers.items()}
    state = {"args": namespace({"x": 1}), "model": OrderedDict(payloads)}
    real = tmp_path / "model_optim_rng.pt"
    torch.save(
        {
            "args": argparse.Namespace(x=1),
            "model": OrderedDict((n, tensor(*headers[n], raws[n])) for n in headers),
        },
        real,
    )
    ours = b"".join(p if isinstance(p, bytes) else raws[p.name] for p in torch_file(state, "model_optim_rng"))
    with zipfile.ZipFile(real) as expected, zipfile.ZipFile(io.BytesIO(ours)) as found:
        theirs = [(i.filename, i.header_offset, i.file_size, i.flag_bits) for i in expected.infolist()]
        assert [(i.filename, i.header_offset, i.file_size, i.flag_bits) for i in found.infolist()] == theirs[
            :-1
        ]
        assert found.read("model_optim_rng/data.pkl") == expected.read("model_optim_rng/data.pkl")
    assert theirs[-1][0].endswith("serialization_id")


def test_the_same_payload_twice_is_one_tensor() -> None:
    tied = Payload("w", Region.whole((2,)), "F32")
    parts = torch_file({"a": tied, "b": [tied]})
    assert sum(isinstance(p, Payload) for p in parts) == 1
    data = b"".join(p if isinstance(p, bytes) else b"\0\0\x80?\0\0\0@" for p in parts)
    found = torch.load(io.BytesIO(data), weights_only=True)
    assert found["a"] is found["b"][0] and found["a"].tolist() == [1, 2]


# ---- 4 GiB and more, in sparse files


def sparse(path: Path, parts: tuple[bytes | Payload, ...], last: bytes) -> None:
    """Write the parts; of each payload only its last bytes, the rest is a hole."""
    with open(path, "wb") as file:
        for part in parts:
            if isinstance(part, bytes):
                file.write(part)
            else:
                file.seek(part.nbytes - len(last), os.SEEK_CUR)
                file.write(last)


@pytest.mark.parametrize("extra", [-1, 0, 1, GIB], ids=["under", "at", "over", "5 GiB"])
def test_a_tensor_of_4_gib_is_loaded(tmp_path: Path, extra: int) -> None:
    size = 0xFFFFFFFF + extra
    path = tmp_path / "big.pt"
    prefix, suffix = tensor_frame("U8", (size,))
    sparse(path, (prefix, Payload("", Region.whole((size,)), "U8"), suffix), b"abc")
    found = torch.load(path, mmap=True, weights_only=True)
    assert found.shape == (size,) and bytes(found[-4:].tolist()) == b"\0abc"
    ref = read_tensor_item(path, 0, path.stat().st_size)
    assert ref.shape == (size,) and ref.offset == len(prefix)
    with torch.serialization.skip_data():  # the real writer, leaving a hole for the bytes
        torch.save(torch.empty(size, dtype=torch.uint8), tmp_path / "archive.pt")
    with open(tmp_path / "archive.pt", "rb") as real:
        before = bytearray(real.read(len(prefix)))
        if size >= 0xFFFFFFFF:  # torch leaves one of the two sizes before the payload 0
            at = before.index(size.to_bytes(8, "little") + bytes(8), 600)
            before[at + 8 : at + 16] = size.to_bytes(8, "little")
        assert before == prefix
        real.seek(len(prefix) + size)
        after = real.read()
    descriptor = 24 if size >= 0xFFFFFFFF else 16
    assert after[: descriptor + 60] == suffix[: descriptor + 60]
    assert after[-22:-18] == suffix[-22:-18] == b"PK\x05\x06"


def test_a_file_of_over_4_gib_is_loaded(tmp_path: Path) -> None:
    sizes = {"a": 3 * GIB, "b": 2 * GIB, "c": 5 * GIB, "d": 8}
    path = tmp_path / "model_optim_rng.pt"
    model = {name: Payload(name, Region.whole((size,)), "U8") for name, size in sizes.items()}
    sparse(path, torch_file({"model": model}, "model_optim_rng"), b"12345678")
    found = torch.load(path, mmap=True, weights_only=True)["model"]
    ours = read_archive(path).value["model"]
    for name, size in sizes.items():
        assert found[name].shape == (size,) and bytes(found[name][-8:].tolist()) == b"12345678"
        assert ours[name].shape == (size,) and ours[name].offset % 64 == 0
        with open(path, "rb") as file:
            file.seek(ours[name].offset + size - 8)
            assert file.read(8) == b"12345678"


def test_a_large_file_of_torchs_own_is_read(tmp_path: Path) -> None:
    value = [
        torch.empty(5 * GIB, dtype=torch.uint8),
        torch.ones(3),
        torch.empty(0),
        torch.empty(4 * GIB + 1, dtype=torch.int8),
    ]
    path = tmp_path / "big.pt"
    with torch.serialization.skip_data():
        torch.save(value, path)
    found = read_archive(path).value
    assert [(ref.dtype, ref.shape) for ref in found] == [
        ("U8", (5 * GIB,)), ("F32", (3,)), ("F32", (0,)), ("I8", (4 * GIB + 1,)),
    ]  # fmt: skip
    with zipfile.ZipFile(path) as archive:
        for number, ref in enumerate(found):
            info = archive.getinfo(f"big/data/{number}")
            with open(path, "rb") as file:
                file.seek(info.header_offset + 26)
                name, extra = file.read(2), file.read(2)
            begin = info.header_offset + 30 + int.from_bytes(name, "little") + int.from_bytes(extra, "little")
            assert ref.offset == begin and info.file_size == ref.nbytes
