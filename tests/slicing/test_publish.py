"""`publish`, against a server that answers as the Hub does: what arrives, and what happens when it cannot."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
import yaml

from convtools.errors import CheckpointError, ConvtoolsError, StorageError, UsageError
from convtools.manifest import MANIFEST_NAME, XXH3, Manifest, ManifestSource, ManifestTensor, decode, encode
from convtools.slicing.model_card import CardFacts, is_ours, model_card
from convtools.slicing.publish import PublishReport, publish
from convtools.slicing.verification import verify_slice
from convtools.stores.safetensors_header import encode_header
from tests.commands import refused, run, stamps
from tests.hub_server import TOKEN, USER, Fault, Hub, Repo, point_at, serving

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
LAYERS = {
    SHARDS[0]: {"model.embed_tokens.weight": (64, 8), "model.layers.0.mlp.up_proj.weight": (8, 16)},
    SHARDS[1]: {"model.layers.1.mlp.up_proj.weight": (8, 32), "model.norm.weight": (8,)},
}
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}


pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    point_at(server, monkeypatch, tmp_path / "cache")
    server.add("base/model", {"README.md": b"x"}, card={"license": "apache-2.0", "language": ["en"]})
    return server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A slice as `convtools slice` leaves it, without its manifest."""
    root = tmp_path / "slice"
    root.mkdir()
    for file, shapes in LAYERS.items():
        head = encode_header([(name, "F32", shape) for name, shape in shapes.items()])
        size = sum(4 * (shape[0] * (shape[1] if len(shape) > 1 else 1)) for shape in shapes.values())
        (root / file).write_bytes(head + os.urandom(size))
    index = {"metadata": {}, "weight_map": {n: f for f, shapes in LAYERS.items() for n in shapes}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "config.json").write_text(json.dumps(CONFIG))
    (root / "tokenizer.json").write_text("{}")
    (root / "notes").mkdir()
    (root / "notes/a[1].txt").write_text("side files may lie in folders")
    (root / ".env").write_text("SECRET=1")
    return root


def tensors(root: Path) -> dict[str, ManifestTensor]:
    out = {}
    for file, shapes in LAYERS.items():
        data = (root / file).read_bytes()
        at = 8 + int.from_bytes(data[:8], "little")
        for name, shape in shapes.items():
            nbytes = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            digest = xxhash.xxh3_128(data[at : at + nbytes]).hexdigest()
            source = name.replace("layers.1", "layers.7")
            out[name] = ManifestTensor(dtype="F32", shape=shape, source=source, hashes={XXH3: digest})
            at += nbytes
    return out


def with_manifest(root: Path, **changes: Any) -> Manifest:
    manifest = Manifest(
        made_by="convtools 0.1.0",
        source=ManifestSource(name="base/model", revision="c" * 40, format="hub"),
        layers=[0, 7],
        notes=["num_hidden_layers: 9 -> 2"],
        tensors=tensors(root),
    )
    manifest = msgspec.structs.replace(manifest, **changes)
    (root / MANIFEST_NAME).write_bytes(encode(manifest))
    return manifest


def published(root: Path, repo: str = "org/slice", **options: Any) -> PublishReport:
    return publish(root, repo, **options)


def by_command(hub: Hub, root: Path, *args: str, **env: str) -> Any:
    """The same by the command line, which knows the server from its environment alone."""
    home = root.parent / "home"
    return run("publish", root, "org/slice", *args, env={**os.environ, **hub.env(home), **env})


def fails(
    kind: type[ConvtoolsError], words: list[str], root: Path, repo: str = "org/slice", **options: Any
) -> None:
    with pytest.raises(kind) as caught:
        publish(root, repo, **options)
    text = str(caught.value)
    assert [w for w in words if w not in text] == [], text
    assert TOKEN not in text and "Signature" not in text, text


def arrived(hub: Hub, repo: str = "org/slice", branch: str = "main") -> dict[str, bytes]:
    found = hub.repos[repo].files(branch)
    assert found is not None
    return {name: data for name, data in found[1].items() if name != ".gitattributes"}


def here(root: Path) -> dict[str, bytes]:
    """What the folder has that should be published."""
    files = (p for p in root.rglob("*") if p.is_file() and not p.name.startswith("."))
    return {str(p.relative_to(root)): p.read_bytes() for p in files if ".cache" not in p.parts}


# --- what arrives


def test_all_of_it_arrives(hub: Hub, folder: Path) -> None:
    manifest = with_manifest(folder)
    before = here(folder)
    done = by_command(hub, folder, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert arrived(hub) == here(folder)
    assert {n: d for n, d in here(folder).items() if n != "README.md"} == before
    assert decode(arrived(hub)[MANIFEST_NAME]) == manifest
    assert report["commit"] == hub.repos["org/slice"].branches["main"]
    assert report["url"] == f"{hub.url}/org/slice" and report["created"] is True
    assert (report["manifest"], report["card"], report["removed"]) == ("checked", "written", [])
    assert report["files"] == len(here(folder))
    assert report["nbytes"] == sum(map(len, here(folder).values()))
    assert report["not_published"] == [[".env", "a hidden file"]]
    assert not hub.repos["org/slice"].private


def test_the_card(hub: Hub, folder: Path) -> None:
    with_manifest(folder)
    published(folder)
    card = arrived(hub)["README.md"].decode()
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "license": "apache-2.0",
        "base_model": "base/model",
        "tags": ["convtools", "layer-slice"],
    }
    assert is_ours(card)
    for line in (
        "# slice",
        "| 1 | 7 | 1,024 |",
        "| size | 3,616 bytes in 2 files |",
        "- num\\_hidden\\_layers: 9 -\\> 2",
        "convtools verify slice",
        f"convtools verify slice --source base/model@{'c' * 40}   # tensor by tensor, against the source",
    ):
        assert line in body.splitlines(), card


def test_a_manifest_is_made_where_there_is_none(hub: Hub, folder: Path) -> None:
    assert published(folder).manifest == "written"
    made = decode(arrived(hub)[MANIFEST_NAME])
    assert {n: t.hashes for n, t in made.tensors.items()} == {n: t.hashes for n, t in tensors(folder).items()}
    assert (made.source, made.layers) == (None, None)
    assert verify_slice(folder).whole


def test_hashes_of_another_kind_are_completed(hub: Hub, folder: Path) -> None:
    other = {"additive-128": "ab" * 16}
    with_manifest(
        folder, tensors={n: msgspec.structs.replace(t, hashes=other) for n, t in tensors(folder).items()}
    )
    assert published(folder).manifest == "completed"
    made = decode(arrived(hub)[MANIFEST_NAME])
    assert {n: t.hashes for n, t in made.tensors.items()} == {
        n: other | t.hashes for n, t in tensors(folder).items()
    }


def test_private_and_a_branch(hub: Hub, folder: Path) -> None:
    report = published(folder, f"{USER}/x", private=True, revision="v1")
    assert hub.repos[f"{USER}/x"].private
    assert arrived(hub, f"{USER}/x", "v1") == here(folder) and arrived(hub, f"{USER}/x") == {}
    assert report.url == f"{hub.url}/{USER}/x/tree/v1" and report.created


def test_a_second_run_sends_nothing_and_changes_nothing(hub: Hub, folder: Path) -> None:
    published(folder)
    stored, seen = dict(hub.stored), stamps(folder)
    puts, commits = len(hub.paths("PUT")), len(hub.repos["org/slice"].commits)
    report = published(folder)
    assert (report.created, report.manifest, report.card) == (False, "checked", "as it was")
    assert len(hub.paths("PUT")) == puts and hub.stored == stored
    assert len(hub.repos["org/slice"].commits) == commits
    assert {n: s for n, s in stamps(folder).items() if ".cache" not in n and n != "."} == {
        n: s for n, s in seen.items() if ".cache" not in n and n != "."
    }


# --- cards of others


def test_a_card_that_somebody_wrote_is_kept(hub: Hub, folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")
    assert published(folder).card.startswith("kept: it is not one of convtools'")
    assert arrived(hub)["README.md"] == b"---\nlicense: mit\n---\nMine.\n"
    assert published(folder, overwrite_card=True).card == "written"
    assert is_ours(arrived(hub)["README.md"].decode())


def test_a_source_that_cannot_be_asked_is_said(hub: Hub, folder: Path) -> None:
    with_manifest(folder, source=ManifestSource(name="base/gone", revision="c" * 40, format="hub"))
    (note,) = published(folder).notes
    assert note.startswith("the card names no license: base/gone")


def test_a_path_of_this_machine_is_no_base_model(hub: Hub, folder: Path) -> None:
    with_manifest(folder, source=ManifestSource(name="big-model", format="torch_dist"))
    published(folder)
    card = arrived(hub)["README.md"].decode()
    assert "base_model" not in card and "`big-model`" in card and "--source" not in card


def test_hostile_text_does_not_become_markup() -> None:
    evil = "x`\n# big | <script> \x1b[31m"
    source = ManifestSource(name=evil, format=evil, revision=evil)
    manifest = Manifest(made_by=evil, source=source, layers=[0], notes=[evil], tensors={})
    card = model_card(manifest, CardFacts("org/x", evil, evil, None, (("license", evil),), 1, 1, ()))
    assert "\x1b" not in card and "\n# big" not in card and "- x\\`  \\# big" not in card
    assert yaml.safe_load(card.split("---\n")[1])["license"] == evil
    rows = [line for line in card.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {3}, rows


# --- refused before anything is done


def untouched(hub: Hub, folder: Path, before: dict[str, Any], repo: str = "org/slice") -> None:
    """Nothing was written here, made there, or sent."""
    assert stamps(folder) == before
    assert repo not in hub.repos
    assert [p for p in hub.paths("PUT") + hub.paths("POST") if "validate" not in p] == []


def test_weights_that_are_not_the_manifest_s(hub: Hub, folder: Path) -> None:
    with_manifest(folder)
    with (folder / SHARDS[1]).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        old = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([old[0] ^ 1]))
    before = stamps(folder)
    fails(CheckpointError, ["`model.norm.weight` has the xxh3-128", "make the checkpoint anew"], folder)
    untouched(hub, folder, before)


def test_a_manifest_of_other_tensors(hub: Hub, folder: Path) -> None:
    other = tensors(folder)
    other["model.extra"] = other.pop("model.norm.weight")
    with_manifest(folder, tensors=other)
    before = stamps(folder)
    words = ["`model.extra` is missing", "`model.norm.weight` is not in the manifest"]
    fails(CheckpointError, words, folder)
    untouched(hub, folder, before)


def test_what_is_no_checkpoint(hub: Hub, folder: Path) -> None:
    (folder / SHARDS[1]).unlink()
    before = stamps(folder)
    fails(CheckpointError, [SHARDS[1], "not there"], folder)
    untouched(hub, folder, before)
    fails(UsageError, ["not a directory"], folder / "absent")


def test_a_fault_of_the_folder_is_named_before_any_of_the_network(hub: Hub, folder: Path) -> None:
    with_manifest(folder)
    raw = (folder / SHARDS[1]).read_bytes()
    (folder / SHARDS[1]).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    nowhere = ({"HF_TOKEN": ""}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"})
    for env in nowhere:
        refused(by_command(hub, folder, **env), "`model.norm.weight` has the xxh3-128")
    for name in (*SHARDS, "model.safetensors.index.json", MANIFEST_NAME):
        (folder / name).unlink()
    for env in nowhere:
        done = by_command(hub, folder, **env)
        refused(done, "no weights")
        assert "token" not in done.stderr and "Hub" not in done.stderr
    assert hub.requests == []


def test_a_config_that_is_not_the_manifest_s(hub: Hub, folder: Path) -> None:
    with_manifest(folder, config="0" * 32)
    before = stamps(folder)
    fails(CheckpointError, ["`config.json` has the xxh3-128", "not 00000000"], folder)
    untouched(hub, folder, before)


def test_what_is_no_repository(hub: Hub, folder: Path) -> None:
    for name in ("slice", "org/slice@v1", "../slice", "org/a/b"):
        fails(UsageError, ["not the name of a repository"], folder, name)
    fails(UsageError, ["not the name of a branch"], folder, revision="a..b")
    assert hub.requests == []


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"HF_TOKEN": ""}, ["no access token", "hf auth login"]),
        ({"HF_TOKEN": "hf_wrong"}, ["the Hub refuses access", "401", "hf auth login"]),
        ({"HF_HUB_OFFLINE": "1"}, ["offline mode is on", "unset HF_HUB_OFFLINE"]),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, ["cannot reach the Hub at http://127.0.0.1:9", "network"]),
    ],
    ids=["no-token", "wrong-token", "offline", "no-network"],
)
def test_without_network_or_rights(hub: Hub, folder: Path, env: dict[str, str], words: list[str]) -> None:
    before = stamps(folder)
    refused(by_command(hub, folder, **env), *words)
    untouched(hub, folder, before)


def test_a_token_that_may_only_read(hub: Hub, folder: Path) -> None:
    hub.role, before = "read", stamps(folder)
    fails(StorageError, ["the access token may only read"], folder)
    untouched(hub, folder, before)


def test_a_namespace_of_others(hub: Hub, folder: Path) -> None:
    before = stamps(folder)
    fails(StorageError, ["may not publish under `stranger`", "org, someone"], folder, "stranger/x")
    untouched(hub, folder, before, "stranger/x")


def test_rights_that_only_show_when_tried(hub: Hub, folder: Path) -> None:
    """A fine-grained token does not list what it may: the Hub says so when the repository is to be made."""
    hub.role, before = "fineGrained", stamps(folder)
    fails(StorageError, ["the Hub refuses access", "403", "stranger/x"], folder, "stranger/x")
    assert stamps(folder) == before and "stranger/x" not in hub.repos


def test_private_is_not_asked_for_in_vain(hub: Hub, folder: Path) -> None:
    hub.add("org/slice", {"x": b""})
    fails(StorageError, ["is there already, and is public"], folder, private=True)
    assert arrived(hub) == {"x": b""}


def test_two_sets_of_weights_are_not_left_there(hub: Hub, folder: Path) -> None:
    old = {"model-00001-of-00001.safetensors": b"old", "model.safetensors": b"older", "logo.png": b"logo"}
    hub.add("org/slice", old)
    words = ["weights that the folder does not have", "model-00001-of-00001", "--replace"]
    fails(StorageError, words, folder)
    assert arrived(hub) == old
    done = by_command(hub, folder, "--replace")
    assert "deleted    model-00001-of-00001.safetensors, model.safetensors" in done.stdout, done
    assert arrived(hub) == here(folder) | {"logo.png": b"logo"}


# --- failures half way


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", "/commit/", method="POST", status=400),
        Fault("status", "/preupload/", method="POST", status=403),
        Fault("status", "/files/", method="PUT", status=403, skip=1, storage=True),
    ],
    ids=["commit", "preupload", "second-file"],
)
def test_a_failure_half_way_can_be_run_again(hub: Hub, folder: Path, fault: Fault) -> None:
    with_manifest(folder)
    fault.hits = 0
    hub.faults.append(fault)
    fails(StorageError, ["the upload did not finish", "run the same command again"], folder)
    assert fault.hits >= 1
    assert arrived(hub) == {}, "the commit is what makes files appear, all at once"
    sent = set(hub.stored)
    hub.faults.clear()
    hub.requests.clear()
    published(folder)
    assert arrived(hub) == here(folder)
    again = {path.rpartition("/")[2] for path in hub.paths("PUT")}
    assert again & sent == set(), "what was there was not sent again"


def test_a_server_that_is_busy_for_a_moment(hub: Hub, folder: Path) -> None:
    hub.faults += [
        Fault("status", "/api/whoami-v2", status=503),
        Fault("status", "/api/repos/create", method="POST", status=503),
        Fault("status", "/api/models/org/slice", status=500, times=1),
    ]
    published(folder)
    assert arrived(hub) == here(folder)


def test_what_did_not_arrive_is_noticed(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Repo.commit

    def lossy(repo: Repo, files: dict[str, bytes], branch: str = "main") -> str:
        return whole(repo, {n: d for n, d in files.items() if n != "tokenizer.json"}, branch)

    monkeypatch.setattr(Repo, "commit", lossy)
    fails(StorageError, ["the Hub does not have what was sent", "`tokenizer.json` (not there)"], folder)


def test_a_folder_that_cannot_be_written(hub: Hub, folder: Path) -> None:
    (folder / MANIFEST_NAME).mkdir()  # a name that is taken
    before = stamps(folder)
    fails(StorageError, [MANIFEST_NAME], folder)
    assert stamps(folder).keys() == before.keys() and arrived(hub) == {}


def test_no_trace_of_torch(hub: Hub, folder: Path) -> None:
    """The path of slices works where no torch is installed, and publishes without it."""
    script = folder.parent / "sitecustomize.py"
    script.write_text("import sys; sys.modules['torch'] = sys.modules['safetensors'] = None\n")
    done = by_command(hub, folder, PYTHONPATH=str(folder.parent))
    assert done.returncode == 0, done.stderr
    assert arrived(hub) == here(folder)
    assert TOKEN not in done.stdout + done.stderr
