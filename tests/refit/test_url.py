"""URLs of engines: what stands behind one is asked, and whatever it answers is bounded and said in words."""

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from convtools.errors import ConvtoolsError, UsageError
from convtools.refit.errors import PeerError
from convtools.refit.plan import Tensor
from convtools.refit.sinks.http_json import MAX_ANSWER, number
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sinks.url import KEY_VARIABLE, connect, connect_all, find
from convtools.refit.sync import WeightSync
from tests.refit.engines import model
from tests.refit.serving import http, serving


def test_a_socket_and_the_ranks_below_a_directory(tmp_path: Path) -> None:
    with serving(model(0), tmp_path / "one") as engine:
        (sink,) = connect(engine.url)
        assert isinstance(sink, LocalSink) and sink.name == engine.url
    many = tmp_path / "many"
    with serving(model(0), many / "rank-0") as first, serving(model(0), many / "rank-1") as second:
        sinks = connect(f"unix://{many}/")
        assert [s.name for s in sinks] == [f"unix://{many}/rank-0", f"unix://{many}/rank-1"]
        with WeightSync(model(3), sinks) as sync:
            sync.push(3)
        assert first.receiver.version == second.receiver.version == 3
        assert first.tensors["head"].max() == second.tensors["head"].min() == 3


def test_a_path_with_odd_characters(tmp_path: Path) -> None:
    with serving(model(0), tmp_path / "an engine"):
        assert len(connect(f"unix://{tmp_path}/an%20engine")) == 1


def test_a_rank_that_is_not_up_yet(tmp_path: Path) -> None:
    for n in (0, 2):
        (tmp_path / f"rank-{n}").mkdir()
    with pytest.raises(PeerError, match="ranks of the engine are missing") as caught:
        connect(f"unix://{tmp_path}")
    assert (caught.value.expected, caught.value.found) == ("rank-0 to rank-2", "rank-0, rank-2")


def test_where_nobody_is(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="no engine listens there"):
        connect(f"unix://{tmp_path}")
    with pytest.raises(PeerError, match="there is no directory"):
        connect(f"unix://{tmp_path}/x")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(PeerError, match="no server answers: Connection refused"):
        connect(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("tcp://host:1", "is no URL of an engine"),
        ("unix://run/engine", "names no directory"),
        ("unix:///run/engine?x=1", "names no directory"),
        ("unix:///a%00b", "names no directory"),
        ("http://", "names no server"),
        ("http://host:99999", "is no URL"),
        ("http://user:word@host:1", "more than a server's address"),
        ("http://host:1/?a=b", "more than a server's address"),
        ("http://[::1", "is no URL"),
        ("vllm+http://host:8000", "development mode"),
        ("file:///out", "from the checkpoint that is pushed"),
        ("file://out", "names no directory"),
        ("file:///out?to=gguf", "is no format"),
        ("file:///out?tp=2", "is for a Megatron directory"),
        ("file:///out?to=torch_dist&tp=two", "is no number"),
        ("file:///out?to=torch_dist&tp=0", "is not a positive number"),
        ("file:///out?to=torch_dist&tp=2&tp=4", "is given twice"),
        ("file:///out?overwrite=true", "is no option of a directory"),
        ("file:///out?to=torch_dist&reload=http://h:1", "engines load Hugging Face directories"),
        ("file:///out?to", "no list of options"),
    ],
)  # fmt: skip
def test_urls_that_make_no_sense(url: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        connect(url, source=None if "pushed" in words else "nowhere/here")


def test_one_engine_twice() -> None:
    with pytest.raises(UsageError, match="given twice"):
        connect_all(["unix:///a", "unix:///a"])


def test_one_engine_under_two_names(tmp_path: Path) -> None:
    with serving(model(0), tmp_path / "e") as engine:
        (tmp_path / "link").symlink_to(tmp_path / "e")
        with pytest.raises(UsageError, match="given twice") as caught:
            connect_all([engine.url, f"unix://{tmp_path}/link"])
        assert caught.value.found == f"`{engine.url}`, `unix://{tmp_path}/link`"
        with serving(model(0), tmp_path / "ranks/rank-0"), pytest.raises(UsageError, match="given twice"):
            connect_all([f"unix://{tmp_path}/ranks", f"unix://{tmp_path}/ranks/"])
    with pytest.raises(UsageError, match="given twice"):
        connect_all(["sglang+http://127.0.0.1:30000", "sglang+http://localhost:30000/"])
    assert len(connect_all(["sglang+http://127.0.0.1:30001", "sglang+http://localhost:30002"])) == 2


def test_a_server_known_by_its_start() -> None:
    """Behind a forwarded port, say."""
    pages = {"/server_info": {"startup_time": 7, "launch_command": "x"}, "/model_info": {"model_path": "m"}}
    with http(pages) as one, http(pages) as two, pytest.raises(UsageError, match="given twice"):
        connect_all([one, two])
    with http(pages) as one, http(pages | {"/server_info": {"startup_time": 8}}) as two:
        assert len(connect_all([one, two])) == 2


def test_what_is_no_sglang_is_said() -> None:
    from convtools.refit.serving import served

    with http({"/version": {"version": "0.32.0"}}) as url:
        (sink,) = connect(f"sglang+{url}")
        with pytest.raises(PeerError, match="is no SGLang server") as caught:
            served(sink, [Tensor("w", "F32", (2,))], 5)
        assert caught.value.fix == "give http://host:port, which asks the server what it is"


def test_a_directory_without_a_source() -> None:
    with pytest.raises(UsageError) as caught:
        connect("file:///out")
    assert "connect(url, source=CKPT)" in str(caught.value.fix)


def test_the_reference_engine_names_its_socket(tmp_path: Path) -> None:
    with serving(model(0), tmp_path / "e"):
        pages = {"/refit": {"directory": str(tmp_path / "e")}, "/info": {"model": "/models/tiny"}}
        with http(pages) as url:
            found = find(url)
    assert (found.kind, found.started_from) == ("reference engine", "/models/tiny")
    assert [s.name for s in found.sinks] == [url]


@pytest.mark.parametrize(
    "directory", [7, None, "", "relative", "/a\0b", "/a\x1b[31m", "/" + "x" * 5000, "/not/there"]
)
def test_a_directory_that_cannot_be(directory: object) -> None:
    with http({"/refit": {"directory": directory}}) as url, pytest.raises(PeerError) as caught:
        connect(url)
    assert "names no directory of a socket" in str(caught.value) or "which is not there" in str(caught.value)
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 1000


def test_sglang_and_vllm_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    with http({"/model_info": {"model_path": "org/model", "weight_version": "default"}}) as url:
        found = find(url)
    assert (found.kind, found.started_from, found.sinks[0].name) == ("SGLang", "org/model", url)
    assert find("sglang+http://host:30000").kind == "SGLang"
    with http({"/version": {"version": "0.32.0"}}) as url, pytest.raises(UsageError, match="looks like vLLM"):
        connect(url)


def test_a_key_is_asked_for_and_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(request: BaseHTTPRequestHandler, _: dict[str, Any]) -> tuple[int, object]:
        known = request.headers.get("Authorization") == "Bearer secret"
        return (200, {"model_path": "m"}) if known else (401, {})

    with http({"/model_info": locked}) as url:
        with pytest.raises(UsageError, match="wants an API key") as caught:
            connect(url)
        assert KEY_VARIABLE in str(caught.value.fix)
        monkeypatch.setenv(KEY_VARIABLE, "secret")
        assert find(url).kind == "SGLang"
        monkeypatch.setenv(KEY_VARIABLE, "a\nb")
        with pytest.raises(UsageError, match="no header can carry"):
            connect(url)


@pytest.mark.parametrize(
    "page",
    [
        b"<html>", b"[" * 100_000, b'{"directory": "/a", "directory": "/b"}', b"[1]", b"\xff\xfe", b"",
        b'{"directory": NaN}',
    ],
)  # fmt: skip
def test_answers_that_are_no_json_object(page: bytes) -> None:
    with http({"/refit": page}) as url, pytest.raises(PeerError, match="is no engine that is known"):
        connect(url)


def test_an_answer_without_end_is_not_read_to_the_end() -> None:
    def endless(request: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
        request.send_response(200)
        request.end_headers()
        for _ in range(MAX_ANSWER // 65536 + 64):
            request.wfile.write(b"x" * 65536)

    with http({"/refit": endless}) as url, pytest.raises(PeerError, match="too long"):
        connect(url)


@pytest.mark.parametrize("part", ["head", "body", "silence"])
def test_a_server_that_drips_is_not_waited_for(part: str) -> None:
    stop = threading.Event()

    def drip(request: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
        if part == "body":
            request.send_response(200)
            request.end_headers()
        elif part == "head":
            request.wfile.write(b"HTTP/1.0 200 OK\r\nX: ")
        while not stop.wait(0.05):
            if part != "silence":
                request.wfile.write(b"x")

    with http({"/refit": drip}) as url:
        began = time.monotonic()
        try:
            with pytest.raises(PeerError, match=r"no answer within 0\.4 s"):
                connect(url, timeout=0.4)
            assert time.monotonic() - began < 3
        finally:
            stop.set()


@pytest.mark.parametrize(
    "raw", [b"\x00\x01\x02", b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 500]
)
def test_what_speaks_no_http(raw: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(1000)
                peer.sendall(raw)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConvtoolsError, match="no server answers"):
            connect(f"http://127.0.0.1:{server.getsockname()[1]}", timeout=5)
        thread.join()


def test_versions_as_engines_write_them() -> None:
    assert [number(v) for v in (3, "12", "default", -1, True, None, "9" * 30, "٣", 1.5)] == [
        3, 12, None, None, None, None, None, None, None,
    ]  # fmt: skip
