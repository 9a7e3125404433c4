"""Who may answer: an engine's requests hold the gate open, a transaction closes it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from convtools.refit.errors import NotServing, RefitError


class Gate:
    """Many requests at a time, or one change of weights."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether a request would be answered now."""
        return not self._closed

    @contextmanager
    def request(self, wait: float = 0.0) -> Iterator[None]:
        """Hold it open for one request. Raises NotServing where it stays closed for `wait` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._closed, wait):
                raise NotServing("the engine takes over new weights, or holds none that are whole")
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def close(self, timeout: float, usher: Callable[[], None] | None = None) -> None:
        """Let nobody in, and wait until the last one is out; `usher` asks those inside to leave.

        Raises RefitError when that takes longer than `timeout`, and then it is as it was.
        """
        until = time.monotonic() + timeout
        with self._changed:
            was, self._closed = self._closed, True
        try:
            if usher is not None:
                usher()
            with self._changed:
                while self._inside:
                    if not self._changed.wait(until - time.monotonic()) and time.monotonic() >= until:
                        raise RefitError(
                            "requests were still being answered",
                            found=f"{self._inside} after {timeout:g} s",
                            fix="drain or abort them before the push, or allow more time",
                        )
        except BaseException:
            with self._changed:
                self._closed = was
                self._changed.notify_all()
            raise

    def shut(self) -> None:
        """Let nobody in; who is inside stays."""
        with self._changed:
            self._closed = True

    def open(self) -> None:
        """Let requests in again."""
        with self._changed:
            self._closed = False
            self._changed.notify_all()
