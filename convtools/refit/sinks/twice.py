"""Whether two sinks are one engine under two URLs: it would be pushed to twice, and wait for itself."""

import os
import socket
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from convtools.errors import ConvtoolsError, UsageError, capped, tick
from convtools.refit.sinks.base import Sink
from convtools.refit.sinks.http_json import Base


def refuse_twice(sinks: Sequence[Sink], timeout: float) -> None:
    """Raise UsageError, naming them, where two sinks are one; nothing is changed to find that out.

    A socket is known by its directory's inode, a server by its addresses and port, or by the moment at
    which it was started.
    """
    seen: dict[Hashable, Sink] = {}
    servers = [sink for sink in sinks if hasattr(sink, "started")]
    for sink in sinks:
        for mark in marks(sink, timeout if len(servers) > 1 else 0):
            if (other := seen.setdefault(mark, sink)) is not sink:
                raise UsageError(
                    "an engine is given twice",
                    found=capped(map(tick, (other.name, sink.name))),
                    fix="leave one of them out",
                )


def marks(sink: object, timeout: float = 0) -> Iterable[Hashable]:
    """What no other engine has; with a `timeout`, servers are asked when they were started."""
    directory, base, loader = (getattr(sink, name, None) for name in ("directory", "base", "loader"))
    if isinstance(directory, str):
        with suppress(OSError):  # it is missed where it is dialled
            found = os.stat(directory)
            yield "directory", found.st_dev, found.st_ino
    if isinstance(written := getattr(sink, "written", None), Path):
        yield "path", os.path.realpath(written)
    if isinstance(base, Base):
        for address in _addresses(base):
            yield "server", address, base.port, base.prefix
    if timeout and hasattr(sink, "started"):
        with suppress(ConvtoolsError):  # the push will say so
            yield "started", sink.started(timeout)
    if loader is not None:
        yield from marks(loader)
        yield from marks(getattr(loader, "sink", None))


def _addresses(base: Base) -> set[str]:
    try:
        found = socket.getaddrinfo(base.host, base.port, type=socket.SOCK_STREAM)
    except OSError:
        return {base.host}
    return {str(row[4][0]) for row in found}


__all__ = ["marks", "refuse_twice"]
