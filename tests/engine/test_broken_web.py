"""Requests that are slow, cold or many: the next one is answered."""

import socket
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from convtools.engine import web
from convtools.engine.reference import ReferenceEngine

PROMPT = [3, 1, 4, 1, 5]


def test_a_byte_now_and_then_buys_no_time(llamas: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "TIMEOUT", 0.6)
    with ReferenceEngine(llamas[0]) as engine:
        for said in (
            b"GET /health HTTP/1.0\r\nX: ",
            b"POST /generate HTTP/1.0\r\nContent-Length: 99\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", urlsplit(engine.url).port or 0), 5) as sock:
                sock.sendall(said)
                began = time.monotonic()
                with pytest.raises(OSError):
                    while time.monotonic() - began < 5:
                        time.sleep(0.1)
                        sock.sendall(b"x")
                assert time.monotonic() - began < 3


def test_a_place_is_free_again_when_no_thread_could_be_started(
    llamas: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ReferenceEngine(llamas[0]) as engine:
        at = ("127.0.0.1", urlsplit(engine.url).port or 0)

        def start(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            for _ in range(web.MAX_CONNECTIONS + 1):
                with socket.create_connection(at, 5) as sock:
                    assert sock.recv(99) == b""
        with socket.create_connection(at, 5) as sock:
            sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert sock.recv(99).startswith(b"HTTP/1.0 200")


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-30])
def test_the_coldest_temperature_is_greedy(llamas: tuple[Path, Path], temperature: float) -> None:
    with ReferenceEngine(llamas[0]) as engine:
        greedy = engine.generate(PROMPT, max_new_tokens=8)
        assert engine.generate(PROMPT, max_new_tokens=8, temperature=temperature, seed=1) == greedy
