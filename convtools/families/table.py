"""The words in which a model is declared: parameters, rows and the table they make.

A `Param` is a global Megatron tensor: its `torch_dist` name, its shape, and how tensor parallelism
cuts it. A `Row` says which views of it are which views of Hugging Face tensors. Blocks are lists
of rows with names relative to a layer; a family strings blocks into a `Table`. Everything else
(conversion both ways, sharding, slicing, comparing) is derived from the table.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from convtools.errors import MappingError
from convtools.layout.mapping import Mapping
from convtools.layout.parallel import Cut, Part
from convtools.layout.piece import Piece
from convtools.layout.view import View, same

FIRST, LAST = "first", "last"
"""Pipeline stages that are not a decoder layer's own: with the embedding, with the head."""

MODEL, WIDER, EITHER, FP32 = "model", "wider", "either", "fp32"
"""Stored in the model's dtype; in that or in fp32; the same, and left in fp32 by a cast; always in fp32."""


@dataclass(frozen=True, slots=True)
class Expert:
    """Which routed expert a parameter belongs to."""

    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Param:
    """A global Megatron tensor, named as `torch_dist` names it (a routed expert: with its number)."""

    name: str
    shape: tuple[int, ...]
    cut: Cut | None = None
    """None: every rank holds the whole."""
    split: bool = False
    """`torch_dist` stores each part of the cut under a key of its own, `<name>.<part>`."""
    expert: Expert | None = None
    """Routed experts are cut by etp, live on one ep rank, and share one stacked key."""
    stage: int | str = FIRST
    """A decoder layer's index, or FIRST or LAST."""
    layers: int = 0
    """Number of decoder layers, where all are alike and `torch_dist` stacks them under one key; else 0."""
    module: str | None = None
    """The Transformer Engine module that saves an (empty) `_extra_state` beside this tensor."""
    memory_state: str | None = None
    """A further module that saves an empty `_extra_state` in memory, but not in `torch_dist`."""
    both_stored: bool = False
    """Whether `torch_dist` has that further module's state after all, as Megatron's hybrid model saves it."""
    aliases: tuple[str, ...] = ()
    """Names that other layer specs give the same tensor."""
    precision: str = MODEL
    """MODEL, WIDER, EITHER or FP32. `--dtype` leaves fp32 of EITHER and FP32 alone unless told otherwise."""
    vocab: int | None = None
    """Rows of the true vocabulary, where the rows past it are padding."""
    shift: int = 0
    """Megatron's numbers are Hugging Face's plus this: -1 where only Megatron centres a norm on zero."""

    @property
    def stack(self) -> str:
        """The key that holds all experts of this parameter: `...experts.experts.linear_fc1.weight`."""
        assert self.expert is not None, "only routed experts are stacked"
        return self.name.replace(f".experts.{self.expert.index}.", ".experts.", 1)


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter, and the Hugging Face views that make it up."""

    param: Param
    equal: tuple[tuple[View, View], ...]
    """(view of the parameter, view of a Hugging Face tensor)."""

    def pieces(self) -> Iterator[Piece]:
        """The row as pure data."""
        return (same(mcore, hf) for mcore, hf in self.equal)


Block = list[Row]


def copied(mcore: str, hf: str, shape: tuple[int, ...], cut: Cut | None = None, **more: object) -> Row:
    """A row whose two sides are the same tensor under two names. `te=True` names its module."""
    if more.pop("te", False):
        more["module"] = mcore.rpartition(".")[0]
    return Row(Param(mcore, shape, cut, **more), ((View(mcore, *shape), View(hf, *shape)),))  # type: ignore[arg-type]


def norm(mcore: str, hf: str, size: int, *aliases: str) -> Row:
    """A norm weight `[size]`, held whole by every rank; a fused norm belongs to the linear's module."""
    fused = mcore.endswith("layer_norm_weight")
    return copied(mcore, hf, (size,), te=not fused, aliases=aliases)


def rows(*factors: tuple[str, int], **conditions: tuple[tuple[str, int], ...]) -> Cut:
    """Column parallel: dim 0 cut evenly. `factors` multiply to its length; the first must divide."""
    return Cut(0, (Part("", factors),), **conditions)


def columns(*factors: tuple[str, int]) -> Cut:
    """Row parallel: dim 1 cut evenly."""
    return Cut(1, (Part("", factors),))


def placed(block: Iterable[Row], mcore: str, hf: str, stage: int | str, layers: int = 0) -> Iterator[Row]:
    """A block under a layer's names: `decoder.layers.3.` and `backbone.layers.3.mixer.`."""
    for row in block:
        p = row.param
        param = replace(
            p,
            name=mcore + p.name,
            stage=stage,
            layers=layers,
            module=None if p.module is None else mcore + p.module,
            memory_state=None if p.memory_state is None else mcore + p.memory_state,
            aliases=tuple(mcore + alias for alias in p.aliases),
        )
        yield Row(param, tuple((a.renamed(mcore + a.name), b.renamed(hf + b.name)) for a, b in row.equal))


class Copy(NamedTuple):
    """A Hugging Face tensor that repeats another, such as a tied `lm_head.weight`."""

    name: str
    of: str
    reason: str


@dataclass(frozen=True, slots=True)
class Table:
    """A whole model: every Megatron parameter and every Hugging Face tensor, and how they relate."""

    params: dict[str, Param]
    hf: dict[str, tuple[int, ...]]
    """Shape of every Hugging Face tensor, in the order in which they are written."""
    mapping: Mapping
    """Side a: parameters; side b: Hugging Face tensors."""

    @staticmethod
    def of(rows: Iterable[Row]) -> "Table":
        """Collect rows. Raises MappingError where two of them claim one name or differ in a shape."""
        params: dict[str, Param] = {}
        hf: dict[str, tuple[int, ...]] = {}
        pieces: list[Piece] = []
        for row in rows:
            if row.param.name in params:
                raise MappingError(f"`{row.param.name}` is declared twice")
            params[row.param.name] = row.param
            for mcore, other in row.equal:
                if hf.setdefault(other.name, other.shape) != other.shape:
                    raise MappingError(
                        f"`{other.name}` is declared with two shapes",
                        expected=list(hf[other.name]),
                        found=list(other.shape),
                    )
                pieces.append(same(mcore, other))
        shapes = {name: p.shape for name, p in params.items()}
        return Table(params, hf, Mapping(shapes, hf, tuple(pieces)))

    def check(self) -> None:
        """Raise MappingError unless each element but padding is held exactly once, on both sides."""
        rows, pieces = dict(self.mapping.b), list(self.mapping.pieces)
        for p in self.params.values():
            if p.vocab is not None and p.vocab < p.shape[0]:
                pad = View(f"padding of {p.name}", p.shape[0] - p.vocab, *p.shape[1:])
                rows[pad.name] = pad.shape
                pieces.append(same(View(p.name, *p.shape)[p.vocab :], pad))
        Mapping(self.mapping.a, rows, tuple(pieces)).check()
