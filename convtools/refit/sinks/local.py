"""An engine in another process of this machine, over sealed memory."""

import os

from convtools.refit.bucket import Ring
from convtools.refit.channels.connection import Connection
from convtools.refit.channels.local_memory import dial
from convtools.refit.device.ring import DeviceRing
from convtools.refit.errors import PeerError
from convtools.refit.framing import MAX_FRAME
from convtools.refit.plan import RefitPlan
from convtools.refit.protocol import Answer, Question, decode_answer, encode
from convtools.refit.sinks.base import agree


class LocalSink:
    """The engine whose `Server` listens in `directory`."""

    devices = True
    """Whether buckets may lie on a device."""

    def __init__(self, directory: str | os.PathLike[str], name: str | None = None) -> None:
        self.directory = os.fspath(directory)
        """Where the engine's socket lies."""
        self.name = name or self.directory
        self._connection: Connection | None = None
        self._ring: Ring | None = None

    def connect(self, plan: RefitPlan, ring: Ring, timeout: float) -> Answer:
        """Dial, prove the key, pass the ring, agree on the plan. Raises PeerError, FrameError."""
        self.close()
        self._connection = self._dial(timeout)
        row = ring.export()
        self._ring = ring if row is not None else None
        fd = ring.fd if ring.fd >= 0 else None
        self._connection.send(encode(agree(plan, ring, row)), timeout, fd=fd)
        return self.receive(timeout)

    def _dial(self, timeout: float) -> Connection:
        return dial(self.directory, timeout)

    def inquire(self, question: Question, timeout: float) -> Answer:
        """One question on a connection of its own, before anything is agreed on. Raises PeerError."""
        connection = self._dial(timeout)
        try:
            connection.send(encode(question), timeout)
            return decode_answer(connection.receive(timeout, MAX_FRAME))
        finally:
            connection.close()

    def send(self, question: Question, timeout: float) -> None:
        """Raises PeerError, after which the connection is over."""
        self._open().send(encode(question), timeout)

    def receive(self, timeout: float) -> Answer:
        """Raises PeerError, FrameError, after which the connection is over."""
        connection = self._open()
        answer = decode_answer(connection.receive(timeout, MAX_FRAME))
        if (fd := connection.take_fd()) is not None:
            os.close(fd)
            raise PeerError("an engine passed a descriptor, which none may")
        return answer

    def _open(self) -> Connection:
        if self._connection is None:
            raise PeerError("not connected")
        return self._connection

    def close(self) -> None:
        """Hang up."""
        connection, self._connection = self._connection, None
        ring, self._ring = self._ring, None
        if connection is not None and isinstance(ring, DeviceRing):
            ring.hold(connection)
        elif connection is not None:
            connection.close()
