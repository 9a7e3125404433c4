"""The example as a user runs it: it learns, the engine serves what was learnt, and nothing is left behind."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
ROW = re.compile(
    r"(?P<step>\d+) +(?P<reward>\d\.\d+) +(?P<mtp>\d+\.\d+) +(?P<norm>\d+\.\d+) +(?P<apart>\d+\.\d+) +"
    r"(?P<version>\d+) +(?P<speed>\d+\.\d+)  all (?P<equal>\d+) tensors"
)


@pytest.mark.slow
def test_the_example_learns_and_the_engine_follows(tmp_path: Path) -> None:
    ran = subprocess.Popen(
        [sys.executable, "examples/rl.py", "--steps", str(STEPS)], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "PYTHONPATH": "."},
    )  # fmt: skip
    try:
        said, wrong = ran.communicate(timeout=240)
    finally:
        left = of_session(ran.pid)
        for process in left:
            process.kill()
    assert ran.returncode == 0, wrong[-3000:]
    assert left == []  # staging memory is sealed memfds, which go with the last process
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith("torchinductor")] == []

    assert "56 tensors, 196,664 bytes: the engine's checkpoint is what the trainer holds" in said
    assert re.search(r"self-test: [1-9]\d* canaries showed where they should, and nowhere else", said)
    rows = [match.groupdict() for match in map(ROW.fullmatch, map(str.strip, said.splitlines())) if match]
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    assert [int(row["version"]) for row in rows] == list(range(1, STEPS + 1))
    assert {row["equal"] for row in rows} == {"56"}
    rewards = [float(row["reward"]) for row in rows]
    assert 0.15 < rewards[0] < 0.35  # one token in four is a good one
    assert rewards[-1] > rewards[0] + 0.15, rewards
    assert max(float(row["apart"]) for row in rows) < 0.1  # bf16, computed in another order
    assert all(float(row["norm"]) > 0 for row in rows)


def of_session(number: int, seconds: float = 5.0) -> list[psutil.Process]:
    """Processes that are still of a session; multiprocessing's own watcher ends a bit after its parent."""
    until = time.monotonic() + seconds
    while left := [p for p in psutil.process_iter() if session(p) == number]:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return left


def session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except (ProcessLookupError, PermissionError):
        return -1
