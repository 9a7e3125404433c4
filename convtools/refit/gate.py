"""Who may answer: an engine's requests hold the gate open, a transaction closes it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from convtools.refit.errors import NotServing, RefitError
from convtools.refit.protocol import CLEAN, POISONED, UPDATING


def not_serving(state: str, before: str = CLEAN, reason: str = "") -> NotServing:
    """Why nothing is answered: it passes, or somebody must push. `before`: the state before an open push."""
    if state == POISONED:
        return NotServing(
            "the engine may hold a mix of two versions, and answers nothing", found=reason or None,
            fix="push all weights again; if no trainer does that by itself, see to it", poisoned=True,
        )  # fmt: skip
    what = "the engine is taking over new weights"
    if before == POISONED:
        what += ", and holds none that are whole until it has"
    return NotServing(what, fix="wait, and ask again")


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
    def request(
        self, wait: float = 0.0, refusal: Callable[[], NotServing] = lambda: not_serving(UPDATING)
    ) -> Iterator[None]:
        """Hold it open for one request. Raises `refusal()` where it stays closed for `wait` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._closed, wait):
                raise refusal()
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
                            fix="let them end before the push, end them with it (in_flight=abort), or allow "
                            "more time: `Receiver(drain=)`, `convtools engine --drain`",
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
