"""What a push, a comparison or a self-test found."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from convtools.refit.plan import Tensor


@dataclass(frozen=True, slots=True)
class SinkReport:
    """One sink after a push."""

    name: str
    state: str
    version: int
    mode: str
    """How it goes back on an abort: shadow, undo, quarantine."""
    undo_bytes: int
    """Memory it holds for that, beside the staging buffers."""
    consume_seconds: float
    """Spent by the sink on verifying and applying buckets."""
    flushed: bool = False
    """Whether the commit emptied KV and prefix caches; False where there are none, the engine has no hook for
    it (then `unchecked` says so), or it was not wanted."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """A push that was committed everywhere."""

    version: int
    tensors: int
    buckets: int
    nbytes: int
    """Bytes of all tensors, once."""
    staging_bytes: int
    seconds: float
    gather_seconds: float
    """Gathering what does not lie in memory as it is sent: files, Megatron's shards, tensors on a GPU."""
    pack_seconds: float
    """Copies, fingerprints, checksums and the search for NaN, in one pass."""
    wait_seconds: float
    """For sinks to consume, until there was a free bucket and at the end."""
    commit_seconds: float
    """Prepare and commit, of all sinks."""
    sinks: tuple[SinkReport, ...]
    unchecked: tuple[str, ...] = ()
    """Guards that were switched off, and engines that did not say that they emptied caches."""
    changed: int | None = None
    """Tensors whose bytes are not those of the last push of this WeightSync that was committed; None for its
    first, or without fingerprints. 0 after a step of the optimizer means that what was pushed is stale."""

    @property
    def gigabytes_per_second(self) -> float:
        """Of the whole push."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        from dataclasses import asdict

        return asdict(self) | {"gigabytes_per_second": self.gigabytes_per_second}


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Source and sinks, compared by the fingerprints of their own bytes."""

    tensors: int
    differing: dict[str, tuple[str, ...]]
    """Sink -> tensors that are not those of the source; no entry where all are equal."""
    unreadable: dict[str, str]
    """Sink -> why its tensors could not be read back; those were not compared."""
    weaker: dict[str, dict[str, str]] = field(default_factory=dict)
    """Sink -> tensor -> why it was not read back from the engine; compared as the bytes came instead."""

    @property
    def equal(self) -> bool:
        """Whether every sink was compared and holds what the source holds, as far as it can be read."""
        return not self.differing and not self.unreadable


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The self-test."""

    identity: bool
    """Whether a push of the same weights left fingerprints, digests and outputs as they were."""
    canaries: tuple[str, ...]
    """Tensors, one of each kind, of which one element was changed by one unit in the last place."""
    faults: tuple[str, ...]
    """What was not as it must be."""
    weaker: dict[str, dict[str, str]]
    """Sink -> tensor -> why its bytes could not be read back from the engine."""
    digests: dict[str, int]
    """Sink -> how many of its own parameters were watched."""
    outputs: tuple[str, ...]
    """Sinks whose answers were compared."""

    @property
    def ok(self) -> bool:
        """Whether all was as it must be."""
        return self.identity and not self.faults


def differing(tensors: Sequence[Tensor], a: Sequence[bytes], b: Sequence[bytes]) -> tuple[str, ...]:
    """Names of tensors of which two lists of fingerprints differ."""
    return tuple(tensor.name for tensor, x, y in zip(tensors, a, b, strict=True) if x != y)
