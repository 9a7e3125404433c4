"""What workers and the scheduler of one vLLM say to each other about a push.

The scheduler decides alone whether a step runs, in the engine's own process; weights change in the
workers', one or many. A worker asks it to stop before the first byte changes (Hold), to empty its caches
(Flush), and says when it is whole again (Serve). The channel is that of the refit: a private directory,
a key, keyed frames.
"""

import socket
from pathlib import Path
from typing import Annotated, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from convtools.refit.channels.connection import Connection, accept_peer
from convtools.refit.channels.local_memory import Server, dial
from convtools.refit.errors import FrameError, PeerError, RefitError
from convtools.refit.protocol import DRAIN, InFlight, wire_text

ENGINE = "engine"
"""Name of the scheduler's directory beside those of the ranks."""
STILL = "still"
"""A hold for reading: requests in flight stay as they are, between two steps."""
_MOST = 1 << 16
_TICK = 0.05

Rank = Annotated[int, Meta(ge=0, le=1 << 16)]
Seconds = Annotated[float, Meta(ge=0, le=3600)]


class _Message(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Hold(_Message, frozen=True):
    """Run no step from now on; answered when the last one is over."""

    rank: Rank
    wait: Seconds
    policy: InFlight | Literal["still"] = DRAIN


class Flush(_Message, frozen=True):
    """Empty the KV and prefix caches."""

    rank: Rank


class Serve(_Message, frozen=True):
    """This rank is whole, at this version."""

    rank: Rank
    version: Annotated[int, Meta(ge=0, le=1 << 62)]


class Done(_Message, frozen=True):
    """It was done; `held`: whether the engine runs no steps now."""

    held: bool


class Failed(_Message, frozen=True):
    """It was not done, and why."""

    reason: Annotated[str, Meta(max_length=1 << 14)]


_ENCODER = msgspec.msgpack.Encoder()
_QUESTIONS = msgspec.msgpack.Decoder(Hold | Flush | Serve)
_ANSWERS = msgspec.msgpack.Decoder(Done | Failed)
_T = TypeVar("_T")


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FrameError("a frame is not of the schema", found=str(error)[:200]) from None


class Holder(Protocol):
    """Who decides whether steps run: vLLM's scheduler."""

    def hold(self, rank: int, policy: str, wait: float) -> None:
        """Stop. Raises RefitError when that takes too long; then it is as it was."""

    def flush(self) -> None:
        """Empty the caches. Raises RefitError."""

    def serve(self, rank: int, version: int) -> None:
        """A rank is whole; steps run again once all are, at one version."""

    @property
    def held(self) -> bool:
        """Whether no step runs."""


class ControlServer(Server):
    """The scheduler's end."""

    def __init__(self, holder: Holder, directory: Path) -> None:
        """Raises PeerError where the directory is not ours alone, or another engine listens there."""
        self._holder = holder
        super().__init__(_NoLease(), directory)  # type: ignore[arg-type]

    def _serve(self, sock: socket.socket) -> None:
        try:
            connection = accept_peer(sock, self._key, self._frame_timeout)
        except (PeerError, OSError):
            sock.close()
            return
        try:
            while not self._stop.is_set():
                if connection.ready(_TICK):
                    question = _decode(_QUESTIONS, connection.receive(self._frame_timeout, _MOST))
                    connection.send(_ENCODER.encode(self._answer(question)), self._frame_timeout)
        except (RefitError, OSError):  # that worker has gone: what it held stays held
            pass
        finally:
            connection.close()

    def _answer(self, question: Hold | Flush | Serve) -> Done | Failed:
        try:
            match question:
                case Hold():
                    self._holder.hold(question.rank, question.policy, question.wait)
                case Flush():
                    self._holder.flush()
                case Serve():
                    self._holder.serve(question.rank, question.version)
        except Exception as error:  # vLLM's own code may raise anything: the worker must hear of it
            return Failed(wire_text(error if isinstance(error, RefitError) else repr(error)))
        return Done(self._holder.held)


class _NoLease:
    """Nothing here ends by itself: a worker that goes leaves its engine held."""

    def expire(self) -> None:
        """Nothing to do."""


class Control:
    """A worker's end; connects when it is first needed, since the scheduler starts after the workers."""

    def __init__(self, directory: Path, rank: int, timeout: float = 10.0) -> None:
        self._directory, self._rank, self._timeout = directory, rank, timeout
        self._connection: Connection | None = None

    def hold(self, policy: str, wait: float) -> None:
        """Returns when no step runs, nor will. Raises RefitError."""
        message = Hold(self._rank, wait, policy)  # type: ignore[arg-type]
        self._ask(message, wait + self._timeout)

    def flush(self) -> None:
        """Returns when the caches are empty. Raises RefitError."""
        self._ask(Flush(self._rank), self._timeout)

    def serve(self, version: int) -> None:
        """Raises RefitError."""
        self._ask(Serve(self._rank, version), self._timeout)

    def close(self) -> None:
        """Hang up."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _ask(self, question: Hold | Flush | Serve, timeout: float) -> None:
        try:
            if self._connection is None:
                self._connection = dial(self._directory, self._timeout)
            self._connection.send(_ENCODER.encode(question), self._timeout)
            answer = _decode(_ANSWERS, self._connection.receive(timeout, _MOST))
        except BaseException as error:
            self.close()
            if isinstance(error, RefitError):
                raise RefitError(
                    f"vLLM's scheduler does not answer: {error.what}", where=error.where
                ) from None
            raise
        if isinstance(answer, Failed):
            raise RefitError(answer.reason)
