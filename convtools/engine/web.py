"""The engine's HTTP: four routes, bounded requests, and nothing that a request can break."""

import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from convtools.engine.generation import Generated, Request
from convtools.errors import ConvtoolsError, UsageError
from convtools.refit.errors import NotServing

MAX_BODY = 8 << 20
MAX_CONNECTIONS = 64
TIMEOUT = 30.0
"""Seconds in which a client must have said what it wants, and take the answer."""

_REQUEST = msgspec.json.Decoder(Request)
Page = Callable[[], tuple[int, object]]
"""Gives a status and what is sent as JSON."""


class WebServer:
    """Has its address from the start, and answers at it from `serve` until it is closed."""

    def __init__(self, host: str, port: int) -> None:
        """Raises UsageError where it cannot listen there; port 0 takes a free one."""
        self._at = f"{host}:{port}"
        self._thread: threading.Thread | None = None
        self._server = _Server((host, port))
        with self._listening():
            self._server.server_bind()
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}"
        """Where it listens."""

    def serve(self, pages: dict[str, Page], generate: Callable[[Request], Generated]) -> None:
        """Answer `pages` (path -> GET) and POST /generate. Raises UsageError."""
        self._server.pages, self._server.generate = pages, generate
        with self._listening():  # of two that were bound, one listens
            self._server.server_activate()
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="engine-http", daemon=True
        )
        self._thread.start()

    @contextmanager
    def _listening(self) -> Iterator[None]:
        try:
            yield
        except (OSError, OverflowError) as error:
            self._server.server_close()
            raise UsageError(
                f"cannot listen at {self._at}",
                found=str(error),
                fix="choose another port, or 0 for a free one",
            ) from None

    def close(self) -> None:
        """Take no more requests, and wait for those that are being answered."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.hang_up()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # they compute: none may be left when the interpreter ends
    request_queue_size = MAX_CONNECTIONS

    pages: dict[str, Page]
    generate: Callable[[Request], Generated]

    def __init__(self, at: tuple[str, int]) -> None:
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._open: set[socket.socket] = set()
        if ":" in at[0]:
            self.address_family = socket.AF_INET6
        super().__init__(at, _Handler, bind_and_activate=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            with suppress(OSError):
                request.setblocking(False)
                request.send(b"HTTP/1.0 503 busy\r\nRetry-After: 1\r\n\r\n")
            self.shutdown_request(request)
            return
        self._open.add(request)
        try:
            super().process_request(request, client_address)
        except BaseException:  # no threads left: the place is free again
            self._open.discard(request)
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.discard(request)
            self._room.release()

    def hang_up(self) -> None:
        """Nobody who has not said what he wants by now will be heard."""
        for request in tuple(self._open):
            with suppress(OSError):
                request.shutdown(socket.SHUT_RD)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event."""


class _Patient(io.RawIOBase):
    """What a client says, until a deadline for all of it: a byte now and then buys no time."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock, self._until = sock, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        try:
            return self._sock.recv_into(buffer)
        finally:
            self._sock.settimeout(TIMEOUT)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "convtools", ""
    timeout = TIMEOUT

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Patient(self.connection, time.monotonic() + TIMEOUT))

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path)
        if page is None:
            self._no_route()
        else:
            self._answer(page)

    def do_POST(self) -> None:
        if self.path != "/generate":
            self._no_route()
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 16):
            self._send(411, {"error": "a request needs a Content-Length"})
        elif int(length) > MAX_BODY:
            self._send(413, {"error": f"a request has at most {MAX_BODY} bytes"})
        elif len(body := self.rfile.read(int(length))) == int(length):
            self._answer(lambda: (200, self.server.generate(_REQUEST.decode(body))))

    def _no_route(self) -> None:
        if self.path in self.server.pages or self.path == "/generate":
            self._send(405, {"error": f"not {self.command} here"})
        else:
            routes = ", ".join(["POST /generate", *(f"GET {path}" for path in self.server.pages)])
            self._send(404, {"error": f"there is {routes}"})

    def _answer(self, page: Page) -> None:
        try:
            status, content = page()
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            status, content = 400, {"error": f"the request is not of the schema: {error}"}
        except UsageError as error:
            status, content = 400, {"error": str(error)}
        except NotServing as error:
            status, content = 503, {"error": str(error)}
        except ConvtoolsError as error:
            status, content = 500, {"error": str(error)}
        except Exception as error:  # transformers and torch may raise anything: the next request is served
            status, content = 500, {"error": f"{type(error).__name__}: {error}"}
        self._send(status, content)

    def _send(self, status: int, content: object) -> None:
        data = msgspec.json.encode(content)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""
