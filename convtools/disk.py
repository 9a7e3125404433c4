"""What publishing needs of the kernel: room, bytes that stay, two names swapped, and errors in words."""

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from convtools.errors import StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_MEDIUM = (*_FULL, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
"""What only a write meets, or nearly so: taken for one even where the error names no file."""
_CANNOT_SWAP = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def check_space(path: Path, nbytes: int) -> None:
    """Before the first byte: StorageError unless `nbytes` more fit where `path` will lie."""
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    free = _free(there)
    if free < nbytes:
        raise StorageError(
            f"not enough room for `{path}`",
            where=there,
            expected=f"{nbytes} bytes ({_human(nbytes)})",
            found=f"{free} bytes ({_human(free)}) free",
            fix="free some space, or name a directory on another disk",
        )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError about `path`, or about a full or failing disk, into a StorageError.

    Other errors pass: what was read while writing has errors of its own.
    """
    try:
        yield
    except OSError as error:
        name = error.filename
        if isinstance(name, str | os.PathLike) and not Path(name).is_relative_to(path):
            raise
        if name is None and error.errno not in _MEDIUM:
            raise
        full = error.errno in _FULL
        raise StorageError(
            f"could not write `{name or path}`: {error.strerror}",
            found=f"{_human(_free(path))} free" if full else None,
            fix="free some space or raise the quota, then run again" if full else None,
        ) from error


def sync(path: Path) -> None:
    """Bring one file or directory to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(root: Path, leave: Collection[Path] = ()) -> None:
    """Bring all files under `root` to disk but those in `leave`, then the directories, inner ones first."""
    for folder, _, names in os.walk(root, topdown=False):
        for path in (Path(folder, name) for name in names):
            if path not in leave and not path.is_symlink():
                sync(path)
        sync(Path(folder))


def exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step that no reader can look into. False where the file system cannot."""
    import ctypes

    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_SWAP:
        return False
    raise OSError(code, os.strerror(code), str(a), None, str(b))


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode, which all names of a file share; None where there is no file."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def above(path: Path) -> set[tuple[int, int]]:
    """Identities of `path` and of every directory it lies in, symlinks followed."""
    real = path.resolve()
    return {found for p in (real, *real.parents) if (found := identity(p))}


def _free(path: Path) -> int:
    for p in (path, *path.absolute().parents):
        try:
            room = os.statvfs(p)
        except OSError:
            continue
        return room.f_bavail * room.f_frsize
    return 0


def _human(nbytes: float) -> str:
    """
    >>> _human(1536)
    '1.5 KiB'
    """
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        del units[0]
    return f"{nbytes:.4g} {units[0]}"
