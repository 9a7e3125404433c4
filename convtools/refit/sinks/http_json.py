"""JSON over HTTP to an engine that may answer anything: bounded in bytes and in time, no redirects."""

import http.client
import json
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from convtools.errors import CheckpointError, UsageError, tick
from convtools.refit.errors import PeerError
from convtools.stores.json_file import json_object

MAX_ANSWER = 4 << 20
"""Bytes of an answer that is read."""


class Base(NamedTuple):
    """The root of a server's routes."""

    host: str
    port: int
    prefix: str
    secure: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' * self.secure}://{host}:{self.port}{self.prefix}"


class Reply(NamedTuple):
    """What a server said."""

    status: int
    body: dict[str, Any]
    """Empty where the answer is no JSON object."""


def parse_base(url: str) -> Base:
    """`http://host[:port][/prefix]`. Raises UsageError.

    >>> str(parse_base("http://localhost:30000/"))
    'http://localhost:30000'
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{tick(url)} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable() or " " in url:
        raise UsageError(f"{tick(url)} names no server", expected="http://host:port")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError(f"{tick(url)} holds more than a server's address", expected="http://host:port")
    if port == 0:
        raise UsageError(f"{tick(url)} names no port", expected="http://host:port")
    secure = parts.scheme == "https"
    return Base(parts.hostname, port or (443 if secure else 80), parts.path.rstrip("/"), secure)


def ask(
    base: Base, path: str, timeout: float, *, body: dict[str, Any] | None = None, key: str | None = None
) -> Reply:
    """GET, or POST of `body` as JSON; all of it takes no longer than `timeout`.

    `key` is sent as a bearer token. Raises PeerError where no server answers, in time and of bounded size.
    """
    kind = http.client.HTTPSConnection if base.secure else http.client.HTTPConnection
    connection, where = kind(base.host, base.port, timeout=timeout), f"{base}{path}"
    late = threading.Event()
    opened: list[socket.socket] = []  # a connection forgets its socket when the answer begins

    def stop() -> None:
        # A server that sends a byte now and then passes every deadline of the socket's own.
        late.set()
        for sock in opened or [connection.sock]:
            with suppress(OSError, AttributeError):
                sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout, stop)
    timer.daemon = True
    timer.start()
    try:
        headers = {"Accept": "application/json", "Connection": "close"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        data = None if body is None else json.dumps(body).encode()
        headers |= {"Content-Type": "application/json"} if data is not None else {}
        connection.connect()
        opened.append(connection.sock)
        if late.is_set():
            raise TimeoutError
        connection.request("GET" if data is None else "POST", base.prefix + path, data, headers)
        with connection.getresponse() as answer:
            raw = answer.read(MAX_ANSWER + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if late.is_set() or isinstance(error, TimeoutError):
            raise _late(timeout, where) from None
        text = getattr(error, "strerror", None) or f"{type(error).__name__}: {str(error)[:200]}"
        raise PeerError(
            f"no server answers: {text}", where=where, fix="is it up, and is this its port?"
        ) from None
    finally:
        timer.cancel()
        connection.close()
    if late.is_set():
        raise _late(timeout, where)
    if len(raw) > MAX_ANSWER:
        raise PeerError("the server's answer is too long", where=where, expected=f"<= {MAX_ANSWER} bytes")
    return Reply(answer.status, _object(raw))


def _late(timeout: float, where: str) -> PeerError:
    return PeerError(
        f"no answer within {timeout:g} s", where=where,
        fix="it hangs, is stopped, or needs more time: raise the timeout",
    )  # fmt: skip


def _object(raw: bytes) -> dict[str, Any]:
    try:
        return json_object(raw, Path("answer.json"), constants=False)
    except (CheckpointError, RecursionError):
        return {}


def number(value: object) -> int | None:
    """A version as engines write it: an integer, or the digits of one. None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if 0 <= value < 1 << 62 else None
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 19:
        return int(value)
    return None


__all__ = ["MAX_ANSWER", "Base", "Reply", "ask", "number", "parse_base"]
