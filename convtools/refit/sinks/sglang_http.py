"""JSON over HTTP to a server that may answer anything, late, or never."""

import http.client
import json
import socket
import threading
import time
from typing import Any

from convtools.errors import UsageError
from convtools.refit.errors import PeerError
from convtools.refit.sinks.http_json import parse_base

MAX_ANSWER = 8 << 20
"""Bytes of an ordinary answer."""


class HttpClient:
    """One request a connection; each has a deadline for all of it."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises UsageError for a URL that is none."""
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise UsageError("an API key that no header can carry")
        self.base = parse_base(url)
        self._key = api_key
        self._lock = threading.Lock()
        self._current: socket.socket | None = None
        self._until = float("inf")

    def get(self, path: str, timeout: float, most: int = MAX_ANSWER) -> dict[str, Any]:
        """Raises PeerError unless it is answered with 200 and an object."""
        return self._ask("GET", path, None, timeout, most)

    def post(self, path: str, body: object, timeout: float, most: int = MAX_ANSWER) -> dict[str, Any]:
        """Raises PeerError unless it is answered with 200 and an object."""
        return self._ask("POST", path, json.dumps(body).encode(), timeout, most)

    def hurry(self, seconds: float) -> None:
        """End what is under way, and let all that follows be over by then."""
        with self._lock:
            self._until = time.monotonic() + seconds
            if self._current is not None:
                _shut(self._current)

    def calm(self) -> None:
        """No hurry any more."""
        self._until = float("inf")

    def _ask(self, method: str, path: str, body: bytes | None, timeout: float, most: int) -> dict[str, Any]:
        timeout = min(timeout, self._until - time.monotonic())
        if timeout <= 0:
            raise PeerError(f"no time left for {path}")
        made = http.client.HTTPSConnection if self.base.secure else http.client.HTTPConnection
        connection = made(self.base.host, self.base.port, timeout=timeout)
        late: list[bool] = []
        timer: threading.Timer | None = None
        try:
            connection.connect()
            sock = connection.sock
            with self._lock:
                self._current = sock
            # A socket's own timeout starts anew with every byte: this one ends all of it.
            timer = threading.Timer(timeout, _expire, (sock, late))
            timer.daemon = True
            timer.start()
            headers = {"Content-Type": "application/json", "Connection": "close"}
            if self._key is not None:
                headers["Authorization"] = f"Bearer {self._key}"
            connection.request(method, self.base.prefix + path, body, headers)
            with connection.getresponse() as response:
                status, data = response.status, response.read(most + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if late or isinstance(error, TimeoutError):
                raise PeerError(f"{path} was not answered in {timeout:.3g} s") from None
            why = str(error)[:200] or type(error).__name__
            raise PeerError(f"{path} was not answered: {why}", fix="see the server's log") from None
        finally:
            with self._lock:
                self._current = None
            if timer is not None:
                timer.cancel()
            connection.close()
        if late:  # cut off, which may look like an end
            raise PeerError(f"{path} was not answered in {timeout:.3g} s")
        return _checked(path, status, data, most)


def _checked(path: str, status: int, data: bytes, most: int) -> dict[str, Any]:
    if status in (401, 403):
        raise PeerError(f"{path} was refused with status {status}", fix="give the server's key as api_key")
    if len(data) > most:
        raise PeerError(f"the answer to {path} is too long", expected=f"at most {most} bytes")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if status != 200:
        message = found.get("message") if isinstance(found, dict) else None
        text = message if isinstance(message, str) else data[:300].decode("utf-8", "replace")
        raise PeerError(f"{path} failed with status {status}: {text[:300]}")
    if not isinstance(found, dict):
        raise PeerError(f"the answer to {path} is no JSON object", found=repr(data[:80]))
    return found


def _expire(sock: socket.socket, late: list[bool]) -> None:
    late.append(True)
    _shut(sock)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended by itself
