"""An n-d rectangle of a tensor, in the words of `torch.distributed.checkpoint`: offsets and sizes."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Region:
    """The elements `offsets[d] <= index[d] < offsets[d] + sizes[d]` of a tensor."""

    offsets: tuple[int, ...]
    """First index in each dim."""
    sizes: tuple[int, ...]
    """Number of indices in each dim; an empty tuple is a scalar."""

    @staticmethod
    def whole(shape: tuple[int, ...]) -> "Region":
        """The region that covers a tensor of `shape`.

        >>> Region.whole((2, 3))
        Region(offsets=(0, 0), sizes=(2, 3))
        """
        return Region((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index in each dim."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: "Region") -> "Region | None":
        """The common elements, or None where there are none.

        >>> Region((0,), (4,)).intersect(Region((3,), (4,)))
        Region(offsets=(3,), sizes=(1,))
        """
        lo = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(min(a, b) - c for a, b, c in zip(self.ends, other.ends, lo, strict=True))
        return Region(lo, sizes) if all(s > 0 for s in sizes) else None

    def within(self, shape: tuple[int, ...]) -> bool:
        """Whether the region lies inside a tensor of `shape`."""
        return len(shape) == len(self.sizes) and all(
            o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(self.offsets, self.sizes, shape, strict=True)
        )
