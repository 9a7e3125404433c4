"""A directory being written, and whether its writer lives.

    .DST.partial-<token>/   beside DST, so on the same file system
        owner.json          who writes; its lock is held for the writer's life, so death shows
        data/               becomes DST in one rename
        old/                a replaced DST, only where the file system cannot swap two names

The owner comes before the data and goes after it: a partial directory without one holds nothing.
A process with an owner file but no data yet is a rival: it may still step back (`Staging`).
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convtools.errors import StorageError

_OWNER, _DATA, _OLD = "owner.json", "data", "old"
_MAX_OWNER = 4096
_TOKEN_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Partial:
    """A partial directory of this process."""

    path: Path
    token: str
    """Random; the end of the directory's name."""
    lock: int
    """File descriptor of the owner file, locked. The kernel lets go of it when the process dies."""

    @property
    def data(self) -> Path:
        """What will be published."""
        return self.path / _DATA

    @property
    def old(self) -> Path:
        """Where a replaced directory waits while no two names can be swapped."""
        return self.path / _OLD

    def begin(self) -> None:
        """Make the directory for the data: from here on no other process begins."""
        self.data.mkdir()

    def remove(self, dst: Path) -> None:
        """Take it away and let go of the lock; OSError if something of it stays."""
        try:
            _remove(self.path, dst)
        finally:
            os.close(self.lock)


@dataclass(frozen=True, slots=True)
class Others:
    """Partial directories of other writers for the same destination."""

    writer: str | None
    """A live writer, in words."""
    rivals: tuple[str, ...]
    """Tokens of live processes that have not begun to write, or have just ended."""
    foreign: tuple[Path, ...]
    """Made on other hosts, or by nobody known: not ours to judge."""


def create(dst: Path, fsync: bool) -> Partial | None:
    """A new partial directory for `dst`; None if another process swept it away before it had an owner."""
    token = os.urandom(_TOKEN_DIGITS // 2).hex()
    path = dst.with_name(f".{dst.name}.partial-{token}")
    path.mkdir()
    lock = -1
    try:
        new = path / "owner.new"
        lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        _take(lock)
        os.write(lock, json.dumps(_me() | {"token": token}).encode())
        if fsync:
            os.fsync(lock)
        os.rename(new, path / _OWNER)
        return Partial(path, token, lock)
    except BaseException as error:
        with suppress(OSError):
            _remove(path, dst)
        if lock >= 0:
            os.close(lock)
        if isinstance(error, FileNotFoundError):
            return None
        raise


def look_around(dst: Path, own: Partial | None = None) -> Others:
    """Remove what dead writers of `dst` left, and tell of the others."""
    writer, rivals, foreign = None, [], []
    for path in _beside(dst):
        if own is None or path != own.path:
            verdict = _settle(path, dst)
            if verdict is _FOREIGN:
                foreign.append(path)
            elif verdict is _RIVAL:
                rivals.append(path.name[-_TOKEN_DIGITS:])
            else:
                writer = verdict or writer
    return Others(writer, tuple(rivals), tuple(sorted(foreign)))


def restore(partial: Path, dst: Path) -> None:
    """Put back a directory that was moved aside for a replacement that then did not come."""
    if (partial / _OLD).is_dir() and not os.path.lexists(dst):
        os.rename(partial / _OLD, dst)


def check_token(data: Path, token: str) -> None:
    """StorageError unless `data` belongs to the run that calls itself `token`."""
    found = None
    with suppress(OSError):
        fd = os.open(data.parent / _OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = _owner(fd).get("token")
        finally:
            os.close(fd)
    if found != token or not data.is_dir():
        raise StorageError(
            "this is not the output directory of the run to join",
            where=data,
            expected=f"token {token}",
            found="no such run" if found is None else f"token {found}",
            fix="pass on path and token as the first process gave them out, while it is still at work",
        )


_FOREIGN, _RIVAL = "made on another host", "about to begin"


def _beside(dst: Path) -> Iterator[Path]:
    pattern = re.compile(re.escape(f".{dst.name}.partial-") + f"[0-9a-f]{{{_TOKEN_DIGITS}}}")
    for entry in os.scandir(dst.parent):
        if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)


def _settle(path: Path, dst: Path) -> str | None:
    """Remove `path` if its writer is dead; else `_FOREIGN`, `_RIVAL`, or the live writer in words."""
    try:
        fd = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return _settle_ownerless(path)
    except OSError:  # another user's, or nothing that we made
        return _FOREIGN
    try:
        owner, me = _owner(fd), _me()
        if owner.get("host") != me["host"] and (me["boot"] is None or owner.get("boot") != me["boot"]):
            return _FOREIGN
        taken = _take(fd)
        if taken is False or (taken is None and _lives(owner, me)):
            return (
                _RIVAL
                if not (path / _DATA).exists()
                else f"process {owner.get('pid')} on {owner.get('host')}"
            )
        _remove(path, dst)
        return None
    finally:
        os.close(fd)


def _settle_ownerless(path: Path) -> str | None:
    """It holds no data yet, or no more. Its maker, if there is one, notices and begins again."""
    with suppress(OSError):
        (path / "owner.new").unlink()
    try:
        path.rmdir()
    except FileNotFoundError:
        return None
    except OSError:  # it has an owner now
        return _RIVAL
    return None


def _remove(path: Path, dst: Path) -> None:
    import shutil

    restore(path, dst)
    for name in (_DATA, _OLD):
        if (path / name).exists():
            shutil.rmtree(path / name)
    for name in (_OWNER, "owner.new"):
        (path / name).unlink(missing_ok=True)
    with suppress(FileNotFoundError):  # without its owner, another process may have taken it away
        path.rmdir()


def _take(fd: int) -> bool | None:
    """Whether the lock is now ours; None where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _owner(fd: int) -> dict[str, Any]:
    """What an owner file says; nothing if it says nothing that could be understood."""
    try:
        owner = json.loads(os.pread(fd, _MAX_OWNER, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _me() -> dict[str, Any]:
    """This process, so that another can tell whether it still is: a pid alone is used again."""
    pid = os.getpid()
    return {"pid": pid, "started": _started(pid), "boot": _boot(), "host": os.uname().nodename}


def _lives(owner: dict[str, Any], me: dict[str, Any]) -> bool:
    """Without locks: whether the process is there. In doubt it is."""
    if owner.get("boot") != me["boot"]:
        return False
    pid = owner.get("pid")
    started = _started(pid) if isinstance(pid, int) else owner.get("started")
    return started == owner.get("started")


def _started(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


def _boot() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
