"""Trainer and engine ranks of one group tell each other, once, what they hold and what they will do."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from convtools.errors import UsageError
from convtools.refit.errors import RefitError
from convtools.refit.ranks import steps
from convtools.refit.ranks.group import RankGroup
from convtools.refit.ranks.holdings import Holdings, Merged, decode_holdings, encode_holdings, merge

TRAINER, ENGINE = "trainer", "engine"
_DIGEST = 32


class _Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    holdings: bytes
    bucket_bytes: int = 0


@dataclass(frozen=True)
class Met:
    """Who is in the group."""

    sources: tuple[Holdings, ...]
    """Of the trainer's ranks, which are the first."""
    targets: tuple[Holdings, ...]
    """Of the engine's ranks, which follow."""
    merged: Merged
    """The trainer's as one source."""
    bucket_bytes: int

    def compare(self, digests: Sequence[bytes]) -> None:
        """Raises RefitError unless both ends derived the same moves.

        A trainer's rank gives one digest for each engine rank, of what it sends there; an engine rank one
        for each rank of the trainer.
        """
        count = len(self.sources)
        for rank in range(count):
            theirs = b"".join(data[_DIGEST * rank : _DIGEST * (rank + 1)] for data in digests[count:])
            if digests[rank] != theirs:
                raise RefitError(f"rank {rank} of the trainer and the engine planned different moves")


def meet(group: RankGroup, role: str, holdings: Holdings, bucket_bytes: int = 0) -> Met:
    """Collective over the group. Raises UsageError, FrameError, and what merging the holdings raises."""
    said = [
        steps.decode(data, _Said)
        for data in group.exchange(steps.encode(_Said(role, encode_holdings(holdings), bucket_bytes)))
    ]
    roles = [one.role for one in said]
    if roles != sorted(roles, reverse=True) or set(roles) != {TRAINER, ENGINE}:
        raise UsageError(
            "the group must have the trainer's ranks first, then the engine's", found=", ".join(roles)
        )
    sizes = {one.bucket_bytes for one in said if one.role == TRAINER}
    if len(sizes) != 1:
        raise UsageError("the trainer's ranks give different bucket_bytes", found=sorted(sizes))
    sources = tuple(decode_holdings(one.holdings) for one in said if one.role == TRAINER)
    targets = tuple(decode_holdings(one.holdings) for one in said if one.role == ENGINE)
    return Met(sources, targets, merge(sources), sizes.pop())
