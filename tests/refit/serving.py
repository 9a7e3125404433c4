"""Engines that listen at a socket in this process, and HTTP servers that say what they are told to."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from convtools.refit.applier import ShadowApplier
from convtools.refit.channels.local_memory import Server
from convtools.refit.receiver import Receiver
from convtools.refit.weights import TensorWeights


@dataclass
class Serving:
    """What a test looks at."""

    tensors: dict[str, Any]
    receiver: Receiver
    url: str


@contextmanager
def serving(
    tensors: dict[str, Any],
    where: Path,
    *,
    applier: Callable[[TensorWeights], Any] = ShadowApplier,
    **more: Any,
) -> Iterator[Serving]:
    """An engine with these tensors, torch's or numpy's, at the socket directory `where`."""
    receiver = Receiver(applier(TensorWeights(tensors)), **more)
    with Server(receiver, where):
        yield Serving(tensors, receiver, f"unix://{where}")


Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], "tuple[int, object] | None"]


@contextmanager
def http(pages: Mapping[str, object]) -> Iterator[str]:
    """A server whose pages are JSON values, bytes, or calls that answer (None: they did so themselves)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            if self.path not in pages:
                self._say(404, {})
                return
            page = pages[self.path]
            if callable(page):
                said = page(self, body)
                if said is not None:
                    self._say(*said)
            else:
                self._say(200, page)

        do_POST = do_GET

        def _say(self, status: int, content: object) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign, assignment]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
