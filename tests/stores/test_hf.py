"""What is read from a checkpoint folder, what is left, and what is refused."""

import json
import math
import os
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from convtools.errors import CheckpointError, UnsupportedEncoding
from convtools.layout.region import Region
from convtools.stores.base import Blob
from convtools.stores.hf import is_hf, open_hf

FIXTURES = Path(__file__).parents[2] / "fixtures" / "oracle"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def write(root: Path, files: dict[str, dict[str, torch.Tensor] | object]) -> Path:
    """A folder of files: dicts of tensors as safetensors, text and bytes as they are, else JSON."""
    for name, content in {"config.json": {"model_type": "tiny"}, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".safetensors") and isinstance(content, dict):
            safetensors.torch.save_file(content, path, {"format": "pt"})
        elif isinstance(content, bytes | str):
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        else:
            path.write_text(json.dumps(content))
    return root


def t(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape or (2,), float(value))


def index(**weight_map: str) -> dict[str, object]:
    return {"metadata": {"total_size": 8}, "weight_map": weight_map}


def refusal(root: Path, kind: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        open_hf(root)
    return str(caught.value)


def value(root: Path, name: str) -> float:
    """First element of an F32 tensor, read through its blob."""
    (blob,) = open_hf(root).tensors[name].blobs
    return torch.frombuffer(bytearray(blob.path.read_bytes()[blob.offset :][:4]), dtype=torch.float32).item()


@pytest.mark.parametrize(
    "root", sorted(p.parent for p in FIXTURES.glob("*/hf/model.safetensors")), ids=lambda p: p.parent.name
)
def test_real_checkpoints_byte_for_byte(root: Path) -> None:
    assert is_hf(root)
    found = open_hf(root)
    known = safetensors.torch.load_file(root / "model.safetensors")
    assert found.tensors.keys() == known.keys() != set()
    content = (root / "model.safetensors").read_bytes()
    for name, tensor in found.tensors.items():
        (blob,) = tensor.blobs
        assert tensor.shape == tuple(known[name].shape)
        assert blob.region == Region.whole(tensor.shape)
        expected = known[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert content[blob.offset : blob.offset + tensor.nbytes] == expected
    assert found.weight_files == ("model.safetensors",)
    assert found.side_files == ("config_transformers.json",)
    assert (found.index_file, found.unread_files, found.stray_tensors) == (None, (), ())
    assert found.config_bytes == (root / "config.json").read_bytes()
    assert root.parent.name.startswith(found.config["model_type"].split("_")[0][:5])


def test_infinity_in_the_config_is_a_number(tmp_path: Path) -> None:
    config = b'{"time_step_limit": [0.0, Infinity], "low": -Infinity, "odd": NaN, "big": 1e999}'
    found = open_hf(write(tmp_path, {"config.json": config, "model.safetensors": {"w": t(1)}}))
    assert found.config["time_step_limit"] == [0.0, math.inf]
    assert found.config["low"] == -math.inf
    assert math.isnan(found.config["odd"])
    assert found.config_bytes == config


def test_shards_are_read_as_the_index_says(tmp_path: Path) -> None:
    root = write(tmp_path, {FIRST: {"a": t(1)}, SECOND: {"b": t(2, 2, 3)}, INDEX: index(b=SECOND, a=FIRST)})
    found = open_hf(root)
    assert found.weight_files == (FIRST, SECOND)
    assert found.index_file == INDEX
    assert list(found.tensors) == ["a", "b"]
    b = found.tensors["b"]
    assert (b.dtype, b.shape, b.nbytes) == ("F32", (2, 3), 24)
    assert [(blob.path, blob.region) for blob in b.blobs] == [(root / SECOND, Region((0, 0), (2, 3)))]
    assert (value(root, "a"), value(root, "b")) == (1, 2)


def test_b31_all_three_kinds_of_ghost_entries_are_listed_at_once(tmp_path: Path) -> None:
    third = "model-00003-of-00003.safetensors"
    weight_map = {"a": FIRST, "mtp.fc.weight": FIRST, "b": FIRST, "c": third, "d": third}
    files = {FIRST: {"a": t(1)}, SECOND: {"b": t(2), "e": t(3)}, INDEX: index(**weight_map, e=SECOND)}
    said = refusal(write(tmp_path, files))
    assert "3 problems" in said
    assert f"the index names and that are missing (1): `{third}` (not there; it should hold `c`, `d`)" in said
    assert f"tensors of the index that no shard holds (1): `mtp.fc.weight` (index: `{FIRST}`)" in said
    assert f"lie in another shard (1): `b` (index: `{FIRST}`; lies in `{SECOND}`)" in said


def test_b31_the_lists_are_capped(tmp_path: Path) -> None:
    ghosts = {f"ghost.{i}": FIRST for i in range(1000)}
    root = write(tmp_path, {FIRST: {"a": t(1)}, INDEX: index(a=FIRST, **ghosts)})
    said = refusal(root)
    assert "tensors of the index that no shard holds (1000)" in said
    assert "... and 992 more" in said
    assert len(said) < 2000


def test_b31_a_dangling_link_is_a_missing_file(tmp_path: Path) -> None:
    root = write(tmp_path, {FIRST: {"a": t(1)}, INDEX: index(a=FIRST, b=SECOND)})
    (root / SECOND).symlink_to("../../blobs/gone")
    assert f"`{SECOND}` (a broken link; it should hold `b`)" in refusal(root)


def test_b36_the_index_is_an_allow_list_in_reused_shards(tmp_path: Path) -> None:
    stale = {"a": t(1), "b": t(-1), "old": t(-2)}
    root = write(tmp_path, {FIRST: stale, SECOND: {"b": t(2), "a": t(-3)}, INDEX: index(a=FIRST, b=SECOND)})
    found = open_hf(root)
    assert set(found.tensors) == {"a", "b"}
    assert (value(root, "a"), value(root, "b")) == (1, 2)
    assert set(found.stray_tensors) == {("b", FIRST), ("old", FIRST), ("a", SECOND)}


def test_b37_other_sets_in_the_folder_are_named_and_neither_read_nor_carried(tmp_path: Path) -> None:
    other = "model-00001-of-00003.safetensors"
    root = write(
        tmp_path,
        {
            FIRST: {"a": t(1)},
            SECOND: {"b": t(2)},
            INDEX: index(a=FIRST, b=SECOND),
            other: {"a": t(-1)},
            "consolidated.safetensors": {"tok_embeddings.weight": t(-2)},
            "model.safetensors": {"a": t(-3)},
            "consolidated.safetensors.index.json": index(x="consolidated.safetensors"),
            "pytorch_model.bin": b"pickle",
            "pytorch_model.bin.index.json": {},
            "model.q4.gguf": b"GGUF",
            "original/consolidated.00.pth": b"pickle",
            "original/params.json": {},
            "tokenizer.json": {},
        },
    )
    found = open_hf(root)
    assert (value(root, "a"), value(root, "b")) == (1, 2)
    assert found.weight_files == (FIRST, SECOND)
    assert dict(found.unread_files) == {
        other: "the index does not name it",
        "consolidated.safetensors": "the index does not name it",
        "consolidated.safetensors.index.json": "another index",
        "model.safetensors": "the index does not name it "
        "(transformers reads this file first where both are there)",
        "pytorch_model.bin": "another format: only safetensors are read",
        "pytorch_model.bin.index.json": "another index",
        "model.q4.gguf": "another format: only safetensors are read",
        "original/consolidated.00.pth": "weights in a subfolder",
    }
    assert found.side_files == ("original/params.json", "tokenizer.json")


def test_b37_model_safetensors_beside_other_single_files(tmp_path: Path) -> None:
    files = {"model.safetensors": {"a": t(1)}, "consolidated.safetensors": {"b": t(2)}}
    found = open_hf(write(tmp_path, files))
    assert set(found.tensors) == {"a"}
    assert found.unread_files == (("consolidated.safetensors", "not part of `model.safetensors`"),)


@pytest.mark.parametrize(
    ("third", "rival"),
    [
        ("model.safetensors", "model.safetensors"),
        ("model-00001-of-00003.safetensors", "model-*-of-00003.safetensors"),
    ],
)
def test_b37_two_rival_sets_without_an_index_are_refused(tmp_path: Path, third: str, rival: str) -> None:
    said = refusal(write(tmp_path, {name: {"a": t(1)} for name in (FIRST, SECOND, third)}))
    assert "several sets of weights in one folder" in said
    assert f"`{rival}`" in said


def test_b37_an_index_of_other_files_beside_a_model_without_one_is_refused(tmp_path: Path) -> None:
    files = {
        "model.safetensors": {"a": t(1)},
        "consolidated.safetensors": {"b": t(2)},
        "consolidated.safetensors.index.json": index(b="consolidated.safetensors"),
    }
    assert "several sets of weights" in refusal(write(tmp_path, files))


def test_shards_without_their_index_are_refused_with_advice(tmp_path: Path) -> None:
    said = refusal(write(tmp_path, {FIRST: {"a": t(1)}, SECOND: {"b": t(2)}}))
    assert f"a set of shards without its index `{INDEX}`" in said
    assert "what to do: fetch the index again" in said


def test_an_index_of_another_name_is_followed_when_it_is_the_only_one(tmp_path: Path) -> None:
    name = "weights.safetensors.index.json"
    found = open_hf(write(tmp_path, {"w-1.safetensors": {"a": t(1)}, name: index(a="w-1.safetensors")}))
    assert (found.index_file, found.weight_files) == (name, ("w-1.safetensors",))
    assert found.unread_files == ()
    write(tmp_path, {"more.safetensors.index.json": index(a="w-1.safetensors")})
    assert "several sets of weights" in refusal(tmp_path)


def test_shards_may_lie_in_a_subfolder(tmp_path: Path) -> None:
    root = write(tmp_path, {"part/a.safetensors": {"a": t(5)}, INDEX: index(a="part/a.safetensors")})
    assert value(root, "a") == 5
    assert open_hf(root).side_files == ()


@pytest.mark.parametrize(
    "metadata", [{"total_size": 1}, {"total_size": "8"}, {}, None, {"total_parameters": -1}]
)
def test_b45_the_readers_sizes_come_from_headers_only(tmp_path: Path, metadata: object) -> None:
    files = {FIRST: {"a": t(1)}, INDEX: {"metadata": metadata, "weight_map": {"a": FIRST}}}
    assert open_hf(write(tmp_path, files)).tensors["a"].nbytes == 8
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": FIRST}}))
    assert open_hf(tmp_path).tensors["a"].nbytes == 8


def test_b40_a_tensor_named_twice_in_the_index_is_refused(tmp_path: Path) -> None:
    text = f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}"}}}}'
    said = refusal(write(tmp_path, {FIRST: {"a": t(1)}, SECOND: {"a": t(2)}, INDEX: text}))
    assert "the key `a` is there twice" in said


def test_b41_a_config_key_given_twice_is_refused(tmp_path: Path) -> None:
    config = '{"hidden_size": 8, "hidden_size": 16}'
    said = refusal(write(tmp_path, {"config.json": config, "model.safetensors": {"a": t(1)}}))
    assert "`config.json`: the key `hidden_size` is there twice" in said


def test_b43_empty_and_scalar_tensors_are_tensors(tmp_path: Path) -> None:
    root = write(tmp_path, {"model.safetensors": {"e": torch.zeros(0, 4), "s": torch.tensor(7.0), "w": t(1)}})
    found = open_hf(root).tensors
    assert (found["e"].shape, found["e"].nbytes) == ((0, 4), 0)
    assert (found["s"].shape, found["s"].nbytes) == ((), 4)
    assert found["s"].blobs == (Blob(root / "model.safetensors", found["s"].blobs[0].offset, Region((), ())),)
    assert value(root, "s") == 7


def test_b44_sub_byte_tensors_are_refused_by_name_and_listed_on_request(tmp_path: Path) -> None:
    table = {
        "w": {"dtype": "F4", "shape": [2, 4], "data_offsets": [0, 4]},
        "x": {"dtype": "U8", "shape": [1], "data_offsets": [4, 5]},
    }
    text = json.dumps(table).encode()
    root = write(tmp_path, {"model.safetensors": len(text).to_bytes(8, "little") + text + bytes(5)})
    assert "found: `w` (F4)" in refusal(root, UnsupportedEncoding)
    found = open_hf(root, list_sub_byte=True)
    assert (found.sub_byte["w"].dtype, found.sub_byte["w"].shape) == ("F4", (2, 4))
    assert set(found.tensors) == {"x"}


def test_a_hub_cache_of_links_is_read_and_carried(tmp_path: Path) -> None:
    root = tmp_path / "models--x" / "snapshots" / "abc"
    blobs = write(tmp_path / "models--x" / "blobs", {"1.safetensors": {"a": t(4)}, "tokenizer": "{}"})
    root.mkdir(parents=True)
    for name, target in (
        ("config.json", "config.json"),
        ("model.safetensors", "1.safetensors"),
        ("tokenizer.json", "tokenizer"),
    ):
        (root / name).symlink_to(os.path.relpath(blobs / target, root))
    assert is_hf(root)
    assert value(root, "a") == 4
    assert open_hf(root).side_files == ("tokenizer.json",)


def test_side_files_are_everything_else_at_any_depth(tmp_path: Path) -> None:
    carried = [
        ".gitattributes",
        "LICENSE",
        "assets/deep/figure.png",
        "chat_template.jinja",
        "generation_config.json",
        "modeling_tiny.py",
        "tokenizer.json",
    ]
    left = [".git/config", ".cache/huggingface/x", "assets/.cache/y"]
    root = write(tmp_path, {"model.safetensors": {"a": t(1)}, **dict.fromkeys(carried + left, "x")})
    found = open_hf(root)
    assert list(found.side_files) == carried
    assert found.unread_files == ()


def test_a_link_to_a_folder_is_named_and_not_followed(tmp_path: Path) -> None:
    root = write(tmp_path / "model", {"model.safetensors": {"a": t(1)}})
    (root / "up").symlink_to("..")
    found = open_hf(root)
    assert found.side_files == ()
    ((name, why),) = found.unread_files
    assert name == "up"
    assert "not followed" in why


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "neither `model.safetensors` nor `model.safetensors.index.json`"),
        ({"pytorch_model.bin": b"x"}, "found: `pytorch_model.bin`"),
        ({"config.json": "[1]", "model.safetensors": {"a": t(1)}}, "`config.json` is not a JSON object"),
        ({"config.json": '{"a": ', "model.safetensors": {"a": t(1)}}, "`config.json`: not valid JSON"),
        ({FIRST: {"a": t(1)}, INDEX: {"metadata": {}}}, "the index has no `weight_map`"),
        ({FIRST: {"a": t(1)}, INDEX: {"weight_map": {}}}, "the index has no `weight_map`"),
        ({FIRST: {"a": t(1)}, INDEX: {"weight_map": {"a": 1}}}, "`a` is assigned to `1`: not a file name"),
        ({FIRST: {"a": t(1)}, INDEX: {"weight_map": {"a": "x.bin"}}}, "`x.bin`: not a safetensors file"),
    ],
)
def test_what_is_no_checkpoint_is_said(tmp_path: Path, files: dict[str, object], said: str) -> None:
    assert said in refusal(write(tmp_path, files))


def test_a_folder_without_config_says_what_it_is(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "nowhere")
    assert "no `config.json` in the folder" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "a PEFT (LoRA) adapter, not a model" in refusal(tmp_path, UnsupportedEncoding)
    write(tmp_path, {"a.Q4_K.gguf": b"GGUF"})
    assert "GGUF weights are not read" in refusal(tmp_path, UnsupportedEncoding)


def test_is_hf_goes_by_names(tmp_path: Path) -> None:
    assert not is_hf(tmp_path / "nowhere")
    assert not is_hf(tmp_path)
    write(tmp_path, {})
    assert not is_hf(tmp_path)
    assert is_hf(write(tmp_path, {INDEX: {}}))
    assert not is_hf(tmp_path / "config.json")
