"""HTTP: what it answers, and that no request can end it."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from convtools.engine.reference import ReferenceEngine
from convtools.engine.web import MAX_BODY
from convtools.errors import UsageError
from convtools.refit.protocol import POISONED
from convtools.refit.sinks.url import connect
from convtools.refit.sync import WeightSync
from tests.engine.running import slowed

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def engine(llamas: tuple[Path, Path]) -> Iterator[ReferenceEngine]:
    with ReferenceEngine(llamas[0], version=3) as made:
        yield made


def ask(
    engine: ReferenceEngine, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, Any]:
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(urlsplit(engine.url).netloc, timeout=30)
    try:
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_pages(engine: ReferenceEngine) -> None:
    assert engine.url.startswith("http://127.0.0.1:")
    assert ask(engine, "GET", "/health") == (200, {"state": "clean", "version": 3})
    assert ask(engine, "GET", "/refit") == (200, {"directory": str(engine.refit_dir)})
    status, info = ask(engine, "GET", "/info")
    assert status == 200 and info["in_flight"] == ["drain", "abort", "keep"]
    assert (info["version"], info["state"], info["carried"], info["vocab"]) == (3, "clean", [], 37)
    assert info["nbytes"] == sum(t.nbytes for t in engine.loaded.named.values())
    assert info["computed"] == ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]


def test_generate(engine: ReferenceEngine) -> None:
    wanted = engine.generate(PROMPT, max_new_tokens=5)
    status, answer = ask(engine, "POST", "/generate", {"input_ids": PROMPT, "max_new_tokens": 5})
    assert status == 200 and answer == {
        "ids": wanted.ids, "logprobs": wanted.logprobs, "versions": [[3] * 5]
    }  # fmt: skip
    two = {"input_ids": [PROMPT, PROMPT[:2]], "max_new_tokens": 5, "temperature": 0.7, "seed": 4}
    first, second = ask(engine, "POST", "/generate", two), ask(engine, "POST", "/generate", two)
    assert first == second and [len(row) for row in first[1]["ids"]] == [5, 5]


BAD: dict[str, tuple[object, str]] = {
    "no JSON": (b"input_ids", "malformed"),
    "not UTF-8": (b'{"input_ids": "\xff"}', "schema"),
    "no object": ([1, 2], "object"),
    "nothing": ({}, "input_ids"),
    "no prompts": ({"input_ids": []}, "length >= 1"),
    "an empty prompt": ({"input_ids": [[]]}, "length >= 1"),
    "text": ({"input_ids": "hello"}, "array"),
    "a token that is a float": ({"input_ids": [1.5]}, "float"),
    "a token that is true": ({"input_ids": [True]}, "bool"),
    "a token below 0": ({"input_ids": [-1]}, ">= 0"),
    "a token that is too high": ({"input_ids": [3, 37]}, "vocabulary"),
    "a huge token": (b'{"input_ids": [' + b"9" * 400 + b"]}", "schema"),
    "tokens beside prompts": ({"input_ids": [1, [2]]}, "beside"),
    "too many prompts": ({"input_ids": [[1]] * 257}, "too many prompts"),
    "too long": ({"input_ids": [1] * 4090, "max_new_tokens": 7}, "at most 4096 tokens"),
    "no new tokens": ({"input_ids": [1], "max_new_tokens": 0}, ">= 1"),
    "too many new tokens": ({"input_ids": [1], "max_new_tokens": 1 << 40}, "max_new_tokens"),
    "a cold temperature": ({"input_ids": [1], "temperature": -1}, "temperature"),
    "no temperature": (b'{"input_ids": [1], "temperature": NaN}', "malformed"),
    "an infinite temperature": (b'{"input_ids": [1], "temperature": 1e999}', "temperature|range|<="),
    "an unknown field": ({"input_ids": [1], "n": 1}, "unknown field"),
    "deep": (b"[" * 100000, "schema|recursion"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_told_what_is_wrong(name: str, engine: ReferenceEngine) -> None:
    import re

    body, wanted = BAD[name]
    status, answer = ask(engine, "POST", "/generate", body)
    assert status == 400 and re.search(wanted, answer["error"]), answer
    assert "Traceback" not in answer["error"]
    assert ask(engine, "GET", "/health")[0] == 200


def test_routes_and_sizes(engine: ReferenceEngine) -> None:
    assert ask(engine, "GET", "/")[0] == 404
    assert "POST /generate" in ask(engine, "POST", "/v1/completions", {})[1]["error"]
    assert ask(engine, "GET", "/generate")[0] == 405
    assert ask(engine, "POST", "/info", {})[0] == 405
    assert ask(engine, "GET", "/../../etc/passwd")[0] == 404
    for length, status in ((str(MAX_BODY + 1), 413), ("-1", 411), ("1e3", 411), ("9" * 30, 411)):
        sock = dial(engine)
        sock.sendall(f"POST /generate HTTP/1.0\r\nContent-Length: {length}\r\n\r\n".encode())
        assert f" {status} ".encode() in sock.recv(4096)
        sock.close()


def dial(engine: ReferenceEngine) -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(engine.url).port or 0), 10)


def test_peers_that_say_nothing_or_go_away(engine: ReferenceEngine) -> None:
    silent = [dial(engine) for _ in range(8)]
    for said in (
        b"",
        b"\0" * 64,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /generate HTTP/1.0\r\nContent-Length: 99\r\n\r\n{",
    ):
        with dial(engine) as sock:
            sock.sendall(said)
    body = json.dumps({"input_ids": PROMPT, "max_new_tokens": 50}).encode()
    with dial(engine) as sock:  # and one that does not wait for its answer
        sock.sendall(b"POST /generate HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert ask(engine, "POST", "/generate", {"input_ids": PROMPT})[0] == 200
    for sock in silent:
        sock.close()


def test_too_many_at_once_are_turned_away(engine: ReferenceEngine) -> None:
    crowd = [dial(engine) for _ in range(64)]
    with dial(engine) as late:
        assert late.recv(4096).startswith(b"HTTP/1.0 503 ")
    for sock in crowd:
        sock.close()
    until = time.monotonic() + 10
    while True:
        try:
            assert ask(engine, "GET", "/health")[0] == 200
            break
        except (AssertionError, OSError, json.JSONDecodeError):
            assert time.monotonic() < until
            time.sleep(0.05)


def test_its_url_is_a_sink_whose_self_test_hears_what_it_says(llamas: tuple[Path, Path]) -> None:
    with ReferenceEngine(llamas[0]) as engine:
        (sink,) = connect(engine.url)
        before = sink.outputs(10)  # type: ignore[attr-defined]
        with WeightSync(str(llamas[1]), [sink]) as sync:
            report = sync.check(1)
        assert report.ok and report.outputs == (engine.url,)
        (sink,) = connect(engine.url)
        assert sink.outputs(10) != before  # type: ignore[attr-defined]


def test_an_engine_that_answers_differently_after_the_same_push_is_found(llamas: tuple[Path, Path]) -> None:
    """The weights are equal to the last bit, what is said is not: no fingerprint shows it."""
    with ReferenceEngine(llamas[0]) as engine:
        norm, calls = engine.loaded.model.model.norm, [0]

        def drift(module: object, given: object, out: Any) -> Any:
            calls[0] += 1
            return out * (1 + calls[0])

        norm.register_forward_hook(drift)
        with WeightSync(str(llamas[0]), connect(engine.url)) as sync:
            report = sync.check()
        assert not report.ok and "what it answers" in report.faults[0]


def test_poisoned_it_says_why(llamas: tuple[Path, Path]) -> None:
    with ReferenceEngine(llamas[0], mode="in-place") as engine:
        engine.receiver._state, engine.receiver.reason = POISONED, "a trainer died"
        engine.receiver.gate.shut()
        began = time.monotonic()
        status, answer = ask(engine, "POST", "/generate", {"input_ids": PROMPT})
        assert (status, ask(engine, "GET", "/health")[0]) == (503, 503)
        assert "a mix of two versions" in answer["error"] and "a trainer died" in answer["error"]
        assert time.monotonic() - began < 2, "there is nothing to wait for"


def test_what_a_model_raises_is_an_answer(llamas: tuple[Path, Path]) -> None:
    with ReferenceEngine(llamas[0]) as engine:
        kept = engine.loaded.named["model.norm.weight"].clone()
        engine.loaded.named["model.norm.weight"].fill_(float("nan"))
        status, answer = ask(engine, "POST", "/generate", {"input_ids": PROMPT})
        assert (status, answer) == (500, {"error": "the model's logits are not finite"})
        engine.loaded.named["model.norm.weight"].copy_(kept)
        engine.prefixes.flush()
        assert ask(engine, "POST", "/generate", {"input_ids": PROMPT})[0] == 200


def test_closing_ends_requests_and_leaves_nothing(llamas: tuple[Path, Path], tmp_path: Path) -> None:
    from tests.engine.running import Running

    with ReferenceEngine(llamas[0], refit_dir=tmp_path / "r") as engine, slowed(engine) as wait:
        idle = dial(engine)
        request = Running(engine, PROMPT, max_new_tokens=4000)
        wait(5)
        began = time.monotonic()
        engine.close()
        assert time.monotonic() - began < 5
        assert "stopped" in str(request.join().error)
        assert list((tmp_path / "r").iterdir()) == []
        idle.close()
        with pytest.raises(OSError):
            dial(engine)
    with ReferenceEngine(llamas[0]) as engine, pytest.raises(UsageError, match="cannot listen"):
        ReferenceEngine(llamas[0], port=urlsplit(engine.url).port or 0)
    assert not engine.refit_dir.exists()
