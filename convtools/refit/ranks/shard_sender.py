"""What a rank of the trainer sends of its shards, and the fingerprints of what it sent."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from convtools.equality.fingerprint import Fingerprint, combine
from convtools.errors import ConvtoolsError
from convtools.refit.bucket import checksum
from convtools.refit.errors import RefitError
from convtools.refit.protocol import FINGERPRINT_NBYTES
from convtools.refit.ranks import steps
from convtools.refit.ranks.group import DATA, HEADER, RankGroup
from convtools.refit.ranks.legs import Message
from convtools.refit.ranks.parcels import Head, view_of
from convtools.refit.ranks.shard_plan import ShardPlan
from convtools.refit.ranks.source import RankedSource
from convtools.refit.ranks.tensors import add_values, check_finite
from convtools.refit.transaction import packed

if TYPE_CHECKING:
    import torch


class ShardSender:
    """One rank's half of a `ShardSync`: it stages one message at a time."""

    def __init__(
        self, source: RankedSource, group: RankGroup, plans: list[ShardPlan], *, timeout: float, finite: bool
    ) -> None:
        self._source, self.group, self._plans = source, group, plans
        self._timeout, self._finite = timeout, finite
        self._engines = range(source.group.size, group.size)
        self._values: list[dict[int, Fingerprint]] = [{} for _ in plans]
        self._room: Any = None
        self._fault: ConvtoolsError | None = None

    def _messages(self, index: int) -> Iterator[tuple[int, Message]]:
        """(place of the engine rank, message) of what this rank sends of bucket `index`."""
        rank = self._source.group.rank
        for i, plan in enumerate(self._plans):
            if index < len(plan.plan.buckets) and (message := plan.legs.of(index).get(rank)):
                yield i, message

    def send(self, index: int) -> None:
        """This rank's part of a bucket of every engine rank. Raises PeerError."""
        if index == 0:
            self.forget()
        found = list(self._messages(index))
        first = self._source.group.rank % len(self._plans)  # not all to the same one at the same time
        for i, message in sorted(found, key=lambda pair: (pair[0] - first) % len(self._plans)):
            data = self._staging(message.nbytes)
            head = self._packed(i, message, index, data)
            until = time.monotonic() + self._timeout
            to = self._engines[i]
            works = [self.group.post(head.pack(), to, HEADER), self.group.post(data, to, DATA)]
            for work in works:
                self.group.wait(work, until, f"engine rank {to}")

    def _packed(self, i: int, message: Message, index: int, data: "torch.Tensor") -> Head:
        view = view_of(data)
        try:
            self._source.held.pack(message, data)
            names = {n: t.name for n, t in enumerate(self._plans[i].plan.tensors)}
            if self._finite:
                check_finite(message, view, names)
            add_values(self._values[i], message, view)
        except (ConvtoolsError, RuntimeError) as error:  # the engine refuses; the cause is told by `_cause`
            fault = (
                error if isinstance(error, ConvtoolsError) else RefitError(f"{type(error).__name__}: {error}")
            )
            self._fault = self._fault or fault
            return Head(index, message.nbytes, b"\0" * 16, failed=True)
        return Head(index, message.nbytes, checksum(view))

    def _staging(self, nbytes: int) -> "torch.Tensor":
        import torch

        if self._room is None or len(self._room) < nbytes:
            self._room = torch.zeros(nbytes, dtype=torch.uint8)
        room: torch.Tensor = self._room[:nbytes]
        return room

    def forget(self) -> None:
        """What the last push came to."""
        self._fault, self._values = None, [{} for _ in self._plans]

    def told(self, again: int) -> None:
        """A follower's part of an exchange of fingerprints; what is wrong is told by the lead."""
        try:
            steps.agreed(self._source.group, lambda: self._own(bool(again)))
        except ConvtoolsError:
            if self._source.group.broken:
                raise

    def _own(self, again: bool) -> bytes:
        """Fingerprints of what this rank gives of each target's tensors; `again`: read anew."""
        if again:
            self.forget()
            for index in range(max(len(plan.plan.buckets) for plan in self._plans)):
                for i, message in self._messages(index):
                    self._packed(i, message, index, self._staging(message.nbytes))
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        return b"".join(
            packed(self._values[i].get(n)) for i, plan in enumerate(self._plans)
            for n in range(len(plan.plan.tensors))
        )  # fmt: skip

    def gathered(self, *, again: bool) -> list[list[bytes]]:
        """By engine rank: the fingerprints of its tensors, from the parts that all ranks gave."""
        if self._source.group.size > 1:
            self._source.group.command(steps.VALUES, int(again))
        said = steps.agreed(self._source.group, lambda: self._own(again))
        out, at = [], 0
        for plan in self._plans:
            values = []
            for _ in plan.plan.tensors:
                parts = (int.from_bytes(data[at : at + FINGERPRINT_NBYTES], "little") for data in said)
                values.append(combine(parts).to_bytes(FINGERPRINT_NBYTES, "little"))
                at += FINGERPRINT_NBYTES
            out.append(values)
        return out
