"""An engine that was killed and started again at its address, met by a trainer that kept its `WeightSync`."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from convtools.refit.errors import PeerError, RefitError
from convtools.refit.sinks.url import connect
from convtools.refit.sync import WeightSync
from tests.refit.serving import http

ROOT = Path(__file__).parents[2]


@contextmanager
def engine(model: Path, port: int, *more: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "convtools", "engine", str(model), "--port", str(port), "--with-parent"]
    process = subprocess.Popen([*command, *more], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("own", [False, True])
def test_the_next_push_finds_it(own: bool, llamas: tuple[Path, Path], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, more = f"http://127.0.0.1:{port}", ("--refit-dir", str(tmp_path / "refit")) if own else ()
    with engine(llamas[0], port, *more) as first:
        sync = WeightSync(str(llamas[1]), connect(url))
        before = sync._links[0].sink.directory  # type: ignore[attr-defined]
        sync.push(1)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    with sync:
        for version in (2, 3):
            with pytest.raises(RefitError, match="the engine does not answer: no server answers") as caught:
                sync.push(version)
            assert "start it again at this address (convtools engine MODEL --port N)" in str(caught.value.fix)
            assert f"now `{url}` unknown at version 1" in str(caught.value.found)
        with engine(llamas[0], port, *more):
            assert sync.push(4).sinks[0].version == 4 and sync.verify().equal and sync.check().ok
            assert (sync._links[0].sink.directory == before) == own  # type: ignore[attr-defined]


def test_what_answers_there_now_may_be_something_else(llamas: tuple[Path, Path], tmp_path: Path) -> None:
    from tests.refit.engines import model
    from tests.refit.serving import serving

    pages: dict[str, object] = {"/refit": {"directory": str(tmp_path / "e")}, "/info": {}}
    with serving(model(0), tmp_path / "e"), http(pages) as url, WeightSync(model(1), connect(url)) as sync:
        sync.push(1)
        sync._links[0].drop()
        pages["/refit"] = {"directory": str(tmp_path / "gone")}
        with pytest.raises(RefitError, match="which is not there") as caught:
            sync.push(2)
        assert "start the engine again" in str(caught.value.fix) and "--refit-dir" in str(caught.value.fix)
        del pages["/refit"]
        with pytest.raises(RefitError, match="no `convtools engine` answers there now"):
            sync.push(2)
        with pytest.raises(PeerError, match="is no engine that is known"):
            connect(url)
