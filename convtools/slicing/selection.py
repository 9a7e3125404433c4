"""Which layers to keep: as the user lists them, or the cheapest that cover every kind.

All of it is arithmetic on kinds and bytes: no files, no config.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from convtools.errors import UsageError, capped

COVERS = ("blocks", "types", "pairs")
_RANGE = re.compile(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", re.ASCII)
_MOST_PAIRS = 14


@dataclass(frozen=True, slots=True)
class Kind:
    """What a layer is: its mixer, its feed-forward, or both; an absent half is an empty string."""

    mixer: str
    feed_forward: str

    def __str__(self) -> str:
        return " + ".join(part for part in (self.mixer, self.feed_forward) if part)


class Chosen(NamedTuple):
    """A run of layers that was chosen, and for what."""

    layers: tuple[int, ...]
    why: str
    """The kind that it stands for, or `asked for`."""


def parse_layers(text: str, count: int) -> tuple[int, ...]:
    """Layers as a user lists them: numbers and inclusive ranges, in the order given; repeats are kept.

    >>> parse_layers("0-3,7", 8)
    (0, 1, 2, 3, 7)

    Raises UsageError, saying the rule, for anything else and for a layer that is not there (B65).
    """
    out: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise UsageError(
                f"--layers: `{part.strip()}` is neither a layer nor a range",
                expected="numbers and inclusive ranges, such as 0-3,7 for layers 0, 1, 2, 3 and 7",
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise UsageError(
                f"--layers: the range {first}-{last} runs backwards",
                expected="first-last, both included",
                fix="list single layers to change their order: 3,2,1",
            )
        if last >= count:
            raise UsageError(
                f"--layers: there is no layer {last}",
                expected=f"0 to {count - 1}: the model has {count} layers, and both ends of a range count",
            )
        out += range(first, last + 1)
    return tuple(out)


def cover(how: str, kinds: Sequence[Kind], nbytes: Sequence[int]) -> tuple[Chosen, ...]:
    """The cheapest layers that cover the model; the earliest of those that cost the same.

    `kinds` and `nbytes` have one entry a layer. Raises UsageError.
    """
    if how == "pairs":
        return _cover_pairs(kinds, nbytes)
    return _cheapest(candidates(how, kinds), nbytes)


def candidates(how: str, kinds: Sequence[Kind]) -> dict[str, list[tuple[int, ...]]]:
    """What is to be covered, and the runs of layers that do: for `blocks` and `types`. Raises UsageError."""
    if how == "blocks":
        found = _needed_blocks(kinds)
    elif how == "types":
        found = [((i,), str(kind)) for i, kind in enumerate(kinds)]
    else:
        raise UsageError(f"--cover {how}", expected=", ".join(COVERS))
    out: dict[str, list[tuple[int, ...]]] = {}
    for layers, kind in found:
        out.setdefault(kind, []).append(layers)
    return out


def blocks(kinds: Sequence[Kind]) -> list[tuple[tuple[int, ...], Kind]]:
    """Layers as blocks: a mixer and the feed-forward that follows it, in one layer or in two.

    >>> M, E = Kind("mamba", ""), Kind("", "MoE")
    >>> [layers for layers, _ in blocks([M, E, M, M, E])]
    [(0, 1), (2,), (3, 4)]
    """
    out: list[tuple[tuple[int, ...], Kind]] = []
    for i, kind in enumerate(kinds):
        if out and kind.feed_forward and not kind.mixer:
            before, (layers, made) = i - 1, out[-1]
            if layers == (before,) and made.mixer and not made.feed_forward:
                out[-1] = ((before, i), Kind(made.mixer, kind.feed_forward))
                continue
        out.append(((i,), kind))
    return out


def _needed_blocks(kinds: Sequence[Kind]) -> list[tuple[tuple[int, ...], str]]:
    """Every distinct block; half a block only where no whole one has its half."""
    found = blocks(kinds)
    whole = {kind for _, kind in found if kind.mixer and kind.feed_forward}
    mixers, feed_forwards = {k.mixer for k in whole}, {k.feed_forward for k in whole}
    return [
        (layers, str(kind))
        for layers, kind in found
        if kind in whole
        or (kind.mixer and kind.mixer not in mixers)
        or (kind.feed_forward and kind.feed_forward not in feed_forwards)
    ]


def _cheapest(runs: dict[str, list[tuple[int, ...]]], nbytes: Sequence[int]) -> tuple[Chosen, ...]:
    best = {kind: min((sum(nbytes[i] for i in run), run) for run in some) for kind, some in runs.items()}
    return tuple(sorted(Chosen(run, kind) for kind, (_, run) in best.items()))


def _cover_pairs(kinds: Sequence[Kind], nbytes: Sequence[int]) -> tuple[Chosen, ...]:
    """Every distinct pair of neighbours, as neighbours of the source, and every kind of layer.

    Layer by layer, the cheapest way to each (pairs covered so far, was the last layer kept).
    """
    wanted = sorted({(str(a), str(b)) for a, b in pairwise(kinds)})
    if not wanted:
        return _cheapest(candidates("types", kinds), nbytes)
    if len(wanted) > _MOST_PAIRS:
        raise UsageError(
            f"--cover pairs: the model has {len(wanted)} kinds of neighbours",
            expected=f"at most {_MOST_PAIRS}",
            found=capped(f"{a}, then {b}" for a, b in wanted),
            fix="use --cover blocks or --cover types, or list --layers",
        )
    number = {pair: 1 << i for i, pair in enumerate(wanted)}
    best: dict[tuple[int, bool], tuple[int, tuple[int, ...]]] = {(0, False): (0, ())}
    for i, kind in enumerate(kinds):
        after: dict[tuple[int, bool], tuple[int, tuple[int, ...]]] = {}
        for (seen, kept), (cost, layers) in best.items():
            pair = number[str(kinds[i - 1]), str(kind)] if kept else 0
            for state, way in (
                ((seen, False), (cost, layers)),
                ((seen | pair, True), (cost + nbytes[i], (*layers, i))),
            ):
                after[state] = min(after.get(state, way), way)
        best = after
    full = len(number) and (1 << len(number)) - 1
    _, layers = min(way for (seen, _), way in best.items() if seen == full)
    pairs = [(a, b) for a, b in pairwise(layers) if b == a + 1]
    return tuple(
        Chosen((i,), ", ".join(f"{kinds[a]} before {kinds[b]}" for a, b in pairs if i in (a, b)))
        for i in layers
    )
