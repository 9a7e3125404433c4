"""An engine rank that is sent its own shards by the trainer's ranks, each its part, point to point."""

from typing import TYPE_CHECKING, Any

import msgspec

from convtools.errors import ConvtoolsError
from convtools.refit.bucket import checksum
from convtools.refit.channels.process_group import serve_group
from convtools.refit.errors import PeerError, RefitError
from convtools.refit.protocol import Bucket
from convtools.refit.ranks import steps
from convtools.refit.ranks.group import DATA, HEADER, RankGroup
from convtools.refit.ranks.holdings import Holdings
from convtools.refit.ranks.legs import Message
from convtools.refit.ranks.meeting import ENGINE, meet
from convtools.refit.ranks.parcels import HEADER_NBYTES, check_parcel, read_head
from convtools.refit.ranks.shard_plan import shard_plans
from convtools.refit.ranks.tensors import scatter
from convtools.refit.receiver import Receiver

if TYPE_CHECKING:
    import torch


class ShardTarget:
    """Made on every engine rank at once with the trainer's `ShardSync`; then `serve()`.

    `receiver` has the rank's own tensors under the names of `holdings`: `hf_holdings` of DTensors, or
    `megatron_holdings`. `group` has the trainer's ranks first, in their own order, then the engine's.
    Raises UsageError, RefitError, PeerError, AccountingError, ParallelError: the same on every rank.
    """

    def __init__(
        self, receiver: Receiver, holdings: Holdings, group: Any = None, *, timeout: float = 60.0
    ) -> None:
        self._receiver, self._timeout = receiver, timeout
        self.group = RankGroup(group, timeout)
        met = meet(self.group, ENGINE, holdings)
        me = self.group.rank - len(met.sources)

        def digest() -> bytes:
            self._plan = shard_plans(met.merged, met.targets, met.bucket_bytes, target=me)[0]
            return b"".join(self._plan.legs.digest(rank) for rank in range(len(met.sources)))

        met.compare(steps.agreed(self.group, digest))
        self._room: Any = None

    def serve(self) -> None:
        """Answer until the trainer says bye. Raises PeerError where it dies."""
        serve_group(self._receiver, self.group, timeout=self._timeout, shards=self)

    def take(self, bucket: Bucket, into: memoryview, until: float) -> Bucket:
        """Every sender's part of a bucket, checked, where it belongs. Raises RefitError, PeerError."""
        import torch

        if bucket.index >= len(self._plan.plan.buckets) or (
            bucket.nbytes != self._plan.plan.buckets[bucket.index].nbytes
        ):
            raise PeerError(f"bucket {bucket.index} is not the plan's")
        messages = self._plan.legs.of(bucket.index)
        heads = {rank: torch.zeros(HEADER_NBYTES, dtype=torch.uint8) for rank in messages}
        parts = self._parts(messages)
        works = [
            (rank, self.group.expect(heads[rank], rank, HEADER), self.group.expect(parts[rank], rank, DATA))
            for rank in messages
        ]
        faults: list[ConvtoolsError] = []
        if self._plan.holes:
            into[:] = bytes(len(into))
        to = torch.frombuffer(into, dtype=torch.uint8)
        for rank, head, data in works:
            whom = f"rank {rank} of the trainer"
            self.group.wait(head, until, whom)
            self.group.wait(data, until, whom)
            try:
                said = read_head(heads[rank], bucket.index, messages[rank].nbytes, whom)
                if said.failed:
                    raise RefitError(f"{whom} could not give its bytes")
                check_parcel(said, parts[rank], whom)
            except RefitError as error:  # what the others sent is received all the same
                faults.append(error)
                continue
            scatter(messages[rank], parts[rank], to)
        if faults:
            raise faults[0]
        return msgspec.structs.replace(bucket, checksum=checksum(into))

    def _parts(self, messages: "dict[int, Message] | Any") -> "dict[int, torch.Tensor]":
        """Staging for what comes of one bucket: about a bucket in all, made once."""
        import torch

        total = sum(-(-m.nbytes // 256) * 256 for m in messages.values())
        if self._room is None or len(self._room) < total:
            self._room = torch.zeros(total, dtype=torch.uint8)
        out, at = {}, 0
        for rank, message in messages.items():
            out[rank] = self._room[at : at + message.nbytes]
            at += -(-message.nbytes // 256) * 256
        return out


__all__ = ["ShardTarget"]
