"""Planned files, filled with bytes, are what the format's own library reads."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st

from convtools.errors import AccountingError, UnsupportedEncoding, UsageError
from convtools.layout.region import Region
from convtools.stores.base import DTYPE_NBYTES, FROM_TORCH, Payload
from convtools.stores.hf import open_hf
from convtools.stores.hf_write import INDEX_NAME, HFPlan, parse_size, plan_hf

Tensor = tuple[str, str, tuple[int, ...]]


def listed(tensors: dict[str, torch.Tensor]) -> list[Tensor]:
    return [(n, FROM_TORCH[str(t.dtype).removeprefix("torch.")], tuple(t.shape)) for n, t in tensors.items()]


def write(root: Path, plan: HFPlan, content: dict[str, bytes]) -> None:
    """Carry out a plan the plain way: every part in order."""
    for file in plan.files:
        parts = (part if isinstance(part, bytes) else content[part.name] for part in file.parts)
        (root / file.path).write_bytes(b"".join(parts))
        assert (root / file.path).stat().st_size == file.nbytes
    if plan.index is not None:
        (root / INDEX_NAME).write_bytes(plan.index)
    (root / "config.json").write_text("{}")


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def placed(plan: HFPlan) -> dict[str, str]:
    return {part.name: f.path for f in plan.files for part in f.parts if isinstance(part, Payload)}


MODEL = {
    "embed": torch.arange(12.0).reshape(6, 2).bfloat16(),
    "odd": torch.arange(3).bfloat16(),
    "bias": torch.tensor([1.0009765]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "flat": torch.zeros(0, 4),
    "mask": torch.tensor([True, False, True]),
    "head": torch.arange(20).reshape(4, 5).half(),
}


def test_one_file_is_model_safetensors_without_an_index(tmp_path: Path) -> None:
    plan = plan_hf(listed(MODEL))
    assert [file.path for file in plan.files] == ["model.safetensors"]
    assert plan.index is None
    write(tmp_path, plan, {name: as_bytes(t) for name, t in MODEL.items()})
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == MODEL.keys()
    for name, tensor in MODEL.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(loaded[name], tensor)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_every_tensor_is_aligned_for_readers_that_map_the_file(tmp_path: Path) -> None:
    write(tmp_path, plan_hf(listed(MODEL)), {name: as_bytes(t) for name, t in MODEL.items()})
    for tensor in open_hf(tmp_path).tensors.values():
        assert tensor.blobs[0].offset % DTYPE_NBYTES[tensor.dtype] == 0


def test_shards_follow_the_given_order_and_the_index_is_golden() -> None:
    plan = plan_hf([("z", "BF16", (4,)), ("a", "BF16", (2,)), ("m.w", "F32", (3,))], max_shard_size=12)
    assert [file.path for file in plan.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert [part.name for part in plan.files[0].parts if isinstance(part, Payload)] == ["z", "a"]
    assert plan.files[1].parts[1] == Payload("m.w", Region((0,), (3,)), "F32")
    assert plan.index == (
        b'{\n  "metadata": {\n    "total_size": 24\n  },\n  "weight_map": {\n'
        b'    "a": "model-00001-of-00002.safetensors",\n'
        b'    "m.w": "model-00002-of-00002.safetensors",\n'
        b'    "z": "model-00001-of-00002.safetensors"\n  }\n}\n'
    )


def test_a_tensor_over_the_limit_has_a_shard_to_itself() -> None:
    plan = plan_hf([("a", "U8", (3,)), ("big", "U8", (50,)), ("b", "U8", (3,)), ("c", "U8", (8,))], 10)
    assert placed(plan) == {
        "a": "model-00001-of-00004.safetensors",
        "big": "model-00002-of-00004.safetensors",
        "b": "model-00003-of-00004.safetensors",
        "c": "model-00004-of-00004.safetensors",
    }


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=9).filter(lambda n: n != "__metadata__")
dtypes = st.sampled_from(["U8", "BF16", "F32", "F64"])
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.lists(
    st.tuples(names, dtypes, shapes), min_size=1, max_size=15, unique_by=lambda tensor: tensor[0]
)


@settings(max_examples=150, deadline=None)
@given(tensors=tensors, limit=st.integers(1, 300))
def test_every_tensor_is_planned_once_and_no_shard_is_too_large(tensors: list[Tensor], limit: int) -> None:
    plan = plan_hf(tensors, limit)
    payloads = [[p for p in f.parts if isinstance(p, Payload)] for f in plan.files]
    flat = [(p.name, p.dtype, p.region.sizes) for shard in payloads for p in shard]
    assert sorted(flat) == sorted(tensors)
    order = {name: i for i, (name, _, _) in enumerate(tensors)}
    ranges = [sorted(order[p.name] for p in shard) for shard in payloads]
    assert [i for shard in ranges for i in shard] == list(range(len(tensors)))
    total = 0
    for shard in payloads:
        sizes = [p.nbytes for p in shard]
        total += sum(sizes)
        assert sum(sizes) <= limit or sum(sizes) == max(sizes)
    assert total == sum(math.prod(shape) * DTYPE_NBYTES[dtype] for _, dtype, shape in tensors)
    if plan.index is None:
        assert len(plan.files) == 1
    else:
        index = json.loads(plan.index)
        assert index == {"metadata": {"total_size": total}, "weight_map": placed(plan)}
        assert list(index["weight_map"]) == sorted(index["weight_map"])


def test_b30_shards_are_planned_from_what_is_produced_and_none_is_lost(tmp_path: Path) -> None:
    source = {
        "model.embed_tokens.weight": 1, "mtp.enorm.weight": 1, "model.layers.0.w": 2, "model.layers.1.w": 2,
        "model.layers.2.w": 3, "lm_head.weight": 3, "mtp.head.weight": 3,
    }  # fmt: skip
    kept = {n: torch.full((2, 3), float(i)) for i, n in enumerate(source) if not n.startswith("mtp.")}
    plan = plan_hf(listed(kept), max_shard_size=48)
    write(tmp_path, plan, {name: as_bytes(t) for name, t in kept.items()})
    found = open_hf(tmp_path)
    assert found.tensors.keys() == kept.keys()
    assert (found.stray_tensors, found.unread_files) == ((), ())
    assert len(found.weight_files) == 3
    for file in found.weight_files:
        for name, tensor in safetensors.torch.load_file(tmp_path / file).items():
            assert torch.equal(tensor, kept[name])


def test_b31_the_index_names_just_what_the_headers_hold(tmp_path: Path) -> None:
    plan = plan_hf(listed(MODEL), max_shard_size=30)
    assert plan.index is not None
    held = {name: f.path for f in plan.files for name in json.loads(bytes_of(f.parts[0])[8:])}
    held.pop("__metadata__")
    assert json.loads(plan.index)["weight_map"] == held
    assert held.keys() == MODEL.keys()


def bytes_of(part: bytes | Payload) -> bytes:
    assert isinstance(part, bytes)
    return part


def test_b40_b11_two_names_for_one_tensor_are_both_written_in_full() -> None:
    (file,) = plan_hf([("embed", "F32", (2,)), ("lm_head", "F32", (2,))]).files
    table = json.loads(bytes_of(file.parts[0])[8:])
    assert [table[n]["data_offsets"] for n in ("embed", "lm_head")] == [[0, 8], [8, 16]]
    with pytest.raises(AccountingError, match="would be written twice: `a`, `b`"):
        plan_hf([("a", "U8", (9,)), ("b", "U8", (9,)), ("a", "U8", (1,)), ("b", "U8", (1,))], 9)


def test_b41_the_reserved_name_is_refused_and_the_format_always_said() -> None:
    with pytest.raises(UsageError, match="`__metadata__` is reserved"):
        plan_hf([("__metadata__", "F32", (2,))])
    for file in plan_hf([("a", "U8", (9,)), ("b", "U8", (9,))], 9).files:
        assert json.loads(bytes_of(file.parts[0])[8:])["__metadata__"] == {"format": "pt"}


@pytest.mark.parametrize("limit", [1, 10**9])
def test_b43_empty_and_scalar_tensors_are_written_as_they_are(tmp_path: Path, limit: int) -> None:
    arrays = {
        "e": np.zeros(0, "f4"), "flat": np.zeros((0, 4), "f8"), "s": np.array(3.5, "f4"),
        "w": np.ones((1, 2), "f4"),
    }  # fmt: skip
    shapes = [(n, "F64" if a.dtype == "f8" else "F32", a.shape) for n, a in arrays.items()]
    plan = plan_hf(shapes, limit)
    write(tmp_path, plan, {name: a.tobytes() for name, a in arrays.items()})
    loaded = {n: a for f in plan.files for n, a in safetensors.numpy.load_file(tmp_path / f.path).items()}
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (loaded[name].shape, loaded[name].dtype) == (array.shape, array.dtype)
        assert np.array_equal(loaded[name], array)
    if plan.index is not None:
        assert json.loads(plan.index)["metadata"]["total_size"] == 12


def test_b44_one_byte_floats_are_written_and_sub_byte_ones_refused(tmp_path: Path) -> None:
    scales = torch.arange(6, dtype=torch.uint8)
    plan = plan_hf([("s", "F8_E8M0", (2, 3)), ("w", "F8_E4M3", (6,))])
    write(tmp_path, plan, {"s": as_bytes(scales), "w": as_bytes(scales)})
    loaded = dict(safetensors.deserialize((tmp_path / "model.safetensors").read_bytes()))
    assert (loaded["s"]["dtype"], loaded["s"]["shape"]) == ("F8_E8M0", [2, 3])
    assert bytes(loaded["s"]["data"]) == as_bytes(scales)
    with pytest.raises(UnsupportedEncoding, match="`w` has the sub-byte dtype F4"):
        plan_hf([("w", "F4", (2,))])
    with pytest.raises(UsageError, match=r"`w` has the dtype `torch\.float32`"):
        plan_hf([("w", "torch.float32", (2,))])


def test_b45_total_size_is_the_bytes_of_the_tensors_not_of_the_files() -> None:
    plan = plan_hf([("a", "F32", (5,)), ("none", "F32", (0, 7)), ("s", "F64", ()), ("b", "U8", (9,))], 20)
    assert plan.index is not None
    index = json.loads(plan.index)
    assert index["metadata"] == {"total_size": 20 + 0 + 8 + 9}
    assert sum(file.nbytes for file in plan.files) > 37


@pytest.mark.parametrize("limit", [0, -1, True, 5e9])
def test_a_limit_that_is_none_is_refused(limit: object) -> None:
    with pytest.raises(UsageError, match="max_shard_size"):
        plan_hf([("a", "F32", (5,))], limit)  # type: ignore[arg-type]


def test_nothing_to_write_is_refused() -> None:
    with pytest.raises(UsageError, match="no tensors to write"):
        plan_hf([])


def test_a_name_given_twice_in_other_shards_is_refused() -> None:
    with pytest.raises(AccountingError, match="would be written twice: `a`"):
        plan_hf([("a", "U8", (9,)), ("b", "U8", (9,)), ("a", "U8", (9,))], 9)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9), ("5GiB", 5 * 2**30), ("500MB", 500 * 10**6), ("64KiB", 65536), ("1TB", 10**12),
        ("2TiB", 2**41), ("3kB", 3000), ("10MIB", 10 * 2**20), (" 5 GB ", 5 * 10**9),
        ("1.5GB", 1_500_000_000), ("0.1GB", 10**8), ("12B", 12), ("12", 12), (12, 12), ("2.5KiB", 2560),
    ],
)  # fmt: skip
def test_sizes_mean_what_huggingface_means(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


NO_SIZES: list[object] = [
    "", "GB", "-5GB", "5 G", "5XB", "5GBs", "1e9", "nan", "inf", "0", "0.0001B", "\u0665GB", "5,0GB",
    "9" * 5000, 0, -1, True, None, 5.0, 10**5000,
]  # fmt: skip


@pytest.mark.parametrize("text", NO_SIZES, ids=range(len(NO_SIZES)))
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["5Gb", "5gb", "5Gib", "5b"])
def test_a_lower_case_b_is_refused_as_ambiguous(text: str) -> None:
    with pytest.raises(UsageError, match="bits or bytes"):
        parse_size(text)
