"""Slices and checks of slices that once lied, leaked or broke; each stays found."""

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from convtools.errors import AccountingError, CheckpointError, UsageError
from convtools.manifest import MANIFEST_NAME, XXH3, decode, encode
from convtools.slicing import build
from convtools.slicing.publish import publish
from convtools.slicing.verification import is_its_place, verify_slice
from convtools.stores.hub import open_hub
from convtools.stores.hub_http import Patience
from tests.commands import refused, run
from tests.convert.small import write_safetensors
from tests.hub_server import Fault, Hub, point_at, serving
from tests.slicing.cutting import cut
from tests.tensors import Content, read_safetensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG = {"model_type": "x", "num_hidden_layers": 2}

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub


def tensors() -> Content:
    """Two layers of two matrices of one shape, and what is outside of them."""
    out: Content = {"embed.weight": ("F32", (4, 2), bytes(range(32))), "scale": ("F32", (), b"abcd")}
    for i, name in enumerate(f"layers.{n}.{part}" for n in range(2) for part in ("q", "k")):
        out[name] = ("F32", (2, 2), bytes(range(100 + 16 * i, 116 + 16 * i)))
    return out


@pytest.fixture
def src(tmp_path: Path) -> Path:
    root = tmp_path / "src"
    root.mkdir()
    write_safetensors(root / WEIGHTS, tensors())
    (root / "config.json").write_text(json.dumps(CONFIG))
    return root


@pytest.fixture
def cut_one(src: Path, tmp_path: Path) -> Path:
    cut(src, tmp_path / "slice", layers="1")
    return tmp_path / "slice"


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    point_at(server, monkeypatch, tmp_path / "cache")
    return server


def lie(root: Path, tensor: str, data: bytes, shape: tuple[int, ...] = (2, 2), **says: Any) -> None:
    """Put `data` in the place of a tensor, with a manifest that says so."""
    content = read_safetensors(root / WEIGHTS)
    content[tensor] = ("F32", shape, data)
    write_safetensors(root / WEIGHTS, content)
    path = root / MANIFEST_NAME
    old = decode(path.read_bytes())
    hashes = {XXH3: xxhash.xxh3_128(data).hexdigest()}
    new = msgspec.structs.replace(old.tensors[tensor], shape=shape, hashes=hashes, **says)
    path.write_bytes(encode(msgspec.structs.replace(old, tensors={**old.tensors, tensor: new})))


def faults(root: Path, source: Path) -> dict[str, str]:
    return {fault.tensor: fault.what for fault in verify_slice(root, str(source)).faults}


class TestManifestsThatLie:
    """The hashes fit, and the slice is not what it says of itself."""

    @pytest.mark.parametrize("of", ["layers.1.k", "layers.0.q", "embed.weight"])
    def test_another_tensor_or_layer_in_the_place(self, src: Path, cut_one: Path, of: str) -> None:
        lie(cut_one, "layers.0.q", tensors()[of][2][:16], source=of)
        assert "which is another tensor" in faults(cut_one, src)["layers.0.q"]

    def test_rows_that_the_source_does_not_have(self, src: Path, cut_one: Path) -> None:
        # what lies behind the tensor in the source's file would have been compared
        data = read_safetensors(src / WEIGHTS)
        behind = data["layers.1.q"][2] + data["layers.1.k"][2]
        lie(cut_one, "layers.0.q", behind, (4, 2), source_rows=4)
        lie(cut_one, "scale", b"abcdabcd", (2,), source_rows=2)
        found = faults(cut_one, src)
        assert found["layers.0.q"].endswith("is [2, 2]: it has no 4 rows")
        assert found["scale"].endswith("is []: it has no 2 rows")

    def test_what_may_be_what(self) -> None:
        layers = [3, 7]
        assert is_its_place("h.1.q", "h.7.q", layers, "h.") and is_its_place("wte", "wte", layers, "h.")
        assert is_its_place("h.2.q", "h.12.q", layers, "h.")  # MTP, numbered on behind the last layer
        for name, of in (("h.1.q", "h.3.q"), ("h.1.q", "h.7.k"), ("h.2.q", "h.12.k"), ("wte", "wpe")):
            assert not is_its_place(name, of, layers, "h.")
        assert is_its_place("a.1.q", "a.7.q", layers, None) and not is_its_place(
            "a.1.q", "a.7.k", layers, None
        )
        assert is_its_place("x", "x", None, "h.") and not is_its_place("x", "y", None, "h.")


def test_weights_that_are_read_in_the_place_of_the_slice(src: Path, tmp_path: Path) -> None:
    root = tmp_path / "slice"
    cut(src, root, max_shard_size=48)
    assert (root / INDEX).exists() and verify_slice(root, str(src)).whole
    zeros: Content = {n: (dtype, shape, bytes(len(data))) for n, (dtype, shape, data) in tensors().items()}
    write_safetensors(root / WEIGHTS, zeros)  # transformers reads this one first
    assert list(faults(root, src)) == [WEIGHTS]
    (root / WEIGHTS).unlink()
    shard = sorted(root.glob("model-*.safetensors"))[0]
    content = read_safetensors(shard)
    extra = next(n for n in tensors() if n not in content)
    write_safetensors(shard, content | {extra: zeros[extra]})
    assert list(faults(root, src)) == [f"{extra} in {shard.name}"]


def test_no_threads(cut_one: Path) -> None:
    refused(run("verify", cut_one, "--workers", "0"), "--workers 0", code=2)


def test_two_names_that_become_one(src: Path, tmp_path: Path) -> None:
    write_safetensors(src / WEIGHTS, tensors() | {"layers.01.q": ("F32", (2, 2), bytes(16))})
    with pytest.raises(AccountingError, match=r"two tensors would have the name `layers\.0\.q`"):
        cut(src, tmp_path / "slice", layers="1")
    assert not (tmp_path / "slice").exists()


def test_a_source_that_changes_meanwhile(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_files = build.check_files

    def change(*args: Any) -> None:
        check_files(*args)
        data = (src / WEIGHTS).read_bytes()
        (src / WEIGHTS).write_bytes(data[:-1] + b"x")

    monkeypatch.setattr(build, "check_files", change)
    with pytest.raises(CheckpointError, match="the source changed while it was sliced"):
        cut(src, tmp_path / "slice", layers="1")
    assert not (tmp_path / "slice").exists()


class TestPublish:
    """What a stranger's folder can make its publisher say and send."""

    def test_a_revision_that_is_a_command(self, hub: Hub, cut_one: Path) -> None:
        path = cut_one / MANIFEST_NAME
        old = decode(path.read_bytes())
        assert old.source is not None
        evil = msgspec.structs.replace(old.source, name="org/base", revision="main; rm -rf ~\n```\n# x")
        path.write_bytes(encode(msgspec.structs.replace(old, source=evil)))
        publish(cut_one, "org/made")
        card = (cut_one / "README.md").read_text()
        assert "rm -rf" not in card and "base_model" not in card and card.count("```") == 2

    def test_links_out_of_the_folder(self, hub: Hub, cut_one: Path, tmp_path: Path) -> None:
        (tmp_path / "key").write_text("secret")
        (cut_one / "notes.txt").symlink_to(tmp_path / "key")
        with pytest.raises(UsageError, match="links to files outside"):
            publish(cut_one, "org/links")
        assert "org/links" not in hub.repos
        (cut_one / "notes.txt").unlink()
        (cut_one / "notes.txt").symlink_to("config.json")
        assert publish(cut_one, "org/links").created

    def test_a_snapshot_of_the_cache(self, hub: Hub, cut_one: Path, tmp_path: Path) -> None:
        blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / f"models--a--b/snapshots/{'a' * 40}"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        for file in cut_one.iterdir():
            shutil.copy(file, blobs / file.name)
            (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
        assert publish(snapshot, "org/snapshot").created


@pytest.mark.parametrize("file", [WEIGHTS, "config.json"])
@pytest.mark.parametrize(
    "location", ["http://[", "http://a:b/", "file:///etc/passwd", "", "http://" + "a" * 70_000]
)
def test_redirects_to_nowhere(hub: Hub, src: Path, location: str, file: str) -> None:
    if file == "config.json" and location.startswith("http"):
        return  # huggingface_hub fetches it, and tries such an address for seconds
    hub.add("org/model", {name: (src / name).read_bytes() for name in (WEIGHTS, "config.json")})
    hub.faults.append(Fault("status", file, 99, status=302, headers={"Location": location}))
    with pytest.raises(CheckpointError):
        open_hub("org/model", patience=Patience(attempts=2, first=0.001))


@pytest.mark.parametrize(
    "listing",
    [
        None,
        [],
        {},
        {"siblings": [1]},
        {"siblings": [{}]},
        {"cardData": {"self": 1}},
        {"lastModified": "soon"},
    ],
)
def test_listings_that_make_no_sense(hub: Hub, monkeypatch: pytest.MonkeyPatch, listing: Any) -> None:
    value = {"id": "org/model", "sha": "a" * 40, "siblings": []} | listing if listing else listing
    monkeypatch.setattr(
        "httpx2.Response.json" if _has_httpx2() else "httpx.Response.json", lambda *_, **__: value
    )
    hub.add("org/model", {"config.json": b"{}"})
    with pytest.raises(CheckpointError, match="makes no sense"):
        open_hub("org/model", patience=Patience(attempts=2, first=0.001))


def _has_httpx2() -> bool:
    return importlib.util.find_spec("httpx2") is not None


def test_a_side_file_that_leads_outside_stays_behind(src: Path, tmp_path: Path) -> None:
    """Else a slice would hold a plain copy of whatever a fetched folder points to."""
    (tmp_path / "key").write_text("secret")
    (src / "notes.txt").symlink_to(tmp_path / "key")
    (src / "own.txt").write_text("mine")
    (src / "alias.txt").symlink_to(src / "own.txt")
    report = cut(src, tmp_path / "slice", layers="1")
    assert [name for name, reason in report.left_out if "outside" in reason] == ["notes.txt"]
    assert (tmp_path / "slice/alias.txt").read_text() == "mine"
    assert not (tmp_path / "slice/notes.txt").exists()


def test_a_slice_from_the_hub_is_the_slice_of_the_folder(src: Path, hub: Hub, tmp_path: Path) -> None:
    """Only a folder's `hf_quant_config.json` was renumbered, and only a folder's strays were told."""
    excluded = {"quantization": {"exclude_modules": ["layers.0.q", "layers.1.k", "lm_head"]}}
    (src / "hf_quant_config.json").write_text(json.dumps(excluded))
    (src / "tokenizer.json").write_text("{}")
    names = [name for name in tensors() if name != "scale"]
    (src / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, WEIGHTS)}))
    hub.add("org/quantised", {p.name: p.read_bytes() for p in src.iterdir()})
    reports = [cut(s, tmp_path / to, layers="1") for s, to in ((src, "a"), ("org/quantised", "b"))]
    assert reports[0].left_out == reports[1].left_out
    assert (f"scale in {WEIGHTS}", "the index does not assign it there") in reports[1].left_out
    folders = [{p.name: p.read_bytes() for p in (tmp_path / to).iterdir()} for to in ("a", "b")]
    for folder in folders:
        folder.pop(MANIFEST_NAME)  # which names its source
    assert folders[0] == folders[1] and "tokenizer.json" in folders[1]
    kept = json.loads(folders[1]["hf_quant_config.json"])["quantization"]["exclude_modules"]
    assert kept == ["layers.0.k", "lm_head"]
