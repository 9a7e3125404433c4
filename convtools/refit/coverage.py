"""Which bytes of which tensor have come: each once, and in the end all."""

from bisect import bisect_left

from convtools.errors import capped, tick
from convtools.refit.errors import RefitError
from convtools.refit.plan import RefitPlan


class Coverage:
    """Collects runs of bytes by tensor, joined where they touch."""

    def __init__(self, plan: RefitPlan) -> None:
        self._plan = plan
        self._runs: dict[int, list[tuple[int, int]]] = {}

    def add(self, tensor: int, start: int, end: int) -> None:
        """Raises RefitError where the run is empty, lies outside of the tensor or was given before."""
        name, nbytes = self._plan.tensors[tensor].name, self._plan.tensors[tensor].nbytes
        if not 0 <= start < end <= nbytes:
            raise RefitError(
                f"a part lies outside of {tick(name)}",
                expected=f"a run of its {nbytes} bytes",
                found=f"{start} to {end}",
            )
        runs = self._runs.setdefault(tensor, [])
        at = bisect_left(runs, (start, end))
        before = runs[at - 1] if at else (-1, -1)
        after = runs[at] if at < len(runs) else (nbytes + 1, nbytes + 1)
        if before[1] > start or after[0] < end:
            raise RefitError(f"bytes of {tick(name)} were given twice", found=f"{start} to {end}")
        first, last = at, at
        if before[1] == start:
            first, start = at - 1, before[0]
        if after[0] == end:
            last, end = at + 1, after[1]
        runs[first:last] = [(start, end)]

    def check_whole(self) -> None:
        """Raises RefitError, naming the tensors, unless every byte has come."""
        missing = [
            f"{tick(t.name)} ({sum(b - a for a, b in self._runs.get(i, []))} of {t.nbytes} bytes)"
            for i, t in enumerate(self._plan.tensors)
            if t.nbytes and self._runs.get(i) != [(0, t.nbytes)]
        ]
        if missing:
            raise RefitError("not every element has come", found=capped(missing))
