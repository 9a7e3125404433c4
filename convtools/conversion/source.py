"""A checkpoint opened for conversion: its tensors, and what each of them is in Hugging Face terms."""

from collections.abc import Iterable, Iterator, Mapping as MappingABC
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from convtools.errors import AccountingError, together
from convtools.families.registry import Model
from convtools.families.table import Table
from convtools.layout.mapping import Mapping
from convtools.layout.parallel import ParallelLayout
from convtools.layout.region import Region
from convtools.stores.base import StoredTensor

_SHOWN = 20
"""Problems that an error shows."""


class LeftOut(NamedTuple):
    """Something of the source that is not converted, and why."""

    name: str
    reason: str


class Duplicate(NamedTuple):
    """Two stored tensors that must hold the same bytes; only the first is converted."""

    kept: str
    repeated: str


class Padding(NamedTuple):
    """Rows past the vocabulary: left out, and reported where they are not zero."""

    name: str
    region: Region


class Stored(Protocol):
    """What a plan must know of that which it reads."""

    @property
    def format(self) -> str:
        """`hf`, `torch_dist` or `torch`."""

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """By the store's own names."""

    @property
    def to_hf(self) -> Mapping | None:
        """Side a: stored names, side b: HF names. None: they are the same tensors."""

    @property
    def hf(self) -> dict[str, tuple[int, ...]]:
        """Shape of every HF tensor."""

    @property
    def table(self) -> Table:
        """The model's table; only asked of a Megatron checkpoint."""


@dataclass(frozen=True, slots=True)
class Source:
    """An opened checkpoint: every tensor is converted, a checked duplicate, padding, or left out by name."""

    format: str
    """`hf`, `torch_dist` or `torch`."""
    root: Path
    model: Model
    tensors: dict[str, StoredTensor]
    """By the store's own names: HF name, `torch_dist` key, or `<rank folder>/<name>`."""
    to_hf: Mapping | None
    """Side a: stored names, side b: HF names. None: they are the same tensors."""
    hf: dict[str, tuple[int, ...]]
    """Shape of every HF tensor, in the order in which they are written; those `outside` come last."""
    table: Table
    """The model's table at the source's own (padded) vocabulary."""
    left_out: tuple[LeftOut, ...] = ()
    duplicates: tuple[Duplicate, ...] = ()
    padding: tuple[Padding, ...] = ()
    side_root: Path | None = None
    """Folder of the Hugging Face side's other files, or None where there are none."""
    side_files: tuple[str, ...] = ()
    """Relative to `side_root`, config.json excepted."""
    config_bytes: bytes = b""
    """config.json as it is written out."""
    notes: tuple[str, ...] = ()
    iteration: int | str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    """Megatron's args as plain values, where the source is a Megatron checkpoint."""
    outside: tuple[str, ...] = ()
    """HF tensors outside the language model (towers, projectors): to HF unchanged, or nowhere."""
    layout: ParallelLayout | None = None
    """The parallel layout it was saved at, where that is known."""

    def dtypes(self) -> dict[str, str]:
        """dtype of every HF tensor. Raises AccountingError where its parts differ in dtype."""
        if self.to_hf is None:
            return {name: self.tensors[name].dtype for name in self.hf}
        found: dict[str, str] = {}
        first: dict[str, str] = {}
        for piece in self.to_hf.pieces:
            dtype = self.tensors[piece.a].dtype
            first.setdefault(piece.b, piece.a)
            if found.setdefault(piece.b, dtype) != dtype:
                raise AccountingError(
                    f"`{piece.b}` is stored in parts of different dtypes",
                    expected=f"one dtype; `{first[piece.b]}` is {found[piece.b]}",
                    found=f"`{piece.a}` is {dtype}",
                    fix="save the checkpoint again from one run, in one dtype a tensor",
                )
        return found


def account(
    expected: MappingABC[str, tuple[int, ...]], found: MappingABC[str, tuple[int, ...]], *, what: str
) -> None:
    """Raise AccountingError, naming every tensor that is missing, left over, or of another shape."""
    missing = [n for n in expected if n not in found]
    extra = [n for n in found if n not in expected]
    problems = [f"missing: `{n}` {list(expected[n])}{near}" for n, near in _nearest(missing, extra)]
    problems += [f"not in this model: `{n}` {list(found[n])}{near}" for n, near in _nearest(extra, missing)]
    problems += [
        f"shape: `{n}` is {list(found[n])}, expected {list(shape)}"
        for n, shape in expected.items()
        if n in found and tuple(found[n]) != tuple(shape)
    ]
    if problems:
        raise together(
            AccountingError,
            problems,
            fix=f"the config and the tensors of {what} must describe the same model; nothing was written",
        )


def _nearest(names: list[str], among: list[str]) -> Iterator[tuple[str, str]]:
    """Each name, the first ones with one that is like it: comparing is slow, and only these are shown."""
    for i, name in enumerate(names):
        yield name, _near(name, among) if i < _SHOWN else ""


def _near(name: str, among: list[str]) -> str:
    near = get_close_matches(name, among[:200], n=1, cutoff=0.8)
    return f" (near: `{near[0]}`)" if near else ""


def vocab_padding(table: Table, stored: Iterable[tuple[str, str]]) -> tuple[Padding, ...]:
    """The rows past the vocabulary, of (stored name, parameter) pairs."""
    out = []
    for name, param_name in stored:
        p = table.params[param_name]
        if p.vocab is not None and p.shape[0] > p.vocab:
            out.append(Padding(name, Region((p.vocab, 0), (p.shape[0] - p.vocab, *p.shape[1:]))))
    return tuple(out)
