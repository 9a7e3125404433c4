"""Parallel layouts: which part of each global Megatron tensor a rank holds.

Ranks are ordered as Megatron orders them, `tp` fastest and `pp` slowest, and expert parallelism
folds into the same ranks: `tp = r % tp_size`, `etp = r % etp_size`, `ep = r // etp_size % ep_size`
for `r` in a pipeline stage of `lcm(tp_size, etp_size * ep_size)` ranks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import lcm, prod
from typing import NamedTuple

from convtools.errors import ParallelError, capped
from convtools.layout.region import Region


class Rank(NamedTuple):
    """Coordinates of a process in the model-parallel mesh."""

    tp: int
    pp: int
    ep: int
    etp: int


@dataclass(frozen=True, slots=True)
class Part:
    """A run of rows (or columns) that tensor parallelism cuts evenly, written as its factors.

    The first factor is what must divide: a cut never falls inside one of its units.
    """

    name: str
    factors: tuple[tuple[str, int], ...]
    """(what it counts, how many)."""
    size: int = field(init=False)
    """Length of the run: the product of its factors."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", prod(n for _, n in self.factors))


@dataclass(frozen=True, slots=True)
class Cut:
    """How tensor parallelism cuts a tensor: each part along `dim` evenly, then joined per rank."""

    dim: int
    parts: tuple[Part, ...]
    divides: tuple[tuple[str, int], ...] = ()
    """(what, how many): further counts that tp must divide."""
    nests: tuple[tuple[str, int], ...] = ()
    """Counts that tp must divide or be a multiple of."""

    def check(self, tp: int, *, tensor: str, axis: str = "tp") -> None:
        """Raise ParallelError unless `tp` divides what it must, naming both numbers."""
        for label, count in (*self.divides, *(part.factors[0] for part in self.parts)):
            if count % tp:
                raise ParallelError(
                    f"{axis}={tp} does not divide {label}={count}",
                    where=f"`{tensor}`",
                    fix=f"choose a {axis} that divides {count}",
                )
        for label, count in self.nests:
            if count % tp and tp % count:
                raise ParallelError(
                    f"{axis}={tp} neither divides {label}={count} nor is a multiple of it",
                    where=f"`{tensor}`",
                    fix=f"choose a {axis} that divides {count} or is a multiple of it",
                )

    def shard(self, shape: tuple[int, ...], tp: int, rank: int) -> tuple[tuple[Region, Region], ...]:
        """(shape of the whole, tp, rank) -> (region of the whole, region of the rank), part by part."""
        return _shard(self, shape, tp, rank)

    def _shard(self, shape: tuple[int, ...], tp: int, rank: int) -> Iterator[tuple[Region, Region]]:
        whole = local = 0
        for part in self.parts:
            n = part.size // tp
            sizes = tuple(n if d == self.dim else s for d, s in enumerate(shape))
            at = tuple(whole + rank * n if d == self.dim else 0 for d in range(len(shape)))
            to = tuple(local if d == self.dim else 0 for d in range(len(shape)))
            yield Region(at, sizes), Region(to, sizes)
            whole += part.size
            local += n

    def shard_shape(self, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
        """Shape of one rank's tensor."""
        return tuple(s // tp if d == self.dim else s for d, s in enumerate(shape))


@lru_cache(maxsize=4096)
def _shard(cut: Cut, shape: tuple[int, ...], tp: int, rank: int) -> tuple[tuple[Region, Region], ...]:
    return tuple(cut._shard(shape, tp, rank))  # layers and experts ask for the same few over and over


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of the model-parallel mesh, and which layers each pipeline stage holds."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    stages: tuple[tuple[int, ...], ...] = ((),)
    """Global indices of the decoder layers of each virtual stage, in pipeline order: stage `c * pp + r` is
    chunk c of pipeline rank r."""
    vpp: int = 1
    """Model chunks a pipeline rank; above 1: interleaved (virtual) stages."""
    mtp: int | None = None
    """The virtual stage that holds the MTP layers; None: the last."""
    final_norm: int | None = None
    """The virtual stage with the final norm, where that is known; None: as megatron-core 0.16 places it."""

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "ep", "etp", "vpp"):
            _at_least_one(axis, getattr(self, axis))

    def check_stages(self, layers: Iterable[int]) -> None:
        """Raise ParallelError unless `pp * vpp` stages hold each of `layers` exactly once."""
        if len(self.stages) != self.pp * self.vpp:
            chunks = f" and vpp={self.vpp}" if self.vpp > 1 else ""
            raise ParallelError(
                f"pp={self.pp}{chunks}, but {len(self.stages)} stages of layers are given",
                fix="give one tuple of layers for each pipeline stage",
            )
        for name in ("mtp", "final_norm"):
            at = getattr(self, name)
            if at is not None and not 0 <= at < len(self.stages):
                raise ParallelError(f"{name}={at} is none of the {len(self.stages)} stages")
        held = Counter(layer for stage in self.stages for layer in stage)
        wanted = set(layers)
        faults = [f"layer {n} in none" for n in sorted(wanted - held.keys())]
        faults += [f"layer {n} in {times}" for n, times in sorted(held.items()) if times > 1]
        if faults:
            raise ParallelError(
                "the pipeline stages do not hold each layer exactly once",
                expected=f"each in one of {len(self.stages)} stages",
                found=capped(faults),
            )

    def layers(self, pp: int) -> tuple[tuple[int, ...], ...]:
        """The layers of each chunk of one pipeline rank.

        >>> ParallelLayout(pp=2, vpp=2, stages=((0, 1), (2, 3), (4, 5), (6, 7))).layers(0)
        ((0, 1), (4, 5))
        """
        return self.stages[pp :: self.pp]

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage, data parallelism aside."""
        return lcm(self.tp, self.etp * self.ep)

    def ranks(self) -> Iterator[Rank]:
        """Every rank of one model replica, in Megatron's order."""
        for pp in range(self.pp):
            for r in range(self.stage_size):
                yield Rank(r % self.tp, pp, r // self.etp % self.ep, r % self.etp)


def _at_least_one(axis: str, size: int) -> None:
    if size < 1:
        raise ParallelError(f"{axis}={size} is no size", expected="at least 1")


def even_stages(num_layers: int, pp: int) -> tuple[tuple[int, ...], ...]:
    """Cut `num_layers` layers evenly into `pp` stages. Raises ParallelError.

    >>> even_stages(4, 2)
    ((0, 1), (2, 3))
    """
    _at_least_one("pp", pp)
    if num_layers % pp:
        raise ParallelError(
            f"pp={pp} does not divide the number of layers={num_layers}",
            fix=f"choose a pp that divides {num_layers}",
        )
    n = num_layers // pp
    return tuple(tuple(range(s * n, s * n + n)) for s in range(pp))
