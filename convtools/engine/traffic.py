"""Requests and changes of weights on one road: who is inside, and what they do when they must leave."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from convtools.refit.errors import NotServing
from convtools.refit.gate import not_serving
from convtools.refit.protocol import ABORT, KEEP, POISONED
from convtools.refit.receiver import Receiver

_TICK = 0.1


class RequestAborted(NotServing):
    """The request was ended by the policy of a push; send it again."""


@dataclass(slots=True)
class Visit:
    """A request while it holds the weights still."""

    version: int
    """Of the weights that it sees."""
    traffic: "Traffic"
    seen: int
    """How many changes had been announced when it came in."""

    def must_leave(self) -> bool:
        """Asked between two tokens: whether to let go of the weights now, and come back for new ones.

        Raises RequestAborted where the push, or the engine's end, wants no more of this request.
        """
        return self.traffic.must_leave(self.seen)


class Traffic:
    """Lets requests in through a receiver's gate. `usher` is what a Receiver takes as `in_flight`."""

    def __init__(self, wait: float) -> None:
        """A request waits up to `wait` seconds while weights are being changed."""
        self._wait = wait
        self._lock = threading.Lock()
        self._announced, self._policy, self._ended = 0, "", False
        self.receiver: Receiver | None = None
        """Set once, before the first request."""

    def usher(self, policy: str) -> None:
        """Weights are about to change: those inside follow `policy` from their next token on."""
        with self._lock:
            self._announced, self._policy = self._announced + 1, policy

    def end(self) -> None:
        """The engine stops: requests end at their next token."""
        self._ended = True

    def must_leave(self, seen: int) -> bool:
        """See `Visit`."""
        if self._ended:
            raise RequestAborted("the engine is being stopped")
        with self._lock:
            told, policy = self._announced > seen, self._policy
        if told and policy == ABORT:
            raise RequestAborted(
                "the request was aborted: the engine takes over new weights", fix="send it again"
            )
        return told and policy == KEEP

    @contextmanager
    def enter(self) -> Iterator[Visit]:
        """Hold the weights still. Raises NotServing, with the reason, where there are none to be served."""
        receiver = self.receiver
        assert receiver is not None
        seen, until = self._announced, time.monotonic() + self._wait
        while True:
            if self._ended:
                raise NotServing("the engine is being stopped")
            if receiver.state == POISONED:
                raise not_serving(POISONED, reason=receiver.reason)
            entered = False
            try:
                with receiver.serving(_TICK) as version:
                    entered = True
                    with self._lock:
                        if receiver.gate.is_open:  # what was announced before is over
                            seen = self._announced
                    yield Visit(version, self, seen)
                    return
            except NotServing:
                if entered or time.monotonic() > until:
                    raise
