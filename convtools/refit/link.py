"""One sink as a push sees it: what it last said, and how many answers it still owes."""

from collections.abc import Callable
from typing import TypeVar

from convtools.errors import tick
from convtools.refit.bucket import Ring
from convtools.refit.errors import PeerError, RefitError
from convtools.refit.plan import RefitPlan
from convtools.refit.protocol import (
    Abort,
    Aborted,
    Agreed,
    Answer,
    Ask,
    Bucket,
    Commit,
    Committed,
    Consumed,
    Digest,
    Digests,
    Open,
    Opened,
    Prepare,
    Prepared,
    Question,
    Refused,
    Told,
)  # fmt: skip
from convtools.refit.refusal import refusal_of
from convtools.refit.report import SinkReport
from convtools.refit.sinks.base import Sink

_A = TypeVar("_A")


class Link:
    """Questions to one sink, each answered by the kind of answer that belongs to it, or an error."""

    def __init__(self, sink: Sink) -> None:
        self.sink, self.name = sink, sink.name
        self.connected = False
        self.is_open = False
        """Whether it has a transaction of ours."""
        self.state, self.version, self.token = "unknown", -1, 0
        self.mode, self.undo_bytes = "unknown", 0
        self.flushed = False
        """Whether the last commit emptied caches."""
        self.consumed = 0
        """Buckets of this push that were acknowledged."""
        self.consume_seconds = 0.0
        self._owed = 0
        self._incarnation = ""
        self._possible: set[int] = set()
        """Versions that it may serve by our own doing."""

    def refresh(self, plan: RefitPlan, ring: Ring, timeout: float, force: bool) -> None:
        """Ask where it stands; connect anew if it does not answer. Raises RefitError.

        An engine that was not restarted, and serves a version that we did not push, is another trainer's.
        """
        if self.is_open or self._owed:  # an attempt, or a question, that was interrupted
            self.drop()
        if self.connected:
            try:
                told = self.ask(Ask(), Told, timeout)
            except RefitError:
                self.drop()
            else:
                self._check_version(told.version, force)
                self.state, self.version, self.token = told.state, told.version, told.token
                return
        answer = self._guarded(lambda: self.sink.connect(plan, ring, timeout))
        agreed = self._expect(answer, Agreed)
        if agreed.digest != plan.digest:
            self.drop()
            raise RefitError(f"{tick(self.name)} agreed on another plan")
        if agreed.incarnation != self._incarnation:  # another engine, or one that was started again
            self._possible = {agreed.version}
        self._check_version(agreed.version, force)
        self.connected, self._incarnation = True, agreed.incarnation
        self.state, self.version, self.token = agreed.state, agreed.version, agreed.token
        self.mode, self.undo_bytes = agreed.mode, agreed.undo_bytes

    def _check_version(self, found: int, force: bool) -> None:
        """Raises RefitError unless the engine serves what we know of; from here on it is known exactly."""
        if found not in self._possible and not force:
            expected = sorted(self._possible)
            self.drop()
            raise RefitError(
                f"{tick(self.name)} was given a version by another trainer",
                expected=f"version {expected}",
                found=found,
                fix="see that one trainer pushes to it, or push with force",
            )
        self._possible = {found}

    def standing(self) -> str:
        """For an error."""
        if self.version < 0 and self.state == "unknown":
            return f"{tick(self.name)} never reached"
        return f"{tick(self.name)} {self.state} at version {self.version}"

    def report(self) -> SinkReport:
        """After a push."""
        return SinkReport(
            self.name, self.state, self.version, self.mode, self.undo_bytes, self.consume_seconds,
            self.flushed,
        )  # fmt: skip

    def open(self, question: Open, timeout: float) -> None:
        """Begin a transaction. Raises RefitError."""
        self.consumed, self.consume_seconds = 0, 0.0
        self.is_open = True  # before it is: an interrupt must not forget it
        try:
            self.ask(question, Opened, timeout)
        except RefitError:
            self.is_open = False
            raise

    def send_bucket(self, question: Bucket, timeout: float) -> None:
        """Without waiting."""
        self._send(question, timeout)

    def await_bucket(self, timeout: float) -> float:
        """Until the oldest bucket that was sent is consumed; gives the seconds that the sink spent on it."""
        answer = self._expect(self._receive(timeout), Consumed)
        if answer.index != self.consumed:
            raise RefitError(f"{tick(self.name)} acknowledged another bucket", found=answer.index)
        self.consumed += 1
        self.consume_seconds += answer.seconds
        return answer.seconds

    def prepare(self, question: Prepare, timeout: float) -> None:
        """Raises RefitError."""
        self.ask(question, Prepared, timeout)

    def commit(self, question: Commit, version: int, timeout: float) -> None:
        """Raises RefitError; then it may have taken effect or not, unless the engine refused."""
        self._possible.add(version)
        answer = self.ask(question, Committed, timeout)
        if answer.version != version:
            raise RefitError(f"{tick(self.name)} committed another version", found=answer.version)
        self.is_open, self.state, self.version = False, "clean", version
        self.flushed = answer.flushed
        self._possible = {version}

    def abort(self, question: Abort, timeout: float) -> None:
        """Give the transaction up; whatever is still on its way is drained, or the connection ended."""
        self.is_open = False
        if not self.connected:
            return
        try:
            self._send(question, timeout)
            while self._owed:
                answer = self._receive(timeout)
                if isinstance(answer, Aborted | Refused):
                    self.state, self.version = answer.state, answer.version
        except RefitError:
            self.drop()

    def told(self, of: str, count: int, timeout: float) -> Told:
        """With fingerprints of what it `serves`, or of what is `pending`. Raises RefitError."""
        told = self.ask(Ask(of), Told, timeout)
        if len(told.fingerprints) != count or any(row.tensor >= count for row in told.weaker):
            self.drop()
            raise RefitError(
                f"{tick(self.name)} told of other tensors than it was asked for",
                expected=count,
                found=len(told.fingerprints),
            )
        return told

    def digests(self, of: list[int], timeout: float) -> Digests:
        """Of its own parameters, and those that belong to the tensors `of`. Raises RefitError."""
        found = self.ask(Digest(of), Digests, timeout)
        if len(found.touched) != len(of):
            self.drop()
            raise RefitError(f"{tick(self.name)} answered for other tensors than those it was asked for")
        return found

    def ask(self, question: Question, kind: type[_A], timeout: float) -> _A:
        """A question and its answer. Raises RefitError where the answer is another."""
        self._send(question, timeout)
        return self._expect(self._receive(timeout), kind)

    def drop(self) -> None:
        """Hang up: the engine gives our transaction up."""
        self.connected = self.is_open = False
        self._owed, self.state = 0, "unknown"
        self.sink.close()

    def _send(self, question: Question, timeout: float) -> None:
        if not self.connected:
            raise PeerError(f"{tick(self.name)} is not connected")
        self._owed += 1
        self._guarded(lambda: self.sink.send(question, timeout))

    def _receive(self, timeout: float) -> Answer:
        answer = self._guarded(lambda: self.sink.receive(timeout))
        self._owed -= 1
        return answer

    def _expect(self, answer: Answer, kind: type[_A]) -> _A:
        if isinstance(answer, Refused):
            self.state, self.version = answer.state, answer.version
            raise refusal_of(self.name, answer.reason)
        if not isinstance(answer, kind):
            self.drop()
            raise RefitError(f"{tick(self.name)} answered something else", found=type(answer).__name__)
        return answer

    def _guarded(self, call: Callable[[], _A]) -> _A:
        """A failure on the way ends the connection: who knows what is still in it."""
        try:
            return call()
        except RefitError as error:
            self.drop()
            raise type(error)(
                f"{tick(self.name)}: {error.what}",
                where=error.where, expected=error.expected, found=error.found, fix=error.fix,
            ) from None  # fmt: skip
        except BaseException:
            self.drop()
            raise
