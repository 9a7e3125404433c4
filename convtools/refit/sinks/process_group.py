"""Engine ranks of a torch.distributed group: one sink each, one broadcast a bucket for all of them."""

import time
from collections.abc import Sequence
from typing import Any

from convtools.errors import UsageError
from convtools.refit.bucket import Ring
from convtools.refit.channels.process_group import (
    BROADCAST,
    BYE,
    HANG_UP,
    INQUIRY,
    QUESTION,
    SHARDS,
    SINGLE,
    GroupWire,
)
from convtools.refit.errors import PeerError, RefitError
from convtools.refit.plan import RefitPlan
from convtools.refit.protocol import Answer, Bucket, Open, Question, decode_answer, encode
from convtools.refit.ranks.group import RankGroup
from convtools.refit.sinks.base import agree


class GroupChannel:
    """The trainer's end of a group: this process is rank 0 of it, every other rank is an engine's.

    `sinks` go to `WeightSync`; each engine rank runs `serve_group`. Made by all ranks at the same time.
    """

    def __init__(
        self, group: Any = None, *, timeout: float = 60.0, engines: Sequence[int] | None = None
    ) -> None:
        """`engines`: their ranks in the group; all but this one by default. Raises UsageError, PeerError."""
        self.group = group if isinstance(group, RankGroup) else RankGroup(group, timeout)
        if not self.group.leads:
            raise UsageError(
                "the trainer must be rank 0 of the group", found=f"rank {self.group.rank}",
                fix="list it first in new_group, and run serve_group on the others",
            )  # fmt: skip
        self.sinks = [
            GroupSink(self, rank) for rank in (range(1, self.group.size) if engines is None else engines)
        ]
        """One an engine rank."""
        self.attempts: dict[int, bytes] = {}
        """Engine rank -> the attempt that was opened there."""
        self._sent: tuple[bytes, int] = (b"", -1)
        self._works: list[Any] = []

    def broadcast(self, attempt: bytes, index: int, data: Any) -> None:
        """Begin to send a bucket to all engines, at the first of the sinks that is given it."""
        if self._sent != (attempt, index):
            self._sent = (attempt, index)
            if len(data):
                self._works.append(self.group.broadcast(data))

    def settle(self, until: float) -> None:
        """What was broadcast has arrived. Raises PeerError."""
        while self._works:
            self.group.wait(self._works.pop(0), until, "a broadcast to the engines")

    def close(self) -> None:
        """End the service of every engine rank, and the group."""
        try:
            for sink in self.sinks:
                sink.bye()
        except RefitError:
            pass  # broken: the engines know it
        self.group.close()


class GroupSink:
    """One engine rank."""

    def __init__(self, channel: GroupChannel, rank: int, name: str | None = None) -> None:
        self._channel, self._rank = channel, rank
        self.name = name or f"engine rank {rank}"
        self._wire = GroupWire(channel.group, rank)
        self._ring: Ring | None = None
        self.shards = False
        """Whether the bytes of buckets come from the ranks that hold them, not from here."""

    def connect(self, plan: RefitPlan, ring: Ring, timeout: float) -> Answer:
        """Agree on the plan. Raises PeerError, FrameError."""
        self.close()
        self._wire.send(QUESTION, encode(agree(plan, ring)))
        self._ring = ring
        return self.receive(timeout)

    def inquire(self, question: Question, timeout: float) -> Answer:
        """One question before anything is agreed on. Raises PeerError, FrameError."""
        if self._ring is not None:
            raise UsageError("the sink is connected")
        self._wire.send(INQUIRY, encode(question))
        return self.receive(timeout)

    def send(self, question: Question, timeout: float) -> None:
        """Raises PeerError."""
        if self._ring is None:
            raise PeerError("not connected")
        if not isinstance(question, Bucket):
            if isinstance(question, Open):
                self._channel.attempts[self._rank] = question.attempt
            self._wire.send(QUESTION, encode(question))
            return
        if self.shards:
            self._wire.send(SHARDS, encode(question))
            return
        import torch

        data = torch.frombuffer(self._ring.slot(question.slot, question.nbytes), dtype=torch.uint8)
        attempts = self._channel.attempts
        if [attempts.get(sink._rank) for sink in self._channel.sinks] == [question.attempt] * len(attempts):
            self._wire.send(BROADCAST, encode(question))
            self._channel.broadcast(question.attempt, question.index, data)
        else:
            self._wire.send(SINGLE, encode(question), data if len(data) else None)

    def receive(self, timeout: float) -> Answer:
        """The oldest answer. Raises PeerError, FrameError."""
        until = time.monotonic() + timeout
        self._channel.settle(until)
        _, payload = self._wire.receive(until)
        self._wire.settle(until, keep=64)
        return decode_answer(payload)

    def close(self) -> None:
        """Give up what is open; the engine goes on serving."""
        ring, self._ring = self._ring, None
        self._channel.attempts.pop(self._rank, None)
        if ring is None or self._channel.group.broken:
            return
        until = time.monotonic() + self._channel.group.timeout
        try:
            self._channel.settle(until)
            self._wire.send(HANG_UP)
            while self._wire.receive(until)[0] != HANG_UP:
                pass  # answers that nobody waits for any more
            self._wire.settle(until)
        except RefitError:
            pass  # the group is broken now: the next connect says so

    def bye(self) -> None:
        """The engine's service ends. Raises PeerError."""
        self.close()
        self._wire.send(BYE)
        self._wire.settle(time.monotonic() + self._channel.group.timeout)


__all__ = ["GroupChannel", "GroupSink"]
