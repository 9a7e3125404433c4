"""What a comparison found: one result per tensor, and the verdict of the whole.

Plain values without arrays, so that the table, the JSON, the page and a program read the same thing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

IDENTICAL: Final = "identical"
CLOSE: Final = "within tolerance"
DIFFERS: Final = "differs"
DTYPE: Final = "dtype differs"
SHAPE: Final = "shape differs"
MISSING_A: Final = "missing in A"
MISSING_B: Final = "missing in B"
SKIPPED: Final = "not compared"
UNREADABLE: Final = "could not be read"

VERDICTS: Final = (IDENTICAL, CLOSE, DIFFERS, DTYPE, SHAPE, MISSING_A, MISSING_B, SKIPPED, UNREADABLE)
"""Every verdict a tensor can have."""
FAULTS: Final = frozenset({DIFFERS, DTYPE, SHAPE, MISSING_A, MISSING_B})
"""The verdicts that prove the two sides unequal."""


@dataclass(frozen=True, slots=True)
class TensorResult:
    """What was found about one tensor."""

    name: str
    """Canonical (Hugging Face) name."""
    verdict: str
    """One of VERDICTS."""
    dtype_a: str | None = None
    """Dtype in A (safetensors spelling); None where A lacks the tensor."""
    dtype_b: str | None = None
    """Dtype in B; None where B lacks the tensor."""
    shape_a: tuple[int, ...] | None = None
    """Shape in A; None where A lacks the tensor."""
    shape_b: tuple[int, ...] | None = None
    """Shape in B; None where B lacks the tensor."""
    elements: int = 0
    """Elements that were compared."""
    different: int = 0
    """Elements whose bytes differ (in a tolerant mode: that lie outside the tolerance)."""
    first_index: tuple[int, ...] | None = None
    """Index of the first of them."""
    max_abs: float | None = None
    """Largest absolute difference between finite values."""
    max_rel: float | None = None
    """Largest of |a - b| / |b|, what `--rtol` bounds, over elements where b is a number but not zero."""
    max_ulp: int | None = None
    """Largest distance in the integer order of the dtype."""
    median_ulp: float | None = None
    """Median of that distance over the differing elements."""
    nan_a: int = 0
    """NaN values in A (counted where the tensor's bytes differ)."""
    nan_b: int = 0
    """NaN values in B."""
    inf_a: int = 0
    """Infinite values in A."""
    inf_b: int = 0
    """Infinite values in B."""
    cause: str | None = None
    """One sentence on what the difference looks like, where a cheap test found it."""
    layer: int | None = None
    """Decoder layer; None outside of the layers."""
    component: str = ""
    """Name within its layer, numbers of experts as `*`."""

    @property
    def faulty(self) -> bool:
        """Whether this result proves the two sides unequal."""
        return self.verdict in FAULTS

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


@dataclass
class Comparison:
    """The verdict on two sets of weights and everything it rests on."""

    a: str
    """What A is, as the caller named it."""
    b: str
    """What B is."""
    a_format: str
    """Format of A: hf, torch_dist, torch, manifest, tensors, shards, engine."""
    b_format: str
    """Format of B."""
    mode: str
    """How elements were compared: "exact", "ulp 2", "atol 0.001 rtol 0"."""
    tensors: tuple[TensorResult, ...]
    """One result per canonical tensor of either side."""
    equal: bool | None
    """Whether they are equal; None: could not tell."""
    verdict: str
    """One sentence."""
    elements: int
    """Elements compared."""
    seconds: float
    """Wall clock of the comparison."""
    notes: tuple[str, ...] = ()
    """What the reader must know beside the verdict."""
    models: str | None = None
    """That the two are no one architecture, where both say which they are and it is not the same."""

    @property
    def exit_code(self) -> int:
        """0 equal, 1 not equal, 2 could not tell."""
        return 2 if self.equal is None else int(not self.equal)

    @property
    def compared(self) -> int:
        """Tensors of which something is known: all but those left out or not readable."""
        return sum(r.verdict not in (SKIPPED, UNREADABLE) for r in self.tensors)

    @property
    def heading(self) -> str:
        """The verdict in a few words; never a bare "Equal" where not every byte of every tensor is."""
        if self.equal is None:
            return "Could not tell"
        if not self.equal:
            return "Not equal"
        words = ["Equal"]
        tolerance, _, ignored = self.mode.partition(", ")
        if any(r.verdict == CLOSE for r in self.tensors):
            words += [] if tolerance == "exact" else [f"within {tolerance}"]
            words += ["in value, dtypes ignored"] if ignored else []
        if {"manifest", "engine"} & {self.a_format, self.b_format}:
            words.append("by fingerprint")
        if self.compared != len(self.tensors):
            words.append(f"({self.compared:,} of {len(self.tensors):,} tensors)")
        return " ".join(words)

    def counts(self) -> dict[str, int]:
        """How many tensors have each verdict, verdicts without any left out."""
        found = {verdict: 0 for verdict in VERDICTS}
        for result in self.tensors:
            found[result.verdict] += 1
        return {verdict: number for verdict, number in found.items() if number}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "a": self.a,
            "b": self.b,
            "a_format": self.a_format,
            "b_format": self.b_format,
            "mode": self.mode,
            "equal": self.equal,
            "verdict": self.verdict,
            "models": self.models,
            "compared": self.compared,
            "elements": self.elements,
            "seconds": self.seconds,
            "counts": self.counts(),
            "notes": list(self.notes),
            "tensors": [result.to_dict() for result in self.tensors],
        }
