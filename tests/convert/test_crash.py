"""Kills, signals, full disks: the source stays as it is, and DST is whole or absent."""

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from convtools import ConvtoolsError
from convtools.inspection import inspect
from tests.commands import MEDIUM, SMALL, beside, files_made, hashes, refused, run, stamps, start, wait_until
from tests.nemotron_checkpoints import write_hf

TORCH_DIST = ("--to", "torch_dist", "--tp", "4")


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = write_hf(tmp_path_factory.mktemp("medium") / "hf", MEDIUM, shard=30_000_000)
    yield root
    shutil.rmtree(root)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "small", SMALL)


def kill_at_random(src: Path, dst: Path, options: tuple[str, ...], kills: int) -> Counter[str]:
    """Kill that many runs, each checked; then one run to the end. What each kill met, by number."""
    source = stamps(src), hashes(src)
    want = dst.with_name("want")
    began = time.monotonic()
    assert run("convert", src, want, *options).returncode == 0
    took, whole = time.monotonic() - began, hashes(want)
    chance, met = random.Random(f"kills of {dst.name}"), Counter[str]()
    for i in range(kills):
        process = start("convert", src, dst, *options, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(took * (i + chance.random()) / kills)
        process.kill()
        process.wait()
        assert stamps(src) == source[0]
        assert {p.name[: len(dst.name) + 10] for p in beside(dst)} <= {f".{dst.name}.partial-"}
        assert {p.name for p in dst.parent.iterdir()} - {p.name for p in beside(dst)} <= {dst.name, "want"}
        for partial in beside(dst):
            with pytest.raises(ConvtoolsError):
                inspect(partial)
        if dst.exists():
            met["published"] += 1
            assert hashes(dst) == whole
            shutil.rmtree(dst)
        elif files_made(dst):
            met["writing"] += 1
        else:
            met["before"] += 1
        if beside(dst) and i % 10 == 9:
            done = run("convert", src, dst, *options)
            assert done.returncode == 0, done.stderr
            assert beside(dst) == [] and hashes(dst) == whole
            shutil.rmtree(dst)
    done = run("convert", src, dst, *options)
    assert done.returncode == 0, done.stderr
    assert beside(dst) == [] and hashes(dst) == whole and (stamps(src), hashes(src)) == source
    return met


@pytest.mark.slow
def test_killed_at_fifty_moments(medium: Path, tmp_path: Path) -> None:
    met = kill_at_random(medium, tmp_path / "out", TORCH_DIST, 50)
    assert met["before"] >= 3 and met["writing"] >= 8 and met.total() == 50, met
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "want")


@pytest.mark.slow
def test_killed_on_the_way_back(medium: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    room = tmp_path_factory.mktemp("back")
    megatron = tmp_path_factory.mktemp("megatron") / "m"
    assert run("convert", medium, megatron, *TORCH_DIST).returncode == 0
    met = kill_at_random(megatron, room / "out", ("--to", "hf", "--max-shard-size", "40MB"), 15)
    assert met["writing"] >= 2 and met.total() == 15, met
    shutil.rmtree(room)
    shutil.rmtree(megatron)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_leaves_nothing(medium: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    source, dst = stamps(medium), tmp_path / "out"
    process = start("convert", medium, dst, *TORCH_DIST)
    wait_until(lambda: files_made(dst), process)
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code and "Traceback" not in err, err
    assert list(tmp_path.iterdir()) == [] and stamps(medium) == source


@pytest.fixture
def tmpfs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A disk of `request.param` bytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(disk)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("tmpfs", [20_000_000], indirect=True)
def test_a_small_disk_is_refused_before_the_first_byte(medium: Path, tmpfs: Path) -> None:
    done = run("convert", medium, tmpfs / "out", *TORCH_DIST)
    refused(done, "not enough room", "bytes", "free")
    assert list(tmpfs.iterdir()) == []


@pytest.mark.parametrize("tmpfs", [250_000_000], indirect=True)
def test_a_disk_that_fills_on_the_way(medium: Path, tmpfs: Path) -> None:
    dst, hog = tmpfs / "out", tmpfs / "hog"
    process = start("convert", medium, dst, *TORCH_DIST)
    wait_until(lambda: files_made(dst), process)
    process.send_signal(signal.SIGSTOP)
    assert not dst.exists()
    with hog.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=60)
    done = subprocess.CompletedProcess((), process.returncode, out, err)
    refused(done, "could not write", "No space left", "free some")
    assert list(tmpfs.iterdir()) == [hog]


def test_a_file_size_limit_is_an_error_like_any_other(medium: Path, tmp_path: Path) -> None:
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # noqa: E731
    done = run("convert", medium, tmp_path / "out", *TORCH_DIST, preexec_fn=limit)
    refused(done, "could not write", "File too large")
    assert list(tmp_path.iterdir()) == []


def test_a_filled_destination_is_kept(small: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    assert run("convert", small, dst, *TORCH_DIST).returncode == 0
    before = stamps(dst), hashes(dst)
    refused(run("convert", small, dst, *TORCH_DIST), "exists and is not empty", "--overwrite")
    assert (stamps(dst), hashes(dst)) == before and beside(dst) == []


def test_overwrite_replaces_a_checkpoint_of_any_format(small: Path, tmp_path: Path) -> None:
    dst, want = tmp_path / "out", tmp_path / "want"
    assert run("convert", small, want, *TORCH_DIST).returncode == 0
    for options in (("--to", "hf"), ("--to", "torch"), ("--to", "torch_dist"), TORCH_DIST):
        done = run("convert", small, dst, *options, "--overwrite")
        assert done.returncode == 0, done.stderr
    assert hashes(dst) == hashes(want) and beside(dst) == []


def test_overwrite_does_not_replace_other_folders(small: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    (dst / "thesis").mkdir(parents=True)
    (dst / "thesis/text.tex").write_text("years of work")
    before = stamps(dst)
    refused(
        run("convert", small, dst, *TORCH_DIST, "--overwrite"), "is not replaced", "look like a checkpoint"
    )
    assert stamps(dst) == before and beside(dst) == []


def test_a_failed_run_leaves_the_old_destination(medium: Path, small: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    assert run("convert", small, dst, *TORCH_DIST).returncode == 0
    before = stamps(dst), hashes(dst)
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # noqa: E731
    refused(run("convert", medium, dst, *TORCH_DIST, "--overwrite", preexec_fn=limit), "could not write")
    process = start("convert", medium, dst, *TORCH_DIST, "--overwrite")
    wait_until(lambda: files_made(dst), process)
    process.kill()
    process.communicate()
    assert (stamps(dst), hashes(dst)) == before
