"""How two tensors of one shape differ, slab by slab in bounded memory.

Bytes decide what differs; numbers are only looked at where bytes do, and never rounded before they are
compared. In a tolerant mode NaN passes only where both have one in the same place, and infinity only
where both have the same one; the two zeros are equal there, and only there.
"""

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from convtools.equality.numbers import FLOAT, bits, distance, parts, real, special, values
from convtools.equality.options import CompareOptions

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_STEP = 1 << 18
"""Numbers that are looked at at once: their fp64 values fit the cache."""
_SAMPLE = 1 << 22
"""Distances of 32-bit and wider numbers that are kept for the median; of more, every n-th."""


@dataclass(slots=True)
class Meter:
    """Adds up how two tensors differ. Give it all of both, in order."""

    dtype: str
    options: CompareOptions = field(default_factory=CompareOptions)
    unequal: int = 0
    """Elements whose bytes differ."""
    different: int = 0
    """Elements that count as different in this mode."""
    first: int | None = None
    """Flat index of the first of them."""
    max_abs: float | None = None
    max_rel: float | None = None
    """Largest |a - b| / |b| where b is not zero."""
    max_ulp: int | None = None
    nan: list[int] = field(default_factory=lambda: [0, 0])
    """NaN values on either side."""
    inf: list[int] = field(default_factory=lambda: [0, 0])
    """Infinite values on either side."""
    only_zeros: bool = True
    """Whether all that differs are the signs of zeros."""
    only_nans: bool = True
    """Whether all that differs are payloads of NaN."""
    flipped: int = 0
    """Bits that differ, up to a few."""
    _counts: Any = None
    _kept: list[Any] = field(default_factory=list)
    _stride: int = 1

    def add(self, a: Any, b: Any, at: int) -> None:
        """The bytes of both from element `at` on."""
        left, right = bits(a, self.dtype), bits(b, self.dtype)
        at *= parts(self.dtype)
        for i in range(0, len(left), _STEP):
            self._add(left[i : i + _STEP], right[i : i + _STEP], at + i)

    def _add(self, left: "Array", right: "Array", at: int) -> None:
        import numpy as np

        dtype = real(self.dtype)
        if dtype in FLOAT:
            for side, raw in enumerate((left, right)):
                nan, inf = special(raw, dtype)
                self.nan[side] += int(np.count_nonzero(nan))
                self.inf[side] += int(np.count_nonzero(inf))
        where = np.flatnonzero(left != right)
        if not len(where):
            return
        a, b = left[where], right[where]
        self.unequal += self._elements(where + at)
        outside = self._measure(a, b)
        if self.flipped < 8:
            self.flipped += sum(int(x).bit_count() for x in (a[:8] ^ b[:8]))
        where = where[outside] + at
        if len(where):
            self.different += self._elements(where)
            if self.first is None:
                self.first = int(where[0]) // parts(self.dtype)

    def _elements(self, where: "Array") -> int:
        import numpy as np

        return len(where) if parts(self.dtype) == 1 else len(np.unique(where // 2))

    def _measure(self, a: "Array", b: "Array") -> "Array":
        """Take the numbers of elements that differ; returns which are outside of the tolerance."""
        import numpy as np

        dtype, options = real(self.dtype), self.options
        (nan_a, inf_a), (nan_b, inf_b) = special(a, dtype), special(b, dtype)
        with np.errstate(all="ignore"):
            x, y = values(a, dtype), values(b, dtype)
            gap, larger = np.abs(x - y), np.maximum(np.abs(x), np.abs(y))
            finite = ~(nan_a | nan_b | inf_a | inf_b)
            steps = distance(a, b, dtype)
            if dtype not in FLOAT:
                gap = steps.astype("<f8")  # of rounded 64-bit integers two different ones may have none
            self.only_zeros &= bool((larger == 0).all())
            self.only_nans &= bool((nan_a & nan_b).all())
            if finite.any():
                some, size = gap[finite], np.abs(y[finite])
                self.max_abs = max(self.max_abs or 0.0, float(min(some.max(), sys.float_info.max)))
                if (size > 0).any():  # relative to a zero nothing is near
                    relative = float((some[size > 0] / size[size > 0]).max())
                    self.max_rel = max(self.max_rel or 0.0, min(relative, sys.float_info.max))
                self._keep(steps[finite])
            if not options.tolerant:
                return np.ones(len(a), bool)
            if options.ulp is not None:
                near = finite & (steps <= np.uint64(options.ulp))
            else:
                near = finite & (gap <= (options.atol or 0) + (options.rtol or 0) * np.abs(y))
        outside: Array = ~(near | (nan_a & nan_b))
        return outside

    def _keep(self, steps: "Array") -> None:
        import numpy as np

        self.max_ulp = max(self.max_ulp or 0, int(steps.max()))
        if steps.max() < 1 << 17 and not self._kept:
            counts = np.bincount(steps.astype("<i8"), minlength=1 << 17)
            self._counts = counts if self._counts is None else self._counts + counts
            return
        self._kept.append(steps[:: self._stride].copy())
        if sum(map(len, self._kept)) > _SAMPLE:
            self._kept, self._stride = [np.concatenate(self._kept)[::2]], self._stride * 2

    def median_ulp(self) -> float | None:
        """Median distance of the finite numbers that differ (of a sample, where they are many and wide)."""
        import numpy as np

        if self.max_ulp is None:
            return None
        counts = np.zeros(0, "<i8") if self._counts is None else self._counts
        near = np.flatnonzero(counts)
        found = [near.astype("<f8")]
        weight = [counts[near].astype("<f8")]
        for kept in self._kept:
            found.append(kept.astype("<f8"))
            weight.append(np.full(len(kept), float(self._stride)))
        number, times = np.concatenate(found), np.concatenate(weight)
        order = np.argsort(number, kind="stable")
        number, total = number[order], np.cumsum(times[order])
        half = total[-1] / 2
        low, high = np.searchsorted(total, half), np.searchsorted(total, half, side="right")
        return float((number[low] + number[min(high, len(number) - 1)]) / 2)


def bits_differ(meter: Meter) -> str | None:
    """A sentence on a difference that its bits alone explain."""
    if meter.unequal and meter.only_zeros and meter.dtype in FLOAT:
        return "only the signs of zeros differ (-0.0 and 0.0)"
    if meter.unequal and meter.only_nans:
        return "only the payloads of NaN differ"
    if meter.unequal == 1 and meter.flipped == 1:
        return "one bit of one element is flipped"
    return None
