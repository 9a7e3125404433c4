"""A mapping: all the pieces that relate two sets of tensors, `a` and `b`."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping as MappingABC
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter

from convtools.errors import MappingError
from convtools.layout.cover import boxes_of, first_fault
from convtools.layout.piece import Piece, block, meet
from convtools.layout.region import Region

Shapes = MappingABC[str, tuple[int, ...]]

_FEW = 8  # below this a linear look is as quick as a search


@dataclass(frozen=True, slots=True, eq=False)
class Mapping:
    """Pieces between tensors of side `a` and tensors of side `b`. Immutable; built once, asked often."""

    a: Shapes
    """Name -> shape of every tensor of side a."""
    b: Shapes
    pieces: tuple[Piece, ...]
    _by_a: dict[str, list[Piece]] = field(init=False, repr=False)
    _by_b: dict[str, list[Piece]] = field(init=False, repr=False)
    _spans: dict[str, tuple[list[int], list[int], list[Piece]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        by_a: dict[str, list[Piece]] = defaultdict(list)
        by_b: dict[str, list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            by_a[piece.a].append(piece)
            by_b[piece.b].append(piece)
        object.__setattr__(self, "_by_a", by_a)
        object.__setattr__(self, "_by_b", by_b)
        object.__setattr__(self, "_spans", {})

    def inverse(self) -> "Mapping":
        """The same pieces read from `b` to `a`."""
        return Mapping(self.b, self.a, tuple(p.inverse() for p in self.pieces))

    def of(self, name: str) -> list[Piece]:
        """Every piece of tensor `name` of side a."""
        return self._by_a.get(name, [])

    def touching(self, name: str, region: Region) -> list[Piece]:
        """The pieces of `name` that may reach into `region` (sure to hold all that do)."""
        pieces = self._by_a.get(name, [])
        if len(pieces) <= _FEW or not region.sizes:
            return pieces
        if name not in self._spans:
            spans = sorted(((p.span(0), i) for i, p in enumerate(pieces)), key=itemgetter(0))
            ends = [end for (_, end), _ in spans]
            # Only where spans end in the order in which they begin can the ends be searched.
            usable = all(x <= y for x, y in pairwise(ends))
            in_order = [pieces[i] for _, i in spans]  # a list of its own: `of` may be being read
            self._spans[name] = ([first for (first, _), _ in spans], ends if usable else [], in_order)
        firsts, ends, in_order = self._spans[name]
        stop = bisect_left(firsts, region.offsets[0] + region.sizes[0])
        start = bisect_right(ends, region.offsets[0]) if ends else 0
        return in_order[start:stop]

    def restrict(self, name: str, region: Region, *, into: str) -> Iterator[Piece]:
        """The pieces of `region` of tensor `name`, with side a named `into` and counted from the region."""
        part = block(into, name, region)
        if region == Region.whole(self.a[name]):
            yield from (p.renamed(into, p.b) for p in self.of(name))
            return
        for piece in self.touching(name, region):
            yield from meet(part, piece)

    def compose(self, other: "Mapping") -> "Mapping":
        """(a ~ b) then (b ~ c) -> (a ~ c)."""
        out: list[Piece] = []
        for piece in self.pieces:
            for following in other.touching(piece.b, piece.inverse().extent()):
                out += meet(piece, following)
        return Mapping(self.a, other.b, tuple(out))

    def check(self) -> None:
        """Raise MappingError unless every element of both sides is held exactly once."""
        _check_side(self.a, self.pieces)
        _check_side(self.b, [p.inverse() for p in self.pieces])


def _check_side(shapes: Shapes, pieces: Iterable[Piece]) -> None:
    by_name: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_name[piece.a].append(piece)
    for name in sorted(by_name.keys() - shapes.keys()):
        raise MappingError(f"`{name}` is in a piece but not among the tensors of its side")
    for name, shape in shapes.items():
        held = by_name.get(name, [])
        for piece in held:
            if len(piece.a_origin) != len(shape):
                raise MappingError(
                    f"`{name}`: a piece has {len(piece.a_origin)} dims, the tensor {len(shape)}",
                    found=f"the piece with `{piece.b}`",
                )
            for dim, size in enumerate(shape):
                first, end = piece.span(dim)
                if first < 0 or end > size:
                    raise MappingError(
                        f"`{name}`: a piece reaches outside dim {dim}",
                        expected=f"0 <= index < {size}",
                        found=f"{first} <= index < {end} (other side: `{piece.b}`)",
                    )
        fault = first_fault(shape, ((i, box) for i, p in enumerate(held) for box in boxes_of(p)))
        if fault:
            holders = ", ".join(f"`{held[i].b}`" for i in fault.holders) or "nothing"
            raise MappingError(
                f"`{name}`: element {list(fault.index)} is held by {holders}",
                expected="every element held exactly once",
                found=f"{len(fault.holders)} times",
            )
