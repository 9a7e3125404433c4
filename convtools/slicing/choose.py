"""The cheapest selection that covers every kind and that a config can also say.

A rule such as "every second layer has experts" does not allow any choice: where the cheapest layers do
not follow it, other layers of the same kinds are tried, and more of them, cheapest first.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence

from convtools.errors import ConfigError
from convtools.slicing.selection import Chosen, Kind, candidates, cover

ASKED = "asked for"
"""Why a layer is kept that the user listed."""
ADDED = "added, for the config cannot say what the others are without it"
"""Why a layer is kept beside those that cover the model."""
SAID = " that the config can say"
"""Behind the kind that a layer was chosen for, where there are cheaper ones that no config describes."""
_MOST_TRIED = 5000
_MOST_RUNS = 8
"""Runs of one kind that are tried: half of them the cheapest, and half the last, which others may lean on."""

_MOST_ADDED = 3

_State = tuple[tuple[int, ...], tuple[int, ...]]
"""Which of its runs each kind has, and further layers."""
Check = Callable[[Sequence[int]], None]
"""Raises ConfigError where a selection cannot be said."""


def choose(how: str, kinds: Sequence[Kind], nbytes: Sequence[int], check: Check) -> tuple[Chosen, ...]:
    """Layers that cover the model, in order. Raises ConfigError where no selection was found, UsageError."""
    chosen = cover(how, kinds, nbytes)
    try:
        check([i for run in chosen for i in run.layers])
        return chosen
    except ConfigError as error:
        for other in _others(how, kinds, nbytes) if how != "pairs" else ():
            if _passes(check, other):
                return tuple(run if run.why == ADDED else run._replace(why=run.why + SAID) for run in other)
        raise error


def _passes(check: Check, chosen: Sequence[Chosen]) -> bool:
    try:
        check([i for run in chosen for i in run.layers])
    except ConfigError:
        return False
    return True


def _others(how: str, kinds: Sequence[Kind], nbytes: Sequence[int]) -> list[tuple[Chosen, ...]]:
    """Selections that cover the model, cheapest first: others of each kind, more layers, neighbours."""
    runs = candidates(how, kinds)
    options: list[list[Chosen]] = []
    for kind, some in runs.items():
        cheapest = sorted(some, key=lambda run: (_cost([run], nbytes), run))[: _MOST_RUNS // 2]
        tried = {*cheapest, *sorted(some)[-_MOST_RUNS // 2 :]}
        options.append([Chosen(r, kind) for r in sorted(tried, key=lambda run: (_cost([run], nbytes), run))])
    found = {
        *_search(options, nbytes, added=0),
        *_search(options, nbytes, added=_MOST_ADDED),
        *_neighbours(runs, len(kinds), nbytes),
    }
    smaller = [some for some in found if sum(len(run.layers) for run in some) < len(kinds)]  # all is no slice
    return sorted(smaller, key=lambda some: (_cost([run.layers for run in some], nbytes), some))


def _search(
    options: Sequence[Sequence[Chosen]], nbytes: Sequence[int], *, added: int
) -> Iterator[tuple[Chosen, ...]]:
    """One run of each kind, with up to `added` more layers: the cheapest first, not without end."""

    def made(picks: Sequence[int], more: Sequence[int]) -> tuple[Chosen, ...]:
        out = [option[pick] for option, pick in zip(options, picks, strict=True)]
        held = {i for run in out for i in run.layers}
        return tuple(sorted([*out, *(Chosen((i,), ADDED) for i in more if i not in held)]))

    start: _State = ((0,) * len(options), ())
    heap: list[tuple[int, tuple[int, ...], _State]] = [(0, (), start)]
    seen = {start}
    for _ in range(_MOST_TRIED):
        if not heap:
            return
        _, _, (picks, more) = heapq.heappop(heap)
        yield made(picks, more)
        steps: list[_State] = [
            ((*picks[:k], picks[k] + 1, *picks[k + 1 :]), more)
            for k in range(len(picks))
            if picks[k] + 1 < len(options[k])
        ]
        if len(more) < added:
            steps += [(picks, (*more, i)) for i in range(more[-1] + 1 if more else 0, len(nbytes))]
        for step in steps:
            if step not in seen and len(seen) < 4 * _MOST_TRIED:
                seen.add(step)
                layers = tuple(i for run in made(*step) for i in run.layers)
                heapq.heappush(heap, (sum(nbytes[i] for i in layers), layers, step))


def _neighbours(
    runs: dict[str, list[tuple[int, ...]]], count: int, nbytes: Sequence[int]
) -> list[tuple[Chosen, ...]]:
    """For every first layer the fewest neighbours that hold a run of every kind."""
    out = []
    for first in range(count):
        ends = [min((run[-1] for run in some if run[0] >= first), default=count) for some in runs.values()]
        if max(ends) < count:
            first_of = {min(run for run in some if run[0] >= first): why for why, some in runs.items()}
            why = {i: name for run, name in first_of.items() for i in run}
            out.append(tuple(Chosen((i,), why.get(i, ADDED)) for i in range(first, max(ends) + 1)))
    return sorted(out, key=lambda some: (_cost([run.layers for run in some], nbytes), some))


def _cost(runs: Sequence[tuple[int, ...]], nbytes: Sequence[int]) -> int:
    return sum(nbytes[i] for run in runs for i in run)
