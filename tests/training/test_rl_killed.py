"""The example when one of its processes is killed: the others end, and nothing of theirs is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.training.test_rl import ROOT, of_session


@pytest.mark.slow
@pytest.mark.parametrize("who", ["main", "engine"])
def test_whoever_is_killed_the_others_end_and_tidy_up(who: str, tmp_path: Path) -> None:
    ran = subprocess.Popen(
        [sys.executable, "examples/rl.py", "--steps", "500"], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "PYTHONPATH": "."},
    )  # fmt: skip
    try:
        assert ran.stdout is not None
        assert any(line.split()[:1] == ["2"] for line in ran.stdout), "it did not come to its second step"
        number = ran.pid if who == "main" else the_engine(ran.pid)
        os.kill(number, signal.SIGKILL)
        ran.wait(30)
        left = of_session(ran.pid, 30)
    finally:
        for process in of_session(ran.pid, 0):
            process.kill()
        ran.communicate()
    assert left == []
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith("torchinductor")] == []


def the_engine(main: int) -> int:
    (found,) = [p.pid for p in psutil.Process(main).children(recursive=True) if "engine" in p.cmdline()]
    return found
