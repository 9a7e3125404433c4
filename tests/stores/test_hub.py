"""Reading from the Hub: the same as from a folder, only the bytes that are needed, never a wrong one."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from convtools.errors import CheckpointError, StorageError, UnsupportedEncoding, UsageError
from convtools.stores.hf import open_hf
from convtools.stores.hub import HubCheckpoint, HubReader, is_remote, open_hub, parse_repo
from convtools.stores.hub_http import Patience
from convtools.stores.safetensors_header import encode_header
from tests.hub_server import Fault, Hub, point_at, serving

QUICK = Patience(attempts=5, first=0.001, longest=0.01, longest_asked=0.5)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
BIG = "model.layers.1.big"


def weights(seed: int, *shapes: tuple[str, tuple[int, ...]]) -> tuple[bytes, dict[str, bytes]]:
    """(a safetensors file, the bytes of each tensor)."""
    content = {}
    for i, (name, shape) in enumerate(shapes):
        nbytes = 4 * int.__mul__(*shape)
        content[name] = b"".join(
            (1_000_003 * (seed + 1) * (i + 1) + at).to_bytes(4, "little") for at in range(nbytes // 4)
        )
    head = encode_header([(name, "F32", shape) for name, shape in shapes])
    return head + b"".join(content.values()), content


FIRST, FIRST_CONTENT = weights(0, ("model.embed", (100, 64)), ("model.layers.0.up", (64, 200)))
SECOND, SECOND_CONTENT = weights(1, ("model.layers.1.small", (4, 4)), (BIG, (1500, 500)))
CONTENT = FIRST_CONTENT | SECOND_CONTENT
INDEX = {
    "metadata": {"total_size": 1},
    "weight_map": {name: SHARDS[0] for name in FIRST_CONTENT} | {name: SHARDS[1] for name in SECOND_CONTENT},
}
FILES = {
    ".gitattributes": b"",
    "README.md": b"---\nlicense: mit\n---\n",
    "config.json": b'{"model_type": "llama", "rope": Infinity}\n',
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    SHARDS[0]: FIRST,
    SHARDS[1]: SECOND,
    "original/consolidated.bin": b"old",
    "tokenizer.json": b'{"x": 1}',
}


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A Hub with `org/model`, which this process' huggingface_hub talks to, with an empty cache."""
    point_at(server, monkeypatch, tmp_path / "cache")
    server.add("org/model", FILES)
    return server


def opened(repo: str = "org/model", revision: str | None = None, **options: Any) -> HubCheckpoint:
    return open_hub(repo, revision, patience=QUICK, **options)


def copied(checkpoint: HubCheckpoint, name: str, path: Path, reader: HubReader | None = None) -> bytes:
    """What a reader puts into a file for one tensor, at byte 3 of it; every byte was told of once."""
    tensor, told = checkpoint.tensors[name], []
    blob = tensor.blobs[0]
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        reader = reader or HubReader(checkpoint)
        reader.copy(blob.path, blob.offset, tensor.nbytes, fd, 3, told.append)
        assert sum(told) == tensor.nbytes and os.fstat(fd).st_size == 3 + tensor.nbytes
        return os.pread(fd, tensor.nbytes, 3)
    finally:
        os.close(fd)


def header_nbytes(file: bytes) -> int:
    return 8 + int.from_bytes(file[:8], "little")


def shard_bytes(hub: Hub) -> int:
    return sum(hub.sent.get(name, 0) for name in SHARDS)


def ranges(hub: Hub) -> list[str]:
    """The ranges that storage was asked for."""
    return [headers["range"] for _, path, headers in hub.requests if path.startswith("/files/")]


# --- what is opened


def test_it_is_what_the_same_folder_is(hub: Hub, tmp_path: Path) -> None:
    for name, data in FILES.items():
        path = tmp_path / "local" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    local, found = open_hf(tmp_path / "local"), opened()
    for field in ("config", "config_bytes", "index_file", "weight_files", "unread_files", "side_files",
                  "stray_tensors", "sub_byte"):  # fmt: skip
        assert getattr(found, field) == getattr(local, field), field
    assert list(found.tensors) == list(local.tensors)
    for name, tensor in local.tensors.items():
        here, there = tensor.blobs[0], found.tensors[name].blobs[0]
        assert (there.offset, there.region) == (here.offset, here.region)
        assert there.path == found.root / here.path.name and is_remote(there.path)
        assert not is_remote(here.path)
    sha = hub.repos["org/model"].branches["main"]
    assert (found.repo_id, found.revision, found.commit) == ("org/model", None, sha)
    assert str(found.root) == f"hf:/org/model@{sha}"


def test_only_headers_are_fetched(hub: Hub) -> None:
    opened()
    headers = header_nbytes(FIRST) + header_nbytes(SECOND)
    assert headers <= shard_bytes(hub) <= 1.5 * headers
    assert len(ranges(hub)) == 2, "one request a shard: the index told how long the headers are"


def test_a_lone_file_needs_no_index(hub: Hub) -> None:
    hub.add("org/lone", {"config.json": b"{}", "model.safetensors": SECOND})
    found = opened("org/lone")
    assert found.index_file is None and list(found.tensors) == list(SECOND_CONTENT)
    assert hub.sent["model.safetensors"] == header_nbytes(SECOND)


def test_a_revision_is_a_branch_or_a_commit(hub: Hub) -> None:
    first = hub.repos["org/model"].branches["main"]
    second = hub.add("org/model", FILES | {"config.json": b'{"second": 1}'})
    assert opened().commit == second
    assert opened(revision=first).commit == first and "second" not in opened(revision=first).config


def test_the_commit_stays_while_the_branch_moves_on(hub: Hub, tmp_path: Path) -> None:
    found = opened()
    hub.add("org/model", FILES | {SHARDS[1]: weights(7, *[(n, (4, 4)) for n in SECOND_CONTENT])[0]})
    assert copied(found, BIG, tmp_path / "x") == CONTENT[BIG]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({SHARDS[1]: None}, [SHARDS[1], "not in the repository", "model.layers.1.small"]),
        ({"config.json": None}, ["no `config.json`"]),
        ({"model.safetensors.index.json": None}, ["without its index"]),
        ({SHARDS[0]: SECOND, SHARDS[1]: FIRST}, ["that lie in another shard", BIG]),
        ({SHARDS[1]: SECOND[:-1]}, ["outside the file's data", BIG, f"/{SHARDS[1]}"]),
        ({SHARDS[1]: SECOND + b"x"}, ["a hole"]),
        ({SHARDS[1]: b"short"}, ["too short"]),
        ({SHARDS[1]: (10**12).to_bytes(8, "little") + SECOND[8:]}, ["header that cannot be"]),
        ({"config.json": b"{"}, ["config.json", "not valid JSON"]),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "../x.safetensors"}}'},
            ["leaves the folder"],
        ),
    ],
)
def test_hostile_files_are_refused_as_in_a_folder(
    hub: Hub, change: dict[str, bytes | None], words: list[str]
) -> None:
    hub.add("org/bad", {n: d for n, d in (FILES | change).items() if d is not None})
    with pytest.raises(CheckpointError) as caught:
        opened("org/bad")
    assert [w for w in words if w not in str(caught.value)] == [], caught.value


def test_narrow_tensors_and_adapters_are_refused(hub: Hub) -> None:
    head = json.dumps({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    hub.add(
        "org/f4", {"config.json": b"{}", "model.safetensors": len(head).to_bytes(8, "little") + head + b"ab"}
    )
    with pytest.raises(UnsupportedEncoding, match="narrower than a byte"):
        opened("org/f4")
    assert list(opened("org/f4", list_sub_byte=True).sub_byte) == ["x"]
    hub.add("org/lora", {"adapter_config.json": b"{}", "adapter_model.safetensors": SECOND})
    with pytest.raises(UnsupportedEncoding, match="adapter"):
        opened("org/lora")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("org/name", ("org/name", None)),
        ("org/na.me-1_2@refs/pr/3", ("org/na.me-1_2", "refs/pr/3")),
        *((text, None) for text in ("name", "./a/b", "a/b/c", "/a/b", "a/..", "a/b@", "a/b@c@d", "a b/c",
                                    "a/b.git", "a--b/c", "-a/b", "a/b-", "a/b\n", "hf:/a/b")),
    ],
)  # fmt: skip
def test_names_of_repositories(text: str, parsed: object) -> None:
    assert parse_repo(text) == parsed


def test_what_is_no_repository_is_not_asked_for(hub: Hub) -> None:
    with pytest.raises(UsageError, match="not the name of a repository"):
        opened("../secret")
    assert hub.requests == []


# --- who may see it


def test_errors_say_what_to_do(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/private", FILES, private=True)
    hub.add("org/gated", FILES, gated=True)
    assert opened("org/private").repo_id == "org/private"
    with pytest.raises(CheckpointError, match=r"no such repository[\s\S]*hf auth login"):
        opened("org/absent")
    with pytest.raises(CheckpointError, match="no such revision"):
        opened(revision="v9")
    with pytest.raises(CheckpointError, match=r"gated[\s\S]*ask for access"):
        opened("org/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(CheckpointError, match="no such repository, or no right to see it"):
        opened("org/private")


def test_storage_never_sees_the_token(hub: Hub, tmp_path: Path) -> None:
    copied(opened(), BIG, tmp_path / "x")
    seen = [("authorization" in h, path.startswith("/files/")) for _, path, h in hub.requests]
    assert set(seen) == {(True, False), (False, True)}


# --- bytes


def test_the_bytes_and_no_more_than_these(hub: Hub, tmp_path: Path) -> None:
    found = opened()
    reader = HubReader(found)
    for name, data in CONTENT.items():
        assert copied(found, name, tmp_path / "x", reader) == data, name
    blob = found.tensors[BIG].blobs[0]
    payload = sum(map(len, CONTENT.values()))
    assert shard_bytes(hub) <= 1.02 * payload + header_nbytes(FIRST) + header_nbytes(SECOND)
    resolved = [
        path for path in hub.paths() if path.startswith("/org/model/resolve/") and "safetensors" in path
    ]
    assert len(resolved) - sum("index" in path for path in resolved) == 4, (
        "each file once, to open and to read"
    )
    assert reader.read(blob.path, blob.offset + 5, 7) == CONTENT[BIG][5:12]


def test_threads_share_a_reader(hub: Hub, tmp_path: Path) -> None:
    found = opened()
    reader, wrong = HubReader(found), []
    hub.faults += [
        Fault("cut", "/files/", times=6, after=3000, storage=True),
        Fault("status", "/files/", storage=True),
    ]

    def work(i: int) -> None:
        for name, data in CONTENT.items():
            if copied(found, name, tmp_path / f"x{i}", reader) != data:
                wrong.append((i, name))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("after", [0, 1, 1_000_000])
def test_a_cut_connection_goes_on_where_it_broke(hub: Hub, tmp_path: Path, after: int) -> None:
    found = opened()
    hub.faults.append(Fault("cut", "/files/", times=2, after=after, storage=True))
    before = shard_bytes(hub)
    assert copied(found, BIG, tmp_path / "x") == CONTENT[BIG]
    start, nbytes = found.tensors[BIG].blobs[0].offset, len(CONTENT[BIG])
    last = start + nbytes - 1
    assert ranges(hub)[2:] == [f"bytes={start + n * after}-{last}" for n in range(3)]
    assert shard_bytes(hub) - before == nbytes, "no byte came twice"


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("storage", [False, True])
def test_a_busy_server_is_asked_again(hub: Hub, tmp_path: Path, status: int, storage: bool) -> None:
    found = opened()
    fault = Fault("status", "/files/" if storage else SHARDS[1], status=status, times=2, storage=storage)
    hub.faults.append(fault)
    assert copied(found, BIG, tmp_path / "x") == CONTENT[BIG]
    assert fault.hits >= 3


def test_opening_is_patient_too(hub: Hub) -> None:
    hub.faults += [
        Fault("status", "/api/models/org/model", times=2, status=503),
        Fault("status", "/api/models/org/model", times=1, status=429, skip=2, headers={"Retry-After": "0"}),
        Fault("cut", "/files/", after=5, storage=True),
    ]
    assert list(opened().tensors) == list(CONTENT)


@pytest.mark.parametrize(
    "headers",
    [{"Retry-After": "1"}, {"RateLimit": '"resolvers";r=0;t=300'}],
    ids=["retry-after", "ratelimit"],
)
def test_a_server_may_ask_to_wait_but_not_for_ever(hub: Hub, tmp_path: Path, headers: dict[str, str]) -> None:
    found = opened()
    hub.faults.append(Fault("status", "/files/", status=429, headers=headers, storage=True))
    began = time.monotonic()
    assert copied(found, BIG, tmp_path / "x") == CONTENT[BIG]
    assert 0.5 <= time.monotonic() - began < 0.9, "QUICK.longest_asked"


def test_it_gives_up_in_the_end(hub: Hub, tmp_path: Path) -> None:
    found = opened()
    fault = Fault("status", "/files/", status=503, times=99, storage=True)
    hub.faults.append(fault)
    with pytest.raises(CheckpointError, match=r"failed 5 times in a row[\s\S]*HTTP 503"):
        copied(found, BIG, tmp_path / "x")
    assert fault.hits == 5


def test_a_trickle_is_not_progress(hub: Hub, tmp_path: Path) -> None:
    found = opened()
    fault = Fault("cut", "/files/", times=999, after=1, storage=True)
    hub.faults.append(fault)
    with pytest.raises(CheckpointError, match="failed 5 times in a row"):
        copied(found, BIG, tmp_path / "x")


def test_large_steps_are_progress(hub: Hub, tmp_path: Path) -> None:
    found = opened()
    fault = Fault("cut", "/files/", times=2, after=1 << 20, storage=True)
    hub.faults.append(fault)
    assert copied(found, BIG, tmp_path / "x", HubReader(found, patience=Patience(2, 0.001))) == CONTENT[BIG]
    assert fault.hits == 3


@pytest.mark.parametrize(
    ("kind", "storage", "words"),
    [
        ("range", True, ["did not send the bytes", "bytes "]),
        ("length", True, ["did not send the bytes", "Content-Length"]),
        ("whole", True, ["did not send the bytes", "HTTP 200"]),
        ("encoding", True, ["did not send the bytes", "gzip"]),
        ("etag", True, ["the file changed while it was read", "another"]),
        ("linked-etag", False, ["the file changed while it was read", "hash"]),
    ],
)
def test_other_bytes_are_refused(
    hub: Hub, tmp_path: Path, kind: str, storage: bool, words: list[str]
) -> None:
    found = opened()
    reader = HubReader(found)
    assert copied(found, "model.layers.1.small", tmp_path / "y", reader) == CONTENT["model.layers.1.small"]
    reader = reader if storage else HubReader(found)  # one that has to ask the Hub first
    hub.faults.append(Fault(kind, SHARDS[1], times=99, storage=storage))
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    blob = found.tensors[BIG].blobs[0]
    with pytest.raises(CheckpointError) as caught:
        reader.copy(blob.path, blob.offset, len(CONTENT[BIG]), fd, 0, lambda n: None)
    assert [w for w in words if w not in str(caught.value)] == [], caught.value
    assert os.fstat(fd).st_size == 0, "not one byte was written"
    os.close(fd)


def test_a_file_that_changes_in_the_middle_is_refused(hub: Hub, tmp_path: Path) -> None:
    found = opened()
    hub.faults += [
        Fault("cut", "/files/", after=1000, storage=True),
        Fault("etag", "/files/", storage=True, times=99),
    ]
    with pytest.raises(CheckpointError, match="the file changed while it was read"):
        copied(found, BIG, tmp_path / "x")


def test_a_whole_file_may_come_without_a_range(hub: Hub) -> None:
    tiny, _ = weights(0, ("w", (1, 1)))
    index = json.dumps({"weight_map": {"w": SHARDS[0]}}).encode()
    hub.add("org/tiny", {"config.json": b"{}", "model.safetensors.index.json": index, SHARDS[0]: tiny})
    hub.faults.append(Fault("whole", SHARDS[0], times=99, storage=True))
    assert list(opened("org/tiny").tensors) == ["w"]
    assert hub.sent[SHARDS[0]] == len(tiny)


def test_an_expired_link_is_asked_for_anew(hub: Hub, tmp_path: Path) -> None:
    found = opened()
    reader = HubReader(found)
    hub.lifetime = 0.2
    copied(found, "model.layers.1.small", tmp_path / "y", reader)
    time.sleep(0.25)
    asked = len(hub.paths())
    assert copied(found, BIG, tmp_path / "x", reader) == CONTENT[BIG]
    kinds = ["storage" if path.startswith("/files/") else "hub" for path in hub.paths()[asked:]]
    assert kinds == ["storage", "hub", "storage"]


def test_links_that_never_work_end_it(hub: Hub, tmp_path: Path) -> None:
    found = opened()
    hub.lifetime = -1.0
    with pytest.raises(CheckpointError, match=r"storage refused the Hub's link \(HTTP 403\)"):
        copied(found, BIG, tmp_path / "x")


def test_a_range_outside_the_file_is_no_request(hub: Hub) -> None:
    found = opened()
    asked, size = len(hub.requests), len(SECOND)
    with pytest.raises(CheckpointError, match="a range outside the file"):
        HubReader(found).copy(found.root / SHARDS[1], size - 3, 4, -1, 0, lambda n: None)
    HubReader(found).copy(found.root / SHARDS[1], size, 0, -1, 0, lambda n: None)
    assert len(hub.requests) == asked


def test_a_full_disk_is_not_a_network_failure(hub: Hub) -> None:
    found = opened()
    blob, fd = found.tensors[BIG].blobs[0], os.open("/dev/full", os.O_WRONLY)
    asked = len(ranges(hub))
    with pytest.raises(OSError, match="No space left"):
        HubReader(found).copy(blob.path, blob.offset, 5000, fd, 0, lambda n: None)
    os.close(fd)
    assert len(ranges(hub)) == asked + 1


def test_a_wish_to_stop_ends_it(hub: Hub, tmp_path: Path) -> None:
    found, stop = opened(), threading.Event()
    hub.faults.append(Fault("status", "/files/", status=503, headers={"Retry-After": "100"}, storage=True))
    threading.Timer(0.1, stop.set).start()
    began = time.monotonic()
    reader = HubReader(found, patience=Patience(), stop=stop)
    with pytest.raises(StorageError, match="stopped"):
        copied(found, BIG, tmp_path / "x", reader)
    assert time.monotonic() - began < 2


# --- the cache, and no network


def test_side_files_come_by_way_of_the_cache(hub: Hub) -> None:
    found = opened()
    assert found.fetch_side("tokenizer.json") == FILES["tokenizer.json"]
    sent = dict(hub.sent)
    again = opened()
    assert again.fetch_side("tokenizer.json") == FILES["tokenizer.json"]
    assert again.side_path("config.json").read_bytes() == FILES["config.json"]
    assert {n: hub.sent[n] - sent[n] for n in ("tokenizer.json", "config.json")} == {
        "tokenizer.json": 0,
        "config.json": 0,
    }
    with pytest.raises(UsageError, match="not a side file"):
        found.fetch_side(SHARDS[0])


def test_a_file_in_the_cache_is_not_fetched(hub: Hub) -> None:
    from huggingface_hub import hf_hub_download

    path = hf_hub_download("org/model", SHARDS[1])
    hub.sent.clear()
    found = opened()
    blob = found.tensors[BIG].blobs[0]
    assert not is_remote(blob.path) and blob.path == Path(path)
    assert blob.path.read_bytes()[blob.offset :][: len(CONTENT[BIG])] == CONTENT[BIG]
    assert is_remote(found.tensors["model.embed"].blobs[0].path) and SHARDS[1] not in hub.sent


def test_a_damaged_copy_in_the_cache_is_not_used(hub: Hub, tmp_path: Path) -> None:
    from huggingface_hub import hf_hub_download

    Path(os.path.realpath(hf_hub_download("org/model", SHARDS[1]))).write_bytes(SECOND[:-5])
    found = opened()
    assert is_remote(found.tensors[BIG].blobs[0].path)
    assert copied(found, BIG, tmp_path / "x") == CONTENT[BIG]


def test_offline_reads_the_cache_alone(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"not in the cache[\s\S]*hf download org/model"):
        opened()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    opened()  # leaves config and index in the cache, and no weights
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit = hub.repos["org/model"].branches["main"]
    with pytest.raises(CheckpointError, match=r"the cache lacks a part[\s\S]*model-00001-of"):
        opened(revision=commit)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in FILES:
        download(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.requests)
    found = opened()
    assert found.commit == commit and found.fetch_side("tokenizer.json") == FILES["tokenizer.json"]
    assert not any(is_remote(t.blobs[0].path) for t in found.tensors.values())
    assert len(hub.requests) == asked


def download(name: str) -> None:
    from huggingface_hub import hf_hub_download

    hf_hub_download("org/model", name)


def test_no_network_is_said_soon(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(
        CheckpointError, match=r"cannot reach the Hub at http://127.0.0.1:9[\s\S]*HF_ENDPOINT"
    ):
        open_hub("org/model")
    assert time.monotonic() - began < 3


SCRIPT = """
import sys
from convtools.stores.hub import open_hub, HubReader
import os
found = open_hub("org/model")
tensor = found.tensors[sys.argv[1]]
fd = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
HubReader(found).copy(tensor.blobs[0].path, tensor.blobs[0].offset, tensor.nbytes, fd, 0, lambda n: None)
assert not {"torch", "numpy", "safetensors"} & set(sys.modules), sorted(sys.modules)
"""


def test_a_process_that_knows_the_server_from_its_environment_only(hub: Hub, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_TOKEN and HF_HOME, as a user sets them; and neither torch nor numpy is imported."""
    hub.repos["org/model"].private = True
    environment = os.environ | hub.env(tmp_path / "home")
    command = [sys.executable, "-c", SCRIPT, BIG, str(tmp_path / "x")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x").read_bytes() == CONTENT[BIG]


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"pip install -e '\.\[hub\]'"):
        open_hub("org/model")
