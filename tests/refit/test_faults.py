"""A thousand seeded pushes in which one thing goes wrong: never a mix served, never a wrong version, no hang.

Trainer and engine are two threads with a socket between them; the connection of one of them damages one
frame, or a bucket is damaged in memory, or the engine fails, or a second trainer pushes at the same time.
Requests are answered all the while. After each run the next push succeeds and nothing is left open.
"""

import os
import random
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from convtools.refit.channels.connection import Connection, accept_peer, dial_peer
from convtools.refit.channels.local_memory import serve
from convtools.refit.errors import RefitError
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from tests.refit.engines import FAULTS, MODES, Engine, Faulty, model, refill

RUNS = 1000
TIMEOUT = 0.2
"""Seconds that either end waits for the other."""
WAITS = 12
"""A push that fails waits at most so often: Agree, Open, a bucket, Prepare, Commit, Abort, and some slack."""
KEY = b"k" * 32
KINDS = (*FAULTS, "bucket", "slow", "fails", "two trainers", "restart", "stalls")


class Pair(LocalSink):
    """An engine in a thread of this process, at the other end of a pair of sockets."""

    def __init__(self, engine: Engine, damage: dict[str, Any]) -> None:
        super().__init__("pair")
        self.engine, self.damage = engine, damage
        self.threads: list[threading.Thread] = []
        self.stop = threading.Event()

    def _dial(self, timeout: float) -> Connection:
        mine, its = socket.socketpair()
        self.stop = threading.Event()
        thread = threading.Thread(target=self._serve, args=(its, self.stop))
        thread.start()
        self.threads.append(thread)
        return self._damaged(dial_peer(mine, KEY, 2), "trainer")

    def _serve(self, sock: socket.socket, stop: threading.Event) -> None:
        try:
            connection = accept_peer(sock, KEY, 2)
        except RefitError:
            sock.close()
            return
        serve(self._damaged(connection, "engine"), self.engine.receiver, stop, TIMEOUT)

    def _damaged(self, connection: Connection, end: str) -> Connection:
        if self.damage.get("end") != end:
            return connection
        connection.__class__ = Faulty
        assert isinstance(connection, Faulty)
        connection.fault, connection.at, connection.seed = (self.damage[k] for k in ("fault", "at", "seed"))
        self.damage["end"] = None  # once
        return connection

    def finish(self) -> None:
        self.close()
        self.stop.set()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


def one_run(seed: int) -> tuple[str, str]:
    """(what went wrong, how it ended)."""
    random_ = random.Random(seed)
    kind, mode = KINDS[seed % len(KINDS)], random_.choice(MODES)
    engine, source = Engine(mode, slow=0.003 if kind == "slow" else 0), model(1)
    damage: dict[str, Any] = {}
    sink = Pair(engine, damage)
    sync = WeightSync(
        source, [sink], bucket_bytes=random_.choice([2048, 4096, 8192]), timeout=TIMEOUT * 2, lease=1
    )
    stop_other = threading.Event()
    try:
        with engine.being_read():
            assert sync.push(1).version == 1
            refill(source, 2)
            frames = len(sync.plan.buckets) + 4
            if kind in FAULTS:
                sync._links[
                    0
                ].drop()  # so that the new connection is the one that is damaged, from its Agree on
                damage |= {"fault": kind, "at": random_.randrange(frames), "seed": random_.getrandbits(30)}
                damage["end"] = random_.choice(["trainer", "engine"])
            elif kind == "bucket":
                _flip_in_memory(sync, random_.randrange(len(sync.plan.buckets)), random_)
            elif kind == "fails":
                _fail_once(engine, random_.choice(["begin", "write", "swap"]), random_.randrange(6))
            elif kind == "restart":
                _hang_up_at(sync, random_.randrange(len(sync.plan.buckets)), sink)
            elif kind == "stalls":
                _stall_at(engine, random_.randrange(6))
            other = _second_trainer(engine, stop_other) if kind == "two trainers" else None
            ended = _push(sync, 2)
            stop_other.set()
            if other is not None:
                other.join(20)
                assert not other.is_alive()
            _settled(engine, sync, sink)
            allowed = {0, 1, 2} | ({102} if kind == "two trainers" else set())
            assert engine.receiver.version in allowed - {0}, engine.receiver.version
            if ended == "pushed" and other is None:
                assert engine.look() == 2
            if engine.receiver.state == "poisoned":
                assert mode == "quarantine" and engine.look() is None
            else:
                assert engine.look() == engine.receiver.version, (seed, kind, ended, engine.receiver.state)
            refill(source, 203)
            assert sync.push(203, force=True).version == 203
            assert engine.look() == 203 and sync.verify().equal
        assert engine.mixes == [], engine.mixes
        assert engine.served <= allowed | {203}
        return kind, ended
    finally:
        stop_other.set()
        sync.close()
        sink.finish()


def _push(sync: WeightSync, version: int) -> str:
    began = time.monotonic()
    try:
        sync.push(version)
    except RefitError:
        return "refused"
    finally:
        # The deadlines, and generous room for a machine that is busy with other things.
        assert time.monotonic() - began < WAITS * TIMEOUT * 2 + 10
    return "pushed"


def _settled(engine: Engine, sync: WeightSync, sink: Pair) -> None:
    """The engine has noticed what happened: every connection that was given up is over at its end too."""
    began = time.monotonic()
    for thread in sink.threads[:-1] if sync._links[0].connected else sink.threads:
        thread.join(10)
        assert not thread.is_alive()
    while engine.receiver.state == "updating":  # at the latest when the lease of a second is over
        engine.receiver.expire()
        assert time.monotonic() - began < 10
        time.sleep(0.002)


def _flip_in_memory(sync: WeightSync, index: int, random_: random.Random) -> None:
    """A bit of a bucket changes after its checksum was taken."""
    link = sync._links[0]
    send = link.send_bucket

    def flipped(question: Any, timeout: float) -> None:
        if question.index == index:
            data = sync._ring.slot(question.slot, question.nbytes)
            data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
            del link.send_bucket
        send(question, timeout)

    link.send_bucket = flipped


def _hang_up_at(sync: WeightSync, index: int, sink: Pair) -> None:
    """The engine's end goes away in the middle, as one that is started again does."""
    link = sync._links[0]
    send = link.send_bucket

    def gone(question: Any, timeout: float) -> None:
        if question.index == index:
            del link.send_bucket
            sink.stop.set()
        send(question, timeout)

    link.send_bucket = gone


def _fail_once(engine: Engine, what: str, count: int) -> None:
    original = getattr(engine.applier, what)
    left = [count if what == "write" else 0]

    def fails(*args: Any) -> Any:
        if left[0] == 0:
            delattr(engine.applier, what)
            raise OSError(28, "No space left on device")
        left[0] -= 1
        return original(*args)

    setattr(engine.applier, what, fails)


def _stall_at(engine: Engine, count: int) -> None:
    """One write takes longer than the trainer waits."""
    original, left = engine.applier.write, [count]

    def stalls(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            del engine.applier.write
            time.sleep(TIMEOUT * 3)
        return original(*args)

    engine.applier.write = stalls


def _second_trainer(engine: Engine, stop: threading.Event) -> threading.Thread:
    def push() -> None:
        sink = Pair(engine, {})
        with WeightSync(model(102), [sink], bucket_bytes=2048, timeout=TIMEOUT * 2, lease=1) as sync:
            while not stop.is_set():
                try:
                    sync.push(102, force=True)
                    break
                except RefitError:
                    time.sleep(0.001)
        sink.finish()

    thread = threading.Thread(target=push)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_thousand_pushes_that_go_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    one_run(0)  # what the first run leaves open for good (imports) is not of its making
    fds, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        ended = Counter(pool.map(one_run, range(RUNS)))
    assert len(os.listdir("/proc/self/fd")) <= len(fds)
    assert threading.active_count() == threads
    assert "convtools-refit" not in Path("/proc/self/maps").read_text()
    assert sum(ended.values()) == RUNS
    for kind in KINDS:
        assert ended[kind, "refused"] or kind in ("delay", "slow", "two trainers"), ended
    assert all(ended[kind, "pushed"] for kind in ("delay", "slow", "two trainers")), ended
    with capsys.disabled():
        refused = sum(n for (_, how), n in ended.items() if how == "refused")
        print(f"\n{RUNS} pushes with a fault: {refused} refused, {RUNS - refused} committed, no mix, no leak")
