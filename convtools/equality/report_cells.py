"""The grid of the report page as compact data: one cell per layer and component, worst verdict first.

A page of 100,000 tensors must stay small and quick, whatever the names say. So experts share a cell,
identical tensors are only counted, a cell lists its worst tensors up to an allowance, and what exceeds
the limits of the grid is summed up in a last row or column: counted and coloured, never left out.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from convtools.equality import verdict as v
from convtools.equality.verdict import TensorResult
from convtools.errors import printable

MARKS = {
    v.MISSING_A: "-A",
    v.MISSING_B: "-B",
    v.SHAPE: "S",
    v.DIFFERS: "≠",
    v.DTYPE: "D",
    v.UNREADABLE: "?",
    v.SKIPPED: "·",
    v.CLOSE: "≈",
    v.IDENTICAL: "=",
}
"""What a cell says beside its colour, by verdict; the worst verdict comes first."""

_RANK = {verdict: rank for rank, verdict in enumerate(MARKS)}
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.|$)")
_DIGITS = re.compile(r"(0|[1-9][0-9]{0,14})(?![0-9])")
_EXACT = 2**53
"""JavaScript's numbers are exact up to here."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a comparison a page holds one by one; the rest is summed up."""

    listed: int = 20_000
    """Tensors with numbers of their own."""
    layers: int = 1_000
    """Rows."""
    components: int = 300
    """Columns; tensors outside of the layers, too."""
    text: int = 300
    """Characters of a name or a cause."""


@dataclass(slots=True)
class _Cell:
    counts: Counter[str] = field(default_factory=Counter)
    elements: int = 0
    different: int = 0
    kinds: set[str] = field(default_factory=set)
    example: str = ""
    listed: list[TensorResult] = field(default_factory=list)

    def add(self, result: TensorResult) -> None:
        self.counts[result.verdict] += 1
        self.elements += result.elements
        self.different += result.different
        if len(self.kinds) < 3:
            self.kinds.add(_kind(result))
        self.example = self.example or result.name
        if result.verdict != v.IDENTICAL:
            self.listed.append(result)

    def join(self, other: "_Cell") -> None:
        self.counts += other.counts
        self.elements += other.elements
        self.different += other.different
        self.kinds |= other.kinds
        self.example = self.example or other.example
        self.listed += other.listed

    @property
    def worst(self) -> str:
        return min(self.counts, key=_RANK.__getitem__)


class _Strings:
    """Texts by number; 0 is no text."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.table: list[str | None] = [None]
        self._found: dict[str | None, int] = {None: 0}

    def __call__(self, text: str | None) -> int:
        if text not in self._found:
            self._found[text] = len(self.table)
            self.table.append(None if text is None else shown(text, self._limit))
        return self._found[text]


class _Names:
    """Names as the number of a template, then the numbers that stand in its gaps."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.templates: list[list[str]] = []
        self._found: dict[tuple[str, ...], int] = {}

    def __call__(self, name: str) -> list[int]:
        parts = _DIGITS.split(shown(name, self._limit))
        words = tuple(parts[::2])
        if words not in self._found:
            self._found[words] = len(self.templates)
            self.templates.append(list(words))
        return [self._found[words], *map(int, parts[1::2])]


def shown(text: str, limit: int = 300) -> str:
    r"""`text` in one line without control or direction characters, cut at `limit`.

    >>> shown("a\nb\u202e")
    'a\\nb\\u202e'
    """
    return printable(text.replace("\n", "\\n"), limit)


def grid(tensors: Iterable[TensorResult], limits: Limits) -> dict[str, Any]:
    """The tensors as the page's script reads them (`report_page.js` says what is what)."""
    found: dict[tuple[int | None, str], _Cell] = {}
    for result in tensors:
        component = _EXPERT.sub("*", result.component or result.name)
        found.setdefault((result.layer, component), _Cell()).add(result)
    inside = {key: cell for key, cell in found.items() if key[0] is not None}
    rows = _places(
        [layer for layer, _ in sorted(inside, key=lambda key: key[0] or 0)], inside, 0, limits.layers
    )
    columns = _places(_grouped(name for _, name in inside), inside, 1, limits.components)
    outside = {key: cell for key, cell in found.items() if key[0] is None}
    strip = _places([name for _, name in outside], outside, 1, limits.components)

    merged: dict[tuple[int, int], _Cell] = {}
    for (layer, component), cell in found.items():
        place = (-1, strip[component]) if layer is None else (rows[layer], columns[component])
        merged.setdefault(place, _Cell()).join(cell)
    places = sorted(merged)
    strings, names = _Strings(limits.text), _Names(limits.text)
    cells = [merged[place] for place in places]
    allowed = _allowances([len(cell.listed) for cell in cells], limits.listed)
    listed = []
    for cell, number in zip(cells, allowed, strict=True):
        listed += sorted(cell.listed, key=lambda result: _RANK[result.verdict])[:number]
    verdicts = list(MARKS)
    return {
        "verdicts": [[verdict, MARKS[verdict], _slug(verdict), _calls(verdict)] for verdict in verdicts],
        "rows": _labels(rows, limits.text),
        "columns": _labels(columns, limits.text),
        "strip": _labels(strip, limits.text),
        "cells": {
            "row": [row for row, _ in places],
            "column": [column for _, column in places],
            "counts": [
                [n for p in sorted((_RANK[x], c) for x, c in cell.counts.items()) for n in p]
                for cell in cells
            ],
            "elements": [_number(cell.elements) for cell in cells],
            "different": [_number(cell.different) for cell in cells],
            "kind": [strings(cell.kinds.copy().pop() if len(cell.kinds) == 1 else None) for cell in cells],
            "example": [None if n else names(cell.example) for cell, n in zip(cells, allowed, strict=True)],
            "listed": allowed,
        },
        "tensors": {
            "name": [names(r.name) for r in listed],
            "verdict": [_RANK[r.verdict] for r in listed],
            "dtypeA": [strings(r.dtype_a) for r in listed],
            "dtypeB": [strings(r.dtype_b) for r in listed],
            "shapeA": [strings(_index(r.shape_a)) for r in listed],
            "shapeB": [strings(_index(r.shape_b)) for r in listed],
            "elements": [_number(r.elements) for r in listed],
            "different": [_number(r.different) for r in listed],
            "first": [_index(r.first_index) for r in listed],
            "maxAbs": [_number(r.max_abs) for r in listed],
            "maxRel": [_number(r.max_rel) for r in listed],
            "maxUlp": [_number(r.max_ulp) for r in listed],
            "medianUlp": [_number(r.median_ulp) for r in listed],
            "special": [[_number(n) for n in (r.nan_a, r.nan_b, r.inf_a, r.inf_b)] for r in listed],
            "cause": [strings(r.cause) for r in listed],
        },
        "strings": strings.table,
        "templates": names.templates,
    }


def worst_first(tensors: Iterable[TensorResult]) -> list[TensorResult]:
    """Those that are not identical, worst verdict first, else in their order."""
    return sorted((r for r in tensors if r.verdict != v.IDENTICAL), key=lambda r: _RANK[r.verdict])


def _slug(verdict: str) -> str:
    return verdict.replace(" ", "-")


def _calls(verdict: str) -> int:
    """1 where a reader must look: a fault, or something that could not be read."""
    return int(verdict in v.FAULTS or verdict == v.UNREADABLE)


def _grouped(components: Iterable[str]) -> list[str]:
    """In the order given, those of one module side by side."""
    modules: dict[str, dict[str, None]] = {}
    for name in components:
        modules.setdefault(name.partition(".")[0], {})[name] = None
    return [name for group in modules.values() for name in group]


def _places(
    keys: list[Any], cells: dict[tuple[int | None, str], _Cell], axis: int, limit: int
) -> dict[Any, int]:
    """Key -> its row or column. Past `limit` the worst get one of their own, the rest share the last."""
    unique = list(dict.fromkeys(keys))
    if len(unique) > limit:
        worst: dict[Any, int] = {}
        for key, cell in cells.items():
            worst[key[axis]] = min(worst.get(key[axis], len(MARKS)), _RANK[cell.worst])
        own = set(sorted(unique, key=worst.__getitem__)[: limit - 1])
        unique = [key for key in unique if key in own] + [key for key in unique if key not in own]
    return {key: min(place, limit - 1) for place, key in enumerate(unique)}


def _labels(places: dict[Any, int], limit: int) -> list[str]:
    """What stands at each row or column."""
    sharing: dict[int, list[Any]] = {}
    for key, place in places.items():
        sharing.setdefault(place, []).append(key)
    return [
        shown(str(keys[0]), limit) if len(keys) == 1 else f"{len(keys)} more" for keys in sharing.values()
    ]


def _allowances(wanted: list[int], total: int) -> list[int]:
    """How many of each to list: all, or at most so many from each that `total` is kept.

    >>> _allowances([1, 9, 4], 9)
    [1, 4, 4]
    """
    low, high = 0, max(wanted, default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(n, middle) for n in wanted) <= total:
            low = middle
        else:
            high = middle - 1
    if low:
        return [min(n, low) for n in wanted]
    out = []
    for number in wanted:
        out.append(min(number, 1, total))
        total -= out[-1]
    return out


def _kind(result: TensorResult) -> str:
    """`BF16 [2048, 1024]`, of the side that has it."""
    dtype = result.dtype_a or result.dtype_b or ""
    shape = result.shape_a if result.shape_a is not None else result.shape_b
    return f"{dtype} {_index(shape) or ''}".strip()


def _index(index: tuple[int, ...] | None) -> str | None:
    return None if index is None else f"[{', '.join(map(str, index))}]"


def _number(value: float | None) -> float | str | None:
    """A number for JSON; a text where JSON or JavaScript would not keep it."""
    if value is None:
        return None
    if isinstance(value, int):
        return value if abs(value) <= _EXACT else f"{value:,}"
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)
