"""What several ranks must agree on before a push: replicas are the same bytes, tied weights too.

Fingerprints add up, so no bytes travel for this: each rank tells 16 bytes a tensor.
"""

from collections.abc import Iterator, Mapping, Sequence

from convtools.equality.fingerprint import combine
from convtools.errors import capped, tick
from convtools.refit.errors import FrameError, RefitError
from convtools.refit.protocol import FINGERPRINT_NBYTES
from convtools.refit.ranks.holdings import Merged
from convtools.refit.ranks.tensors import HeldTensors
from convtools.stores.base import DTYPE_NBYTES, StoredTensor


class Checks:
    """Which fingerprints each rank gives, in which order."""

    def __init__(self, merged: Merged, tied: Mapping[str, str], *, compare: bool) -> None:
        self._merged, self._tied = merged, tied
        self._replicas = merged.replicas if compare else ()

    def values(self, rank: int, held: HeldTensors) -> bytes:
        """This rank's, packed."""
        out = [held.fingerprint(at[1]) for group in self._replicas for at in group.held if at[0] == rank]
        for pair in self._tied.items():
            out += [self._part(name, rank, held) for name in pair]
        return b"".join(value.to_bytes(FINGERPRINT_NBYTES, "little") for value in out)

    def _part(self, name: str, rank: int, held: HeldTensors) -> int:
        """Of this rank's part of a tensor."""
        tensor: StoredTensor = self._merged.source.tensors[name]
        size = DTYPE_NBYTES[tensor.dtype]
        return combine(
            held.fingerprint_in(self._merged.holders[blob.path][1], tensor.shape, size, blob.region)
            for blob in tensor.blobs
            if self._merged.holders[blob.path][0] == rank
        )

    def compare(self, said: Sequence[bytes]) -> None:
        """Raises RefitError, naming tensors and ranks, where they differ; FrameError for too few."""
        lists = [
            [data[at : at + FINGERPRINT_NBYTES] for at in range(0, len(data), FINGERPRINT_NBYTES)]
            for data in said
        ]
        try:
            self._compare([iter(values) for values in lists])
        except StopIteration:
            raise FrameError("a rank did not say all that is compared") from None

    def _compare(self, take: Sequence[Iterator[bytes]]) -> None:
        problems = []
        for group in self._replicas:
            # Each rank gives its own in order of the groups, and within a group in order of the ranks.
            values = [next(take[rank]) for rank, _ in group.held]
            differ = [rank for (rank, _), value in zip(group.held, values, strict=True) if value != values[0]]
            if differ:
                problems.append(f"{tick(group.name)} on rank {group.held[0][0]} and rank {capped(differ)}")
        if problems:
            raise RefitError(
                "ranks hold different copies of one tensor",
                found=capped(problems),
                fix="wait for the gather of the parameters before a push",
            )
        for name, of in self._tied.items():
            pairs = [(next(t), next(t)) for t in take]
            sums = [combine(int.from_bytes(p[i], "little") for p in pairs) for i in (0, 1)]
            if sums[0] != sums[1]:
                problems.append(f"{tick(name)} and {tick(of)}")
        if problems:
            raise RefitError("tied weights have diverged", found=capped(problems))
