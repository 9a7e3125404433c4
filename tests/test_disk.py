"""Full, small, read-only: the disk's refusals arrive as errors with a number and an advice."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from convtools.errors import StorageError
from convtools.staging import check_space, writing
from tests.publishing import ROOT, python


def test_room_is_checked_before_the_first_byte(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    check_space(tmp_path / "not/there/yet", room.f_bavail * room.f_frsize // 2)
    with pytest.raises(
        StorageError, match=r"not enough room for .*\n.*\n  expected: \d+ bytes \(1024 TiB\)\n  found: \d+"
    ):
        check_space(tmp_path / "not/there/yet", 2**50)


def test_a_full_device(tmp_path: Path) -> None:
    full = pytest.raises(StorageError, match="No space left on device")
    with full, writing(tmp_path / "x"), open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


def test_an_exceeded_quota(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"(?s)quota exceeded.*raise the quota"), writing(tmp_path / "x"):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_a_file_size_limit(dst: Path) -> None:
    script = """
import resource, sys
from convtools.errors import StorageError
from convtools.staging import Staging
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    with Staging(sys.argv[1]) as s, s.open("a") as file:
        file.write(bytes(1 << 20))
except StorageError as error:
    print(error)
"""
    process = python(script, dst)
    out, err = process.communicate()
    assert out.startswith("could not write `") and "File too large" in out, err
    assert list(dst.parent.iterdir()) == []


MOUNTED = """
import os, sys
from pathlib import Path
from convtools.errors import StorageError
from convtools.staging import Staging, check_space
disk = Path(sys.argv[1])
def say(do):
    try:
        do()
        print("done")
    except StorageError as error:
        print(" | ".join(map(str.strip, str(error).splitlines())))
def write(n, dst=disk / "out", **options):
    with Staging(dst, **options) as s:
        for i in range(n):
            with s.open(f"{i}.bin") as file:
                file.write(bytes(64 << 10))
        s.commit()
say(lambda: check_space(disk / "out", 1 << 20))
say(lambda: write(2))
say(lambda: write(8, overwrite=True, replaceable=lambda p: None))
print(sorted(os.listdir(disk)), sorted(os.listdir(disk / "out")))
say(lambda: write(1, disk))
os.system(f"mount -o remount,ro {disk}") and sys.exit("no remount")
say(lambda: write(1, disk / "other"))
"""


def test_a_small_disk_that_fills_up(tmp_path: Path) -> None:
    """On a real file system of 320 KiB, mounted in a name space of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    shell = f'mount -t tmpfs -o size=320k none {disk} && exec "$@"'
    process = subprocess.run(
        ["unshare", "-rm", "sh", "-c", shell, "sh", sys.executable, "-c", MOUNTED, str(disk)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    if process.returncode and not process.stdout:
        pytest.skip(f"no mounts here: {process.stderr.strip()}")
    space, small, full, listing, mount_point, read_only = process.stdout.splitlines()
    assert space.startswith("not enough room for") and "found: 327680 bytes (320 KiB) free" in space
    assert small == "done"
    assert (
        full.startswith(f"could not write `{disk}/.out.partial-")
        and "No space left on device | found: 0 bytes free" in full
    )
    assert listing == "['out'] ['0.bin', '1.bin']"
    assert mount_point.startswith(f"`{disk}` is a mount point")
    assert read_only.startswith(f"no permission to write in `{disk}`")
