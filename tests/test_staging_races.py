"""Kills, signals, rivals and readers: `dst` is the old whole or the new whole, and nothing stays behind."""

import json
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from convtools.errors import StorageError
from convtools.staging import Staging
from tests.publishing import NAMES, anything, beside, publish, python, tree, whole

CRASH = """
import ctypes, json, os, shutil, signal, sys
from pathlib import Path
from convtools import partial, staging
root, swap = Path(sys.argv[1]), sys.argv[2] == "swap"
if not swap:
    staging.exchange = lambda a, b: False

def publish(dst, text):
    with staging.Staging(dst, overwrite=True, replaceable=lambda p: None, fsync=False) as s:
        for name in ("a", "d/b", "c"):
            with s.open(name) as file:
                file.write(text)
        s.commit(last={"done": text})

def state(dst):
    if not dst.exists():
        return "absent"
    texts = {p.read_text() for p in dst.rglob("*") if p.is_file()}
    names = sorted(p.name for p in dst.rglob("*") if p.is_file())
    return texts.pop() if len(texts) == 1 and names == ["a", "b", "c", "done"] else f"mix {texts} {names}"

for step in range(1, 1000):
    dst = root / str(step) / "out"
    dst.parent.mkdir()
    publish(dst, b"old")
    pid = os.fork()
    if not pid:
        left = step
        def hook(event, args):
            global left
            if event == "open" or event.startswith(("os.", "shutil.", "fcntl.", "ctypes.")):
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        publish(dst, b"new")
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    crashed, litter = state(dst), len(list(dst.parent.iterdir())) - dst.exists()
    partial.look_around(dst)
    swept, rest = state(dst), len(list(dst.parent.iterdir()))
    publish(dst, b"newer")
    print(json.dumps([status, crashed, litter, swept, rest, state(dst), len(list(dst.parent.iterdir()))]))
    if status == 0:
        break
"""


@pytest.mark.parametrize("swap", [True, False])
def test_killed_before_each_system_call(tmp_path: Path, swap: bool) -> None:
    """kill -9 at every step of a run that replaces `dst`, as counted by Python's audit events."""
    process = python(CRASH, tmp_path, "swap" if swap else "aside")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert len(rows) > 30 and rows[-1][0] == 0 and {row[0] for row in rows[:-1]} == {-signal.SIGKILL}
    crashed = Counter(row[1] for row in rows)
    assert set(crashed) == ({"old", "new"} if swap else {"old", "new", "absent"}), crashed
    assert swap or crashed["absent"] <= 2  # between the two renames
    assert {row[2] for row in rows} == {0, 1}
    assert {row[3] for row in rows} == {"old", "new"}  # the next run puts an absent one back
    assert {tuple(row[4:]) for row in rows} == {(1, "newer", 1)}


WRITER = """
import sys, time
from pathlib import Path
from convtools.staging import Staging
with Staging(sys.argv[1], overwrite=True, replaceable=lambda p: None, fsync=False) as s:
    for i in range(4):
        with s.open(f"{i}.bin") as file:
            file.write(b"theirs")
            print("writing", flush=True)
            if sys.argv[2] == "wait":
                sys.stdin.readline()
            else:
                time.sleep(0.02)
    s.commit()
"""


@pytest.fixture
def writer(dst: Path) -> "Iterator[subprocess.Popen[str]]":
    """Another process that is writing `dst` and waits for us."""
    process = python(WRITER, dst, "wait")
    assert process.stdout and process.stdout.readline() == "writing\n"
    yield process
    process.kill()
    process.communicate()


def test_a_live_writer_is_named_and_left_in_peace(dst: Path, writer: "subprocess.Popen[str]") -> None:
    before = beside(dst)
    with pytest.raises(StorageError, match=f"is being written by process {writer.pid} on "), Staging(dst):
        pass
    assert beside(dst) == before and len(before) == 1
    _, err = writer.communicate("\n\n\n\n")
    assert writer.returncode == 0, err
    assert tree(dst) == {f"{i}.bin": "theirs" for i in range(4)}


def test_what_a_killed_writer_left_is_taken_away(dst: Path, writer: "subprocess.Popen[str]") -> None:
    writer.kill()
    writer.wait()
    assert len(beside(dst)) == 1
    publish(dst, "new")
    assert tree(dst) == whole("new") and beside(dst) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_takes_the_partial_directory_away(
    dst: Path, writer: "subprocess.Popen[str]", number: signal.Signals
) -> None:
    publish_free = beside(dst)
    writer.send_signal(number)
    writer.communicate(timeout=20)
    assert writer.returncode == (-number if number == signal.SIGINT else 128 + number)
    assert len(publish_free) == 1 and beside(dst) == [] and not dst.exists()


def test_handlers_are_put_back_and_the_callers_own_are_kept(dst: Path) -> None:
    def mine(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with Staging(dst):
            assert signal.getsignal(signal.SIGTERM) is mine
            assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.05, 0.07, 0.09])
def test_killed_at_some_moment_and_run_again(dst: Path, delay: float) -> None:
    publish(dst, "old")
    process = python(WRITER, dst, "hurry")
    assert process.stdout and process.stdout.readline() == "writing\n"
    threading.Event().wait(delay)
    process.kill()
    process.communicate()
    assert tree(dst) in (whole("old"), {f"{i}.bin": "theirs" for i in range(4)})
    publish(dst, "new", overwrite=True, replaceable=anything)
    assert tree(dst) == whole("new") and beside(dst) == []


RACER = """
import sys, time
from pathlib import Path
from convtools.errors import StorageError
from convtools.staging import Staging
root, me = Path(sys.argv[1]), sys.argv[2]
for i in range(12):
    (root / f"{i}.{me}").touch()
    while len(list(root.glob(f"{i}.?"))) < 2:
        pass
    try:
        with Staging(root / f"out{i}", fsync=False) as s:
            for name in ("a", "b"):
                with s.open(name) as file:
                    file.write(me.encode())
            s.commit()
        print("won")
    except StorageError as error:
        print("lost" if "is being written by" in str(error) or "is not empty" in str(error) else repr(error))
"""


def test_of_two_that_start_together_one_wins_and_one_is_told(tmp_path: Path) -> None:
    racers = [python(RACER, tmp_path, me) for me in "xy"]
    outs = [r.communicate(timeout=60) for r in racers]
    assert [r.returncode for r in racers] == [0, 0], outs
    rounds = list(zip(*(out.split("\n")[:-1] for out, _ in outs), strict=True))
    assert {tuple(sorted(r)) for r in rounds} == {("lost", "won")}
    for i, (x, _) in enumerate(rounds):
        winner = "x" if x == "won" else "y"
        assert tree(tmp_path / f"out{i}") == {"a": winner, "b": winner}
    assert not list(tmp_path.glob(".*"))


def test_a_reader_sees_the_old_or_the_new(dst: Path) -> None:
    """While `dst` is replaced again and again, it is never absent and its files never differ."""
    publish(dst, "0", fsync=False)
    seen: set[str] = set()
    faults: list[str] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                folder = os.open(dst, os.O_RDONLY | os.O_DIRECTORY)
            except OSError as error:
                faults.append(f"absent: {error}")
                continue
            try:
                texts = set()
                for name in NAMES:
                    with open(os.open(name, os.O_RDONLY, dir_fd=folder)) as file:
                        texts.add(file.read())
                seen.update(texts)
                if len(texts) != 1:
                    faults.append(f"mixed: {texts}")
            except FileNotFoundError as error:  # only while the replaced one is being removed
                if os.path.exists(dst) and os.path.samestat(os.stat(dst), os.fstat(folder)):
                    faults.append(f"incomplete: {error}")
            finally:
                os.close(folder)

    reader = threading.Thread(target=look)
    reader.start()
    for i in range(1, 150):
        publish(dst, str(i), overwrite=True, replaceable=anything, fsync=False)
    done.set()
    reader.join()
    assert faults == [] and len(seen) > 1
