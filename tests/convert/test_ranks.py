"""Several processes on one conversion: the same bytes, and never a hang when one of them is gone."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from convtools import Options
from convtools.conversion.api import open_source, plan_target
from convtools.conversion.dtypes import wanted_dtypes
from convtools.conversion.run import file_shares
from convtools.conversion.world import joined_world
from convtools.errors import UsageError
from tests.commands import MEDIUM, SMALL, beside, files_made, hashes, refused, run, start, wait_until
from tests.nemotron_checkpoints import write_hf

pytest.importorskip("torch")

TORCH_DIST = ("--to", "torch_dist", "--tp", "8")


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = write_hf(tmp_path_factory.mktemp("medium") / "hf", MEDIUM, shard=30_000_000)
    yield root
    shutil.rmtree(root)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "small", SMALL, shard=4000)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextmanager
def by_hand(commands: list[tuple[object, ...]]) -> Iterator[list["subprocess.Popen[str]"]]:
    """One rank a command, without torchrun, which would end the others when one has died."""
    world = {"WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start(*args, env=world | {"RANK": str(r)}) for r, args in enumerate(commands)]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def ended(process: "subprocess.Popen[str]", seconds: float) -> "subprocess.CompletedProcess[str]":
    out, err = process.communicate(timeout=seconds)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.slow
def test_torchrun_gives_the_same_bytes(medium: Path, tmp_path: Path) -> None:
    assert run("convert", medium, tmp_path / "one", *TORCH_DIST).returncode == 0
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port", str(free_port())]
    convert = ["-m", "convtools", "convert", str(medium), str(tmp_path / "three"), *TORCH_DIST]
    done = subprocess.run([sys.executable, *launch, *convert], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("converted") == 1
    assert hashes(tmp_path / "three") == hashes(tmp_path / "one")
    assert {p.name for p in tmp_path.iterdir()} == {"one", "three"}
    shutil.rmtree(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["hf", "torch"])
def test_every_format_comes_out_the_same(small: Path, tmp_path: Path, to: str) -> None:
    size = ("--max-shard-size", "4000") if to == "hf" else ("--tp", "2", "--ep", "2")
    assert run("convert", small, tmp_path / "one", "--to", to, *size).returncode == 0
    with by_hand([("convert", small, tmp_path / "two", "--to", to, *size)] * 2) as ranks:
        done = [ended(p, 60) for p in ranks]
    assert [d.returncode for d in done] == [0, 0], done
    assert done[1].stdout == "" and hashes(tmp_path / "two") == hashes(tmp_path / "one")


def test_each_file_is_one_ranks_and_the_load_is_even(medium: Path) -> None:
    options = Options(to="torch_dist", tp=8)
    source = open_source(medium)
    target = plan_target(source, options, wanted_dtypes(source, options)[0])
    shares = file_shares(target, 3)
    dealt = [f.path for share in shares for f in share]
    assert sorted(dealt) == sorted(f.path for f in target.files) and len(set(dealt)) == len(dealt) > 6
    loads = [sum(f.nbytes for f in share) for share in shares]
    assert max(loads) - min(loads) <= max(f.nbytes for f in target.files)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_when_one_rank_is_gone_the_others_stop(
    medium: Path, tmp_path: Path, victim: int, number: signal.Signals
) -> None:
    dst = tmp_path / "out"
    with by_hand([("convert", medium, dst, *TORCH_DIST)] * 3) as ranks:
        wait_until(lambda: files_made(dst), ranks[0])
        for process in ranks:  # all stand still, so that none has ended before the one is gone
            process.send_signal(signal.SIGSTOP)
        assert not dst.exists()
        ranks[victim].send_signal(number)
        began = time.monotonic()
        others = [process for process in ranks if process is not ranks[victim]]
        for process in others:
            process.send_signal(signal.SIGCONT)
        for process in others:
            done = ended(process, 20)
            refused(done, f"rank {victim}", "another rank stopped", "not published")
        assert time.monotonic() - began < 12
        assert not dst.exists() and len(beside(dst)) == (victim == 0)
        if number == signal.SIGSTOP:  # and when it comes back, it finds that the others have left
            ranks[victim].send_signal(signal.SIGCONT)
            refused(ended(ranks[victim], 20), "another rank stopped")
            assert not dst.exists() and beside(dst) == []
    assert run("convert", medium, dst, *TORCH_DIST).returncode == 0
    assert beside(dst) == []
    shutil.rmtree(dst)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_of_one_rank_is_told_by_all(small: Path, tmp_path: Path, victim: int) -> None:
    """As where one host sees a damaged copy of the source."""
    damaged, dst = tmp_path / "damaged", tmp_path / "out"
    shutil.copytree(small, damaged)
    broken = max(damaged.glob("*.safetensors"))
    os.truncate(broken, broken.stat().st_size - 1)
    commands = [("convert", damaged if r == victim else small, dst, *TORCH_DIST[:2]) for r in range(3)]
    began = time.monotonic()
    with by_hand(commands) as ranks:
        done = [ended(p, 60) for p in ranks]
    assert time.monotonic() - began < 30
    refused(done[victim], broken.name)
    assert "another rank" not in done[victim].stderr
    for other in done[:victim] + done[victim + 1 :]:
        refused(other, f"another rank stopped: rank {victim}: ", broken.name)
    assert not dst.exists() and beside(dst) == []


@pytest.mark.slow
def test_a_filled_destination_stops_all_ranks(small: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    dst.mkdir()
    (dst / "mine").touch()
    with by_hand([("convert", small, dst, *TORCH_DIST[:2])] * 2) as ranks:
        done = [ended(p, 60) for p in ranks]
    refused(done[0], "exists and is not empty")
    refused(done[1], "another rank stopped: rank 0: ", "exists and is not empty")
    assert list(dst.iterdir()) == [dst / "mine"]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK 2 is not below WORLD_SIZE 2"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK=-1"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "", "MASTER_PORT": ""}, "do not find each other"),
    ],
)
def test_an_environment_that_makes_no_sense(
    env: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=words), joined_world():
        pass
