"""`verify`: every kind of damage is found, and the tensor named."""

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings, strategies as st

from convtools.errors import CheckpointError, ConvtoolsError, UsageError
from convtools.manifest import MANIFEST_NAME
from convtools.slicing.verification import Verification, verify_slice
from tests.commands import SMALL, refused, run
from tests.convert.small import filled, write_safetensors, write_small_hf
from tests.nemotron_checkpoints import inventory
from tests.slicing.cutting import cut
from tests.tensors import Content, read_safetensors

HYBRID: dict[str, Any] = SMALL | {"hybrid_override_pattern": "MEM*E-", "num_hidden_layers": 6}
WEIGHTS = "model.safetensors"


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return write_small_hf(tmp_path / "src", HYBRID, filled(inventory(HYBRID)))


@pytest.fixture
def whole(src: Path, tmp_path: Path) -> Path:
    cut(src, tmp_path / "slice")
    return tmp_path / "slice"


def rewritten(root: Path, change: Any) -> Content:
    content = read_safetensors(root / WEIGHTS)
    change(content)
    write_safetensors(root / WEIGHTS, content)
    return content


def faults(found: Verification) -> dict[str, str]:
    return {fault.tensor: fault.what for fault in found.faults}


def test_a_whole_one(whole: Path, src: Path) -> None:
    for source in (None, str(src)):
        found = verify_slice(whole, source)
        assert found.whole and found.faults == () and found.source == source
        assert found.tensors == len(read_safetensors(whole / WEIGHTS))
        assert found.nbytes == sum(len(data) for _, _, data in read_safetensors(whole / WEIGHTS).values())


def where(root: Path, at: int) -> str:
    """The tensor that byte `at` of the data is of."""
    raw = (root / WEIGHTS).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__", None)
    return next(n for n, entry in header.items() if entry["data_offsets"][0] <= at < entry["data_offsets"][1])


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("one")
    src = write_small_hf(room / "src", HYBRID, filled(inventory(HYBRID)))
    cut(src, room / "slice")
    return room / "slice"


@settings(max_examples=60)
@given(data=st.data())
def test_any_bit_that_flips_is_found_and_named(one: Path, data: st.DataObject) -> None:
    path = one / WEIGHTS
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    bit = data.draw(st.integers(0, 8 * (len(raw) - begin) - 1))
    at = begin + bit // 8
    try:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([raw[at] ^ 1 << bit % 8]))
        name = where(one, at - begin)
        for source in (None, str(one.with_name("src"))):
            assert faults(verify_slice(one, source)).keys() == {name}
    finally:
        path.write_bytes(raw)


@settings(max_examples=60)
@given(data=st.data())
def test_any_byte_of_a_header_that_changes_is_found(one: Path, data: st.DataObject) -> None:
    path = one / WEIGHTS
    raw = path.read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    text = raw[:size].decode()
    at = data.draw(st.integers(0, size - 1))
    other = data.draw(st.sampled_from(sorted(set('0123456789abcx{}"[],') - {text[at]})))
    in_metadata = text[8:size].find("__metadata__") <= at - 8 < text[8:size].find("}") + 1
    try:
        path.write_bytes(raw[:at] + other.encode() + raw[at + 1 :])
        try:
            found = verify_slice(one)
        except ConvtoolsError:
            return
        assert not found.whole or in_metadata or text[at] == " ", (at, text[at - 20 : at + 20], other)
    finally:
        path.write_bytes(raw)


def test_two_tensors_that_are_swapped(whole: Path, src: Path) -> None:
    def swap(content: Content) -> None:
        a, b = (f"backbone.layers.1.mixer.experts.{i}.up_proj.weight" for i in (0, 1))
        content[a], content[b] = content[b], content[a]

    rewritten(whole, swap)
    for source in (None, str(src)):
        named = faults(verify_slice(whole, source))
        assert set(named) == {f"backbone.layers.1.mixer.experts.{i}.up_proj.weight" for i in (0, 1)}


def test_missing_left_over_and_of_another_form(whole: Path) -> None:
    def change(content: Content) -> None:
        del content["backbone.norm_f.weight"]
        content["extra.weight"] = ("BF16", (2,), bytes(4))
        dtype, shape, data = content["backbone.layers.0.norm.weight"]
        content["backbone.layers.0.norm.weight"] = ("F16", shape, data)
        dtype, shape, data = content["lm_head.weight"]
        content["lm_head.weight"] = (dtype, shape[::-1], data)

    rewritten(whole, change)
    assert faults(verify_slice(whole)) == {
        "backbone.norm_f.weight": "missing: the manifest has it",
        "extra.weight": "not in the manifest",
        "backbone.layers.0.norm.weight": "is F16 [16], expected BF16 [16]",
        "lm_head.weight": "is BF16 [16, 256], expected BF16 [256, 16]",
    }


@pytest.mark.parametrize("layers", [4, 6])
def test_a_config_that_says_one_layer_too_many_or_too_few(whole: Path, layers: int) -> None:
    config = json.loads((whole / "config.json").read_text())
    assert config["num_hidden_layers"] == 5
    pattern = (config["hybrid_override_pattern"] + "E")[:layers]
    (whole / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": layers, "hybrid_override_pattern": pattern})
    )
    assert faults(verify_slice(whole)).keys() == {"config.json"}
    without_config(whole)
    with pytest.raises(
        ConvtoolsError, match=r"layers without any tensor: 5|that the config does not have: 4"
    ):
        verify_slice(whole)
    (whole / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    with pytest.raises(ConvtoolsError, match="contradicts itself"):
        verify_slice(whole)


def test_a_truncated_shard_and_a_missing_one(src: Path, tmp_path: Path) -> None:
    root = tmp_path / "slice"
    cut(src, root, max_shard_size="10KB")
    shard = sorted(root.glob("model-*.safetensors"))[1]
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1])
    with pytest.raises(CheckpointError, match=shard.name):
        verify_slice(root)
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        verify_slice(root)
    shard.write_bytes(raw)
    assert verify_slice(root).whole


def test_a_slice_of_another_model(whole: Path, tmp_path: Path) -> None:
    """The manifest alone cannot know; the source can."""
    content = filled(inventory(HYBRID), seed=1)
    other = write_small_hf(tmp_path / "other", HYBRID, content)
    found = verify_slice(whole, str(other))
    assert set(faults(found)) == set(read_safetensors(whole / WEIGHTS))
    assert (
        "its bytes are not those of the source's `backbone.layers.3.mixer.q_proj.weight`"
        in faults(found).values()
    )
    del content["lm_head.weight"]
    content["backbone.norm_f.weight"] = ("F32", (16,), bytes(64))
    fewer = write_small_hf(tmp_path / "fewer", HYBRID | {"tie_word_embeddings": True}, content)
    named = faults(verify_slice(whole, str(fewer)))
    assert named["lm_head.weight"] == "the source has no `lm_head.weight`"
    assert named["backbone.norm_f.weight"] == "the source's `backbone.norm_f.weight` is F32 [16]"


def test_the_first_rows_are_compared_with_the_source(src: Path, tmp_path: Path) -> None:
    cut(src, tmp_path / "few", experts=2)
    assert verify_slice(tmp_path / "few", str(src)).whole


def manifest(root: Path) -> dict[str, Any]:
    return dict(json.loads((root / MANIFEST_NAME).read_text()))


def without_config(root: Path) -> None:
    """The manifest as it was before it covered config.json."""
    found = manifest(root)
    del found["config"]
    (root / MANIFEST_NAME).write_text(json.dumps(found))


def test_a_changed_config_is_a_fault(whole: Path, src: Path) -> None:
    raw = (whole / "config.json").read_bytes()
    assert manifest(whole)["config"] == xxhash.xxh3_128(raw).hexdigest()
    (whole / "config.json").write_bytes(raw + b" ")
    want = (
        f"xxh3-128 is {xxhash.xxh3_128(raw + b' ').hexdigest()}, expected {xxhash.xxh3_128(raw).hexdigest()}"
    )
    for source in (None, str(src)):
        assert faults(verify_slice(whole, source)) == {"config.json": want}
    done = run("verify", whole)
    assert done.returncode == 1 and f"config.json: {want}\n1 fault: " in done.stdout
    without_config(whole)
    assert verify_slice(whole).whole and not verify_slice(whole).config_covered
    assert "(config.json not: the manifest has no hash)" in run("verify", whole).stdout


def test_a_damaged_tensor_counts_once(whole: Path, src: Path) -> None:
    def change(content: Content) -> None:
        dtype, shape, data = content["lm_head.weight"]
        content["lm_head.weight"] = (dtype, shape, bytes([data[0] ^ 1]) + data[1:])

    rewritten(whole, change)
    found = verify_slice(whole, str(src))
    assert [fault.tensor for fault in found.faults] == ["lm_head.weight"]
    assert "xxh3-128 is" in found.faults[0].what and "; its bytes are not those of" in found.faults[0].what


def test_a_manifest_without_a_hash_proves_nothing(whole: Path) -> None:
    found = manifest(whole)
    found["tensors"]["lm_head.weight"]["hashes"] = {}
    (whole / MANIFEST_NAME).write_text(json.dumps(found))
    assert faults(verify_slice(whole)).keys() == {"lm_head.weight"}


def test_exit_codes(whole: Path, src: Path, tmp_path: Path) -> None:
    done = run("verify", whole, "--source", src)
    assert done.returncode == 0 and done.stdout.startswith("whole: ") and str(src) in done.stdout
    report = json.loads(run("verify", whole, "--json").stdout)
    assert report["whole"] is True and report["faults"] == []
    path = whole / WEIGHTS
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    done = run("verify", whole)
    assert done.returncode == 1 and "\n1 fault: " in done.stdout and "xxh3-128 is" in done.stdout
    assert len(json.loads(run("verify", whole, "--json").stdout)["faults"]) == 1
    path.write_bytes(raw[:-1])
    refused(run("verify", whole), WEIGHTS, code=2)
    refused(run("verify", tmp_path / "nothing"), "is not a directory", code=2)
    refused(run("verify", src), f"no `{MANIFEST_NAME}`", code=2)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / MANIFEST_NAME).write_text("{")
    refused(run("verify", tmp_path / "bare"), MANIFEST_NAME, code=2)
    assert run("verify").returncode == 2
    path.write_bytes(raw)
    refused(
        run("verify", whole, "--source", tmp_path / "no such"), "neither a folder nor a repository", code=2
    )
    with pytest.raises(UsageError, match="is not a directory"):
        verify_slice(path)


def test_a_tensor_that_slice_and_manifest_both_lack_is_missed(whole: Path) -> None:
    """Only the config knows of it then."""
    name = "backbone.layers.0.norm.weight"
    rewritten(whole, lambda content: content.pop(name))
    said = manifest(whole)
    del said["tensors"][name]
    (whole / MANIFEST_NAME).write_text(json.dumps(said))
    assert faults(verify_slice(whole)) == {name: "missing: the config asks for it"}
