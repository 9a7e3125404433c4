"""Refit over torch.distributed: the trainer's lead is rank 0 of a group, the engine ranks are the others.

Questions and answers are the same frames as on a socket. A bucket's bytes go to all engines as one packed
broadcast. Who is in the group was settled when the job was started: there is no key here, and no proof.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from convtools.errors import ConvtoolsError
from convtools.refit.bucket import Ring
from convtools.refit.errors import FrameError, PeerError, RefitError
from convtools.refit.framing import HEADER_NBYTES, MAX_FRAME, Framing
from convtools.refit.protocol import Abort, Agree, Bucket, Open, Question, decode_question, encode, wire_text
from convtools.refit.ranks.group import CONTROL, DATA, RankGroup
from convtools.refit.ranks.parcels import as_tensor
from convtools.refit.receiver import Receiver

QUESTION, BROADCAST, SINGLE, SHARDS, INQUIRY, HANG_UP, BYE = range(7)
"""What a frame brings: a question; a bucket whose bytes are broadcast, sent here, or sent by the ranks that
hold them; a question of nobody in particular; the end of a connection; the end of the service."""
_KEY = b"convtools process group"  # frames are numbered and checked for damage, not for who sent them
_IDLE = 30 * 86400.0


class GroupWire:
    """Frames between two ranks of a group; sending never waits."""

    def __init__(self, group: RankGroup, peer: int) -> None:
        self._group, self._peer = group, peer
        self._sending, self._receiving = Framing(_KEY), Framing(_KEY)
        self._outbox: deque[list[Any]] = deque()

    def send(self, mode: int, payload: bytes = b"", data: Any = None) -> None:
        """A frame, and a tensor of bytes behind it. Raises PeerError, FrameError."""
        frame = self._sending.frame(bytes([mode]) + payload)
        works = [
            self._group.post(as_tensor(part), self._peer, CONTROL)
            for part in (frame[:HEADER_NBYTES], frame[HEADER_NBYTES:])
        ]
        if data is not None:
            works.append(self._group.post(data, self._peer, DATA))
        self._outbox.append(works)

    def settle(self, until: float, keep: int = 0) -> None:
        """What was sent has arrived, all but the last `keep` frames. Raises PeerError."""
        while len(self._outbox) > keep:
            for work in self._outbox.popleft():
                self._group.wait(work, until, self.name)

    def receive(self, until: float) -> tuple[int, bytes]:
        """(mode, payload) of the next frame. Raises PeerError, FrameError."""
        import torch

        header = torch.zeros(HEADER_NBYTES, dtype=torch.uint8)
        self._group.wait(self._group.expect(header, self._peer, CONTROL), until, self.name)
        head = self._receiving.head(header.numpy().tobytes(), MAX_FRAME)
        if not head.length:
            raise FrameError("an empty frame")
        body = torch.zeros(head.length, dtype=torch.uint8)
        self._group.wait(self._group.expect(body, self._peer, CONTROL), until, self.name)
        payload = body.numpy().tobytes()
        self._receiving.check(head, payload)
        return payload[0], payload[1:]

    @property
    def name(self) -> str:
        """The peer in an error."""
        return f"rank {self._peer} of the group"


class ShardsEnd(Protocol):
    """Takes the bytes of a bucket from the ranks that hold them."""

    def take(self, bucket: Bucket, into: memoryview, until: float) -> Bucket:
        """Fill `into`; the bucket with its checksum. Raises RefitError, PeerError."""


def serve_group(
    receiver: Receiver,
    group: Any = None,
    *,
    timeout: float = 60.0,
    shards: ShardsEnd | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """An engine rank's loop: answers rank 0 of `group` (a process group, or a `RankGroup`) until it says bye.

    `timeout` bounds the rest of a message that has begun. Raises PeerError where the trainer died, or was
    silent for longer than its lease in the middle of a transaction: that is given up, and the group is lost.
    """
    ranks = group if isinstance(group, RankGroup) else RankGroup(group, timeout)
    _Service(receiver, ranks, timeout, shards).run(stopped)


class _Service:
    def __init__(
        self, receiver: Receiver, group: RankGroup, timeout: float, shards: ShardsEnd | None
    ) -> None:
        self._receiver, self._group, self._timeout, self._shards = receiver, group, timeout, shards
        self._wire = GroupWire(group, 0)
        self._ring: Ring | None = None
        self._owner = object()
        self._lease = _IDLE

    def run(self, stopped: Callable[[], bool]) -> None:
        """Until bye."""
        try:
            while not stopped():
                patience = self._lease + self._timeout if self._receiver.state == "updating" else _IDLE
                mode, payload = self._wire.receive(time.monotonic() + patience)
                if mode == BYE:
                    return
                answer = self._answer(mode, payload)
                self._wire.send(mode, answer)
                self._wire.settle(time.monotonic() + self._timeout, keep=66)  # more cannot be outstanding
        finally:
            self._receiver.lost(self._owner)
            if self._ring is not None:
                self._ring.close()

    def _answer(self, mode: int, payload: bytes) -> bytes:
        if mode == HANG_UP:
            self._receiver.lost(self._owner)
            self._owner = object()
            return b""
        question: Question = decode_question(payload)
        if mode == INQUIRY:
            return encode(self._receiver.handle(question, object(), None))
        if isinstance(question, Bucket):
            return self._bucket(mode, question)
        if isinstance(question, Agree):
            try:
                self._make_ring(question)
            except ConvtoolsError as error:
                return encode(self._receiver.refusal(str(error)))
        elif isinstance(question, Open):
            self._lease = question.lease
        return encode(self._receiver.handle(question, self._owner, self._ring))

    def _make_ring(self, question: Agree) -> None:
        ring = self._ring
        if ring is None or (ring.bucket_bytes, ring.slots) != (question.bucket_bytes, question.slots):
            self._receiver.lost(self._owner)
            if ring is not None:
                ring.close()
            self._ring = None
            self._ring = Ring(question.bucket_bytes, question.slots)

    def _bucket(self, mode: int, question: Bucket) -> bytes:
        """Its bytes are always received, whatever becomes of them: others take part in the broadcast."""
        import torch

        if self._ring is None:
            raise PeerError("a bucket came before a plan")
        into = self._ring.slot(question.slot, question.nbytes)
        until = time.monotonic() + self._timeout
        if mode == SHARDS:
            if self._shards is None:
                raise PeerError("shards came to an engine that takes whole tensors")
            try:
                question = self._shards.take(question, into, until)
            except PeerError:
                raise
            except RefitError as error:
                given_up = Abort(question.token, question.attempt, wire_text(error, 1000))
                self._receiver.handle(given_up, self._owner, self._ring)
                return encode(self._receiver.refusal(str(error)))
        elif question.nbytes:
            data = torch.frombuffer(into, dtype=torch.uint8)
            work = self._group.broadcast(data) if mode == BROADCAST else self._group.expect(data, 0, DATA)
            self._group.wait(work, until, "rank 0 of the group")
        return encode(self._receiver.handle(question, self._owner, self._ring))


__all__ = ["GroupWire", "ShardsEnd", "serve_group"]
