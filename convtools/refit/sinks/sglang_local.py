"""Whether a server can map our shared memory: SGLang ends itself over memory that it cannot open.

So that is found out before: the server must listen on this machine, as this user or root, and, where its
process can be seen, have the same /dev/shm. A container's forwarded port cannot be seen through.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from convtools.errors import tick
from convtools.refit.errors import PeerError, RefitError
from convtools.refit.sinks.sglang_staging import SHM

_LISTEN = "0A"


class Listener(NamedTuple):
    """A socket that listens."""

    uid: int
    inode: int


def check_local(host: str, port: int) -> None:
    """Raises RefitError for a server that cannot map what this process shares."""
    fix = "run the trainer where the server runs, as the same user; containers share /dev/shm with --ipc"
    if not is_here(host):
        raise RefitError(f"{tick(host)} is another machine, and SGLang maps our shared memory", fix=fix)
    found = [one for name in ("tcp", "tcp6") for one in _listeners(Path("/proc/net") / name, port)]
    strangers = [one.uid for one in found if one.uid not in (0, os.getuid())]
    if strangers:
        raise RefitError(
            "the server runs as another user, who may not map our shared memory",
            expected=f"uid {os.getuid()}", found=f"uid {strangers[0]}", fix=fix,
        )  # fmt: skip
    ours = SHM.stat()
    for shm in _shm_of({one.inode for one in found}):
        if (shm.st_dev, shm.st_ino) != (ours.st_dev, ours.st_ino):
            raise RefitError("the server has another /dev/shm: it runs in a container of its own", fix=fix)


def is_here(host: str) -> bool:
    """Whether one of a name's addresses is of this machine: only such can be bound."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PeerError(f"{tick(host)} is no host that is known: {error}") from None
    for family, kind, protocol, _, address in addresses:
        with suppress(OSError), socket.socket(family, kind, protocol) as one:
            one.bind(address)
            return True
    return False


def _listeners(table: Path, port: int) -> Iterator[Listener]:
    """Of one port. A table is of the kernel's making: sl, local, remote, state, ..., uid at 7, inode at 9."""
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        row = line.split()
        if len(row) > 9 and row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port:
            yield Listener(int(row[7]), int(row[9]))


def _shm_of(inodes: set[int]) -> Iterator[os.stat_result]:
    """/dev/shm of the processes that hold these sockets, as far as they may be looked at."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with suppress(OSError):
            if any(os.readlink(fd) in wanted for fd in (process / "fd").iterdir()):
                yield os.stat(process / "root" / SHM.relative_to("/"))
