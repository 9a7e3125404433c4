"""`convtools engine` in a process of its own, and trainers that are killed in the middle of a push."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from convtools.engine import reference
from convtools.engine.process import Started, started
from convtools.engine.reference import MODES, ReferenceEngine
from convtools.errors import ConvtoolsError, UsageError
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync

ROOT = Path(__file__).parents[2]
PROMPT = [3, 1, 4, 1, 5]
TRAINER = """
import sys
from convtools.refit.link import Link
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from tests.refit.forks import die_at
src, where, at = sys.argv[1:]
sync = WeightSync(src, [LocalSink(where)], bucket_bytes=4096)
die_at(int(at), (Link, "_send"))
sync.push(9)
"""


def gone(pid: int) -> bool:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_that_is_killed_in_the_middle(mode: str, llamas: tuple[Path, Path]) -> None:
    with ReferenceEngine(llamas[0], mode=mode, wait=5) as engine:
        before = engine.generate(PROMPT)
        command = [sys.executable, "-c", TRAINER, str(llamas[1]), str(engine.refit_dir), "4"]
        assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == -signal.SIGKILL
        until = time.monotonic() + 10
        while engine.state == "updating":
            assert time.monotonic() < until
            time.sleep(0.01)
        assert engine.version == 0
        if mode == "in-place":
            assert engine.state == "poisoned"
            with pytest.raises(ConvtoolsError, match="a mix"):
                engine.generate(PROMPT)
        else:
            assert (engine.state, engine.generate(PROMPT)) == ("clean", before)
        with WeightSync(str(llamas[1]), [LocalSink(engine.refit_dir)]) as sync:
            sync.push(9)
        with ReferenceEngine(llamas[1], version=9) as fresh:
            assert engine.generate(PROMPT) == fresh.generate(PROMPT)


PARENT = """
import json, os, signal, sys
from convtools.engine.process import Started, started
with started(sys.argv[1], refit_dir=sys.argv[2], mode="in-place-undo", version=2) as engine:
    said = {"pid": engine.pid, "at": str(engine.refit_dir), "info": engine.get("info")}
    print(json.dumps(said | {"made": engine.generate([3, 1, 4], max_new_tokens=4)}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_does_not_outlive_the_one_who_started_it(llamas: tuple[Path, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(llamas[0]), str(tmp_path / "r")]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=120)
    said = json.loads(run.stdout)
    assert run.returncode == -signal.SIGKILL and gone(said["pid"])
    assert list((tmp_path / "r").iterdir()) == [], "nor leaves a socket"
    info = said["info"]
    assert said["at"] == str(tmp_path / "r")
    assert (info["version"], info["mode"], info["model"]) == (2, "in-place-undo", str(llamas[0]))
    with ReferenceEngine(llamas[0], version=2) as engine:
        wanted = engine.generate([3, 1, 4], max_new_tokens=4)
    assert said["made"] == {"ids": wanted.ids, "logprobs": wanted.logprobs, "versions": [[2] * 4]}


def cli(*arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "convtools", "engine", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_command_says_one_line_takes_a_push_and_ends_on_ctrl_c(
    llamas: tuple[Path, Path], tmp_path: Path
) -> None:
    with cli(llamas[0], "--refit-dir", tmp_path / "r", "--threads", 1) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready: http://127.0.0.1:") and line.endswith(
            f"refit at unix://{tmp_path}/r\n"
        )
        engine = Started(line.split()[1], tmp_path / "r", process.pid)
        with WeightSync(str(llamas[1]), [LocalSink(engine.refit_dir)]) as sync:
            sync.push(3)
            assert sync.verify().equal
        answer = engine.generate(PROMPT, max_new_tokens=8)
        with ReferenceEngine(llamas[1], version=3) as fresh:
            wanted = fresh.generate(PROMPT, max_new_tokens=8)
        assert answer == {"ids": wanted.ids, "logprobs": wanted.logprobs, "versions": wanted.versions}
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "", "")
    assert list((tmp_path / "r").iterdir()) == []


def test_a_model_that_is_none_is_said_in_a_line_or_two(tmp_path: Path) -> None:
    with cli(tmp_path / "none") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "") and err.startswith("error: there is no folder"), err
    assert "Traceback" not in err
    with pytest.raises(ConvtoolsError, match="there is no folder"), started(tmp_path / "none"):
        pass


def test_a_port_that_is_taken_is_found_before_the_model_is_loaded(
    llamas: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(_: Path) -> None:
        raise AssertionError("it was loaded")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with cli(llamas[0], "--port", port) as process:
            out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (2, "") and f"cannot listen at 127.0.0.1:{port}" in err
        with monkeypatch.context() as patch, pytest.raises(UsageError, match="cannot listen at"):
            patch.setattr(reference, "load", loads)
            ReferenceEngine(llamas[0], port=port)


def test_nobody_is_answered_before_it_serves_and_the_port_is_free_after_a_failure(
    llamas: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def fails(_: Path) -> None:
        seen.append(True)
        with pytest.raises(ConnectionRefusedError):  # bound, and not yet listening
            socket.create_connection(("127.0.0.1", port), 5)
        raise UsageError("no such model")

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="no such model"):
        patch.setattr(reference, "load", fails)
        ReferenceEngine(llamas[0], port=port)
    with ReferenceEngine(llamas[0], port=port) as engine:
        assert engine.url == f"http://127.0.0.1:{port}" and seen == [True]
