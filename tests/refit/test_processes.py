"""Real processes, killed at every question, every write and every state: the other one goes on."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from convtools.refit.channels.local_memory import Server
from convtools.refit.errors import RefitError
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from tests.refit.engines import MODES, Engine, model, refill

FORKS = Path(__file__).with_name("forks.py")


class Forks:
    """Children that die where they are told to."""

    def __init__(self, process: Any) -> None:
        self._process = process

    def start(self, at: int, rest: object) -> None:
        self._process.stdin.write(f"{at} {rest}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "\n"


@contextmanager
def forks(what: str, where: Path) -> Iterator[Forks]:
    command = [sys.executable, str(FORKS), what, str(where)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Forks(process)
        finally:
            process.stdin.close()  # type: ignore[union-attr]
            process.wait(20)


def settle(engine: Engine) -> None:
    until = time.monotonic() + 5
    while engine.receiver.state == "updating":
        assert time.monotonic() < until
        time.sleep(0.002)
    with engine.receiver._lock:  # it has finished what it is at
        pass


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_killed_at_every_question(mode: str, tmp_path: Path) -> None:
    engine, source = Engine(mode), model(1)
    with (
        Server(engine.receiver, tmp_path / "e"),
        forks("trainer", tmp_path / "e") as trainers,
        WeightSync(source, [LocalSink(tmp_path / "e")], bucket_bytes=4096, timeout=5) as sync,
        engine.being_read(),
    ):
        questions = len(sync.plan.buckets) + 3  # Open, buckets, Prepare, Commit
        for at in range(questions + 1):
            base = 10 * at + 1
            refill(source, base)
            sync.push(base, force=True)
            trainers.start(at, base + 1)
            settle(engine)
            wrote = 1 < at < questions
            if at == questions:
                assert engine.look() == base + 1
            elif mode == "quarantine" and wrote:
                assert (engine.receiver.state, engine.receiver.version) == ("poisoned", base)
                assert engine.look() is None
            else:
                assert (engine.receiver.state, engine.look()) == ("clean", base)
        refill(source, 1000)
        assert sync.push(1000, force=True).version == 1000 and engine.look() == 1000
    assert engine.mixes == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_an_engine_killed_at_every_step_and_started_again(mode: str, tmp_path: Path) -> None:
    source = model(1)
    with forks("engine", tmp_path / "e") as engines:
        sync = WeightSync(source, [LocalSink(tmp_path / "e")], bucket_bytes=4096, timeout=5)
        with sync:
            died = 0
            for at in range(100):
                engines.start(at, mode)
                refill(source, at + 1)
                began = time.monotonic()
                try:
                    sync.push(at + 1)
                except RefitError:
                    died += 1
                    assert time.monotonic() - began < 10
                else:
                    break
            assert died >= len(sync.plan.buckets) + 5  # Agree, Open, begin, Prepare, Commit, and the writes
            assert not sync.verify().equal  # the very next question kills it
            engines.start(10_000, mode)  # another one in its place, at version 0
            assert sync.push(at + 2).sinks[0].version == at + 2 and sync.verify().equal
