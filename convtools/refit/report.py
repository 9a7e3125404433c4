"""What a push, a comparison or a self-test found."""

from dataclasses import dataclass
from typing import Any


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
    """Reading the source into buckets."""
    pack_seconds: float
    """Fingerprints, checksums, the search for NaN."""
    wait_seconds: float
    """For sinks to consume, until there was a free bucket and at the end."""
    commit_seconds: float
    """Prepare and commit, of all sinks."""
    sinks: tuple[SinkReport, ...]
    unchecked: tuple[str, ...] = ()
    """Guards that were switched off."""

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

    @property
    def equal(self) -> bool:
        """Whether every sink was compared and holds what the source holds."""
        return not self.differing and not self.unreadable


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The self-test."""

    identity: bool
    """Whether a push of the same weights left every fingerprint as it was."""
    canaries: tuple[str, ...]
    """Tensors, one of each kind, of which one element was changed by one unit in the last place."""
    faults: tuple[str, ...]
    """What was not as it must be."""
    skipped: dict[str, str]
    """Sink -> why it could not be tested."""

    @property
    def ok(self) -> bool:
        """Whether all of it ran and was as it must be."""
        return self.identity and not self.faults and not self.skipped
