"""What a push needs of a place that it goes to: questions in order, answers in order, a deadline on each."""

from collections import deque
from typing import Protocol

from convtools.refit.bucket import Ring
from convtools.refit.errors import PeerError
from convtools.refit.plan import RefitPlan
from convtools.refit.protocol import PROTOCOL, Agree, Answer, DeviceRow, Question, TensorRow
from convtools.refit.receiver import Receiver


class Sink(Protocol):
    """One engine, or a directory that stands for one."""

    name: str
    """For reports."""

    def connect(self, plan: RefitPlan, ring: Ring, timeout: float) -> Answer:
        """Begin anew; gives the answer to Agree. Raises PeerError."""

    def send(self, question: Question, timeout: float) -> None:
        """Raises PeerError."""

    def receive(self, timeout: float) -> Answer:
        """The answer to the oldest question that has none yet. Raises PeerError, FrameError."""

    def close(self) -> None:
        """Let go; an open transaction is given up."""


def agree(plan: RefitPlan, ring: Ring, device: DeviceRow | None = None) -> Agree:
    """The first question; `device` for a reader that must open the ring on one."""
    rows = [TensorRow(t.name, t.dtype, t.shape) for t in plan.tensors]
    return Agree(PROTOCOL, rows, plan.bucket_bytes, ring.slots, plan.digest, ring.windows, device)


class DirectSink:
    """A receiver in this process, without a channel: tests, and sinks that write files."""

    devices = True
    """Whether buckets may lie on a device."""

    def __init__(self, receiver: Receiver, name: str = "direct") -> None:
        self.name, self.receiver = name, receiver
        self._ring: Ring | None = None
        self._answers: deque[Answer] = deque()

    def connect(self, plan: RefitPlan, ring: Ring, timeout: float) -> Answer:
        """Agree."""
        self.close()
        self._ring = ring
        return self.receiver.handle(agree(plan, ring), self, ring)

    def inquire(self, question: Question, timeout: float) -> Answer:
        """One question before anything is agreed on."""
        return self.receiver.handle(question, object(), None)

    def send(self, question: Question, timeout: float) -> None:
        """It is answered at once."""
        self._answers.append(self.receiver.handle(question, self, self._ring))

    def receive(self, timeout: float) -> Answer:
        """The oldest answer."""
        if not self._answers:
            raise PeerError("nothing was asked")
        return self._answers.popleft()

    def close(self) -> None:
        """An open transaction is given up."""
        self._answers.clear()
        self._ring = None
        self.receiver.lost(self)
