"""Regular files, opened without waiting: in a folder that others wrote, a name may be a pipe or a device."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from convtools.errors import CheckpointError
from convtools.stores.names import tick

DAMAGED = "the file is damaged or cut short: fetch or write it again"
"""What to do about a file that breaks its own format."""


def open_regular(path: Path) -> tuple[BinaryIO, int]:
    """`path` opened for reading, and its size. Never waits, whatever lies there.

    Raises `CheckpointError` for what is missing, unreadable, a folder, a pipe or a device.
    """
    try:
        if stat.S_ISREG(os.stat(path).st_mode):  # asked first: opening a device can have effects
            file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115
            info = os.fstat(file.fileno())
            if stat.S_ISREG(info.st_mode):  # asked again: the first answer may be out of date
                return file, info.st_size
            file.close()
    except OSError as error:
        raise CheckpointError(f"cannot open {tick(path.name)}: {error.strerror}", where=path) from None
    raise CheckpointError(
        f"{tick(path.name)} is not a file",
        where=path,
        expected="a regular file, or a link to one",
        found="a folder" if os.path.isdir(path) else "a pipe, socket or device",
    )


def absence(path: Path) -> str | None:
    """Why `path` is not a file that can be read; None where it is one."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "a broken link" if os.path.islink(path) else "not there"
    except OSError as error:
        return str(error.strerror)
    return None if stat.S_ISREG(mode) else "not a file"


def leading_outside(root: Path, names: Iterable[str]) -> list[str]:
    """Which files of a folder are links to files outside of it, which may be anybody's."""
    home = root.resolve()
    if home.parent.name == "snapshots":  # the Hub's cache keeps all files beside its snapshots
        home = home.parent.parent
    return [name for name in names if not (root / name).resolve().is_relative_to(home)]
