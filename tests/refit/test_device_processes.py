"""Buckets on a device between processes: every block that is opened is closed, and then freed.

The twin on the CPU runs the same code over sealed memory; with a GPU, `pytest -m gpu` runs it over CUDA IPC.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from convtools.refit.device.memory import memory_of
from convtools.refit.errors import RefitError
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from tests.refit.device_engine import on

BUCKET = 4096
ON = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class Process:
    """An engine."""

    def __init__(self, where: Path, mode: str, device: str) -> None:
        script = Path(__file__).with_name("device_engine.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(where), mode, device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.sink = LocalSink(where)

    def ready(self) -> Self:
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"
        return self

    def tell(self) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        told: dict[str, Any] = json.loads(self._process.stdout.readline())
        return told

    def kill(self) -> None:
        self._process.kill()
        self._end()

    def stop(self) -> None:
        self._end()
        assert self._process.returncode == 0

    def _end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(30)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts engines; those that a test did not end are ended after it."""
    made: list[Process] = []

    def begin(name: str, mode: str, device: str) -> Process:
        made.append(Process(tmp_path / name, mode, device))
        return made[-1]

    yield begin
    for process in made:
        process.kill()


def open_files() -> set[str]:
    """All but pipes, which are those of the engines."""
    links = (Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return {
        of for link in links if link.is_symlink() and not (of := str(link.readlink())).startswith("pipe:")
    }


def staging(of: str) -> int:
    """Mappings of staging memory in a process."""
    return sum("convtools-refit" in line for line in Path(f"/proc/{of}/maps").read_text().splitlines())


@ON
@pytest.mark.slow
def test_opens_closes_and_exports_are_as_many(device: str, start: Callable[..., Process]) -> None:
    engines = [start(mode, mode, device) for mode in ("shadow", "undo")]
    memory, source = memory_of(device), on(device, 0)
    sinks = [engine.ready().sink for engine in engines]
    before, mapped = open_files(), staging("self")
    with WeightSync(source, sinks, bucket_bytes=BUCKET, device=memory) as sync:
        assert len(sync.plan.buckets) >= 4
        for version in range(1, 21):
            for tensor in source.values():
                tensor.fill_(version)
            sync.push(version)
        assert sync.verify().equal
        assert [e.tell()["found"] for e in engines] == [[20.0]] * 2
        assert [(e.tell()["opened"], e.tell()["closed"]) for e in engines] == [(1, 0)] * 2
        assert (memory.counts.allocated, memory.counts.exported, memory.counts.freed) == (1, 2, 0)
    told = [e.tell() for e in engines]
    assert sum(t["opened"] for t in told) == sum(t["closed"] for t in told) == memory.counts.exported == 2
    assert memory.counts.freed == memory.counts.allocated == 1
    assert open_files() == before and staging("self") == mapped
    assert [staging(str(e._process.pid)) for e in engines] == [0, 0]
    for engine in engines:
        engine.stop()


@ON
@pytest.mark.slow
def test_engines_that_are_killed_or_started_again_leave_nothing(
    device: str, start: Callable[..., Process]
) -> None:
    memory, source = memory_of(device), on(device, 0)
    stays = start("stays", "shadow", device)
    dies = start("dies", "shadow", device)
    sinks = [stays.ready().sink, dies.ready().sink]
    before, mapped = open_files(), staging("self")
    with WeightSync(source, sinks, bucket_bytes=BUCKET, device=memory, timeout=20) as sync:
        for version in range(1, 5):
            for tensor in source.values():
                tensor.fill_(version)
            if version == 2:
                dies.kill()
                with pytest.raises(RefitError):
                    sync.push(version)
                assert stays.tell()["version"] == 1 and stays.tell()["found"] == [1.0]
                dies = start("dies", "shadow", device)
                dies.ready()
            if version == 4:
                dies.stop()
                dies = start("dies", "undo", device)
                dies.ready()
            sync.push(version, force=True)
            assert stays.tell()["found"] == dies.tell()["found"] == [version]
    told = stays.tell(), dies.tell()
    assert [t["opened"] for t in told] == [t["closed"] for t in told]
    assert memory.counts.freed == memory.counts.allocated == 1
    # Every reader that there ever was: one that stayed, and three one after another.
    assert memory.counts.exported == 1 + 3 and [t["opened"] for t in told] == [1, 1]
    stays.stop()
    dies.stop()
    assert open_files() == before and staging("self") == mapped


_TRAINER = """
import os, signal, sys
sys.path.insert(0, {root!r})
from convtools.refit.link import Link
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from tests.refit.device_engine import on
send, left = Link.send_bucket, [2]
def dying(self, question, timeout):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    send(self, question, timeout)
Link.send_bucket = dying
WeightSync(on({device!r}, 5), [LocalSink({where!r})], bucket_bytes=4096, device={device!r}).push(5)
"""


@ON
@pytest.mark.slow
def test_a_trainer_that_is_killed_leaves_nothing_open(
    device: str, tmp_path: Path, start: Callable[..., Process]
) -> None:
    engine = start("e", "undo", device).ready()
    root = str(Path(__file__).parents[2])
    code = _TRAINER.format(root=root, device=device, where=str(tmp_path / "e"))
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    source = on(device, 1)
    with WeightSync(source, [engine.sink], bucket_bytes=BUCKET, device=device) as sync:
        sync.push(1)
    told = engine.tell()
    assert (told["version"], told["found"], told["opened"], told["closed"]) == (1, [1.0], 2, 2)
    assert staging(str(engine._process.pid)) == 0
    engine.stop()
