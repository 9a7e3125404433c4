"""Checkpoint folders made to mislead, to escape or to hang: each a clear error, at once."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from convtools.errors import CheckpointError
from convtools.stores.hf import is_hf, open_hf
from convtools.stores.safetensors_header import encode_header

ONE = encode_header([("a", "F32", (2,))]) + bytes(8)
SHARD = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """A reader that waits (a pipe, say) fails instead of hanging."""

    def late(*_: object) -> None:
        raise TimeoutError("took over 20 seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that lacks nothing but its weights; beside it, a file to escape to."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (tmp_path / "outside.safetensors").write_bytes(ONE)
    return made


def refusal(root: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_hf(root)
    said = str(caught.value)
    assert len(said) < 3000 + 4 * len(str(root))
    return said


def indexed(root: Path, file: object) -> Path:
    (root / SHARD).write_bytes(ONE)
    (root / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    return root


@pytest.mark.parametrize(
    "file",
    ["../outside.safetensors", "x/../../outside.safetensors", "/etc/passwd.safetensors", "..", ".", "", "/",
     "./" + SHARD, "x//" + SHARD, "..\\outside.safetensors", "C:\\x.safetensors", "x\\y.safetensors",
     "a\0.safetensors", "a\n.safetensors", "\ud800.safetensors", "x" * 5000 + ".safetensors",
     None, 1, True, ["a"], {"a": "b"}],
)  # fmt: skip
def test_an_index_may_name_files_of_the_folder_only(root: Path, file: object) -> None:
    said = refusal(indexed(root, file))
    assert "`a` is assigned to" in said
    assert "no part of" in said


def test_escapes_are_all_listed_and_capped(root: Path) -> None:
    (root / INDEX).write_text(
        json.dumps({"weight_map": {f"t{i}": f"../{i}.safetensors" for i in range(900)}})
    )
    said = refusal(root)
    assert "900 problems" in said
    assert "`t19` is assigned to `../19.safetensors`" in said
    assert "... and 880 more" in said


def test_an_absolute_path_to_real_weights_is_not_followed(root: Path) -> None:
    outside = root.parent / "outside.safetensors"
    assert "leaves the folder" in refusal(indexed(root, str(outside)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
        (b"\xff\xfe{}", "is not UTF-8"),
        (b"{}", "no `weight_map`"),
        (b'{"weight_map": []}', "no `weight_map`"),
        (b'{"weight_map": "x"}', "no `weight_map`"),
        (b'{"metadata": {"total_size": NaN}, "weight_map": {}}', "NaN is not a number of JSON"),
        (b'{"metadata": {"total_size": ' + b"9" * 9999 + b"}}", "a number of thousands of digits"),
        (b'{"weight_map": {}, "weight_map": {}}', "the key `weight_map` is there twice"),
        (b'{"metadata": ' + b"[" * 1_000_000, "nested too deeply"),
        (b'{"weight_map": ' + b'{"a": ' * 300_000, "nested too deeply"),
    ],
)
def test_an_index_that_is_no_index_is_refused(root: Path, text: bytes, said: str) -> None:
    (root / SHARD).write_bytes(ONE)
    (root / INDEX).write_bytes(text)
    assert said in refusal(root)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "not valid JSON"),
        (b'"x"', "is not a JSON object"),
        (b"\xff", "is not UTF-8"),
        (b'{"a": ' + b"[" * 1_000_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number of thousands of digits"),
    ],
)
def test_a_config_that_is_none_is_refused(root: Path, text: bytes, said: str) -> None:
    (root / "model.safetensors").write_bytes(ONE)
    (root / "config.json").write_bytes(text)
    assert said in refusal(root)


@pytest.mark.parametrize(("name", "size"), [("config.json", 50_000_001), (INDEX, 200_000_001)])
def test_json_files_are_bounded_before_they_are_read(root: Path, name: str, size: int) -> None:
    (root / "model.safetensors").write_bytes(ONE)
    (root / name).touch()
    os.truncate(root / name, size)  # sparse: takes no room on disk
    said = refusal(root)
    assert f"`{name}` is too large" in said
    assert f"found: {size}" in said


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX])
@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "dangling", "device"])
def test_a_file_that_is_none_is_refused_without_waiting(root: Path, name: str, kind: str) -> None:
    if name != INDEX:
        (root / "model.safetensors").write_bytes(ONE)
    path = root / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"loop": name, "dangling": "gone", "device": "/dev/zero"}[kind])
    assert is_hf(root)
    said = refusal(root)
    assert f"`{name}` is not a file" in said or f"cannot open `{name}`" in said
    assert f"where: {path}" in said


@pytest.mark.parametrize(
    ("kind", "said"), [("pipe", "not a file"), ("folder", "not a file"), ("loop", "Too many levels")]
)
def test_a_shard_that_is_no_file_is_listed_as_missing(root: Path, kind: str, said: str) -> None:
    indexed(root, SHARD)
    (root / SHARD).unlink()
    if kind == "pipe":
        os.mkfifo(root / SHARD)
    elif kind == "folder":
        (root / SHARD).mkdir()
    else:
        (root / SHARD).symlink_to(SHARD)
    found = refusal(root)
    assert f"missing (1): `{SHARD}` ({said}" in found
    assert "it should hold `a`" in found


def test_a_damaged_shard_is_named_with_its_place(root: Path) -> None:
    indexed(root, SHARD)
    (root / SHARD).write_bytes(ONE[:-1])
    said = refusal(root)
    assert "tensor `a`: its data_offsets lie outside the file's data" in said
    assert str(root / SHARD) in said


@pytest.mark.parametrize("kind", ["pipe", "loop", "dangling", "device"])
def test_side_files_that_cannot_be_copied_are_refused(root: Path, kind: str) -> None:
    (root / "model.safetensors").write_bytes(ONE)
    path = root / "tokenizer.json"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"loop": "tokenizer.json", "dangling": "gone", "device": "/dev/zero"}[kind])
    said = refusal(root)
    assert "the folder holds files that cannot be copied" in said
    assert "`tokenizer.json`: " in said


def test_a_side_file_whose_name_is_no_text_is_refused(root: Path) -> None:
    (root / "model.safetensors").write_bytes(ONE)
    Path(os.fsdecode(os.fsencode(root) + b"/\xff.txt")).touch()
    said = refusal(root)
    assert "its name is not valid UTF-8" in said
    said.encode()


def test_weights_that_are_not_read_may_be_anything(root: Path) -> None:
    (root / "model.safetensors").write_bytes(ONE)
    os.mkfifo(root / "consolidated.safetensors")
    (root / "pytorch_model.bin").symlink_to("gone")
    found = open_hf(root)
    assert dict(found.unread_files) == {
        "consolidated.safetensors": "not a file",
        "pytorch_model.bin": "a broken link",
    }


def test_folders_that_lead_in_circles_or_away_are_not_followed(root: Path) -> None:
    (root / "model.safetensors").write_bytes(ONE)
    (root / "self").symlink_to(".")
    (root / "sub").mkdir()
    (root / "sub" / "up").symlink_to("..")
    (root / "system").symlink_to("/")
    found = open_hf(root)
    assert [name for name, _ in found.unread_files] == ["self", "sub/up", "system"]
    assert found.side_files == ()


def test_a_root_that_is_a_file_or_a_loop_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name, why in (("file", "Not a directory"), ("loop", "Too many levels"), ("gone", "No such file")):
        assert why in refusal(tmp_path / name)
        assert not is_hf(tmp_path / name)
