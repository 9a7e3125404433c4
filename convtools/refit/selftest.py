"""The self-test: the same weights again change nothing, and one changed bit shows where it belongs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from convtools.errors import capped, tick
from convtools.refit.errors import RefitError
from convtools.refit.fleet import Fleet
from convtools.refit.link import Link
from convtools.refit.packing import Packer, canaries_of
from convtools.refit.protocol import WeakRow
from convtools.refit.report import CheckReport, differing

IN_PLACE = ("quarantine", "undo")


@dataclass
class _Seen:
    """What a sink showed of itself."""

    fingerprints: list[bytes]
    digests: dict[str, bytes]
    """Of the engine's own parameters."""
    outputs: bytes | None
    weaker: list[WeakRow] = field(default_factory=list)
    touched: dict[int, list[str]] = field(default_factory=dict)
    """Canary -> the parameters that it must change."""


class SelfTest:
    """Runs against every sink of a fleet; `push` pushes the source as a version, `reading` opens it."""

    def __init__(
        self,
        fleet: Fleet,
        push: Callable[[int], object],
        reading: Callable[[], AbstractContextManager[Packer]],
    ) -> None:
        self._fleet, self._push, self._reading = fleet, push, reading
        self._canaries = canaries_of(fleet.plan)
        self._faults: list[str] = []

    def run(self, version: int) -> CheckReport:
        """Push twice, then canaries in a transaction that is given up. Raises RefitError where a push fails.

        A sink that cannot go back is healed by one more push; it serves nothing meanwhile.
        """
        self._push(version)
        first = {link.name: self._look(link) for link in self._fleet.links}
        self._push(version)
        self._same(first, "a second push of the same weights changed")
        identity = not self._faults
        try:
            self._sing(version, first)
        finally:
            if any(link.state != "clean" for link in self._fleet.links):
                self._push(version)
        self._same(first, "after the canaries were taken back, it is not as it was in")
        tensors = self._fleet.plan.tensors
        return CheckReport(
            identity,
            tuple(tensors[i].name for i in sorted(self._canaries)),
            tuple(self._faults),
            {
                name: {tensors[row.tensor].name: row.why for row in seen.weaker}
                for name, seen in first.items() if seen.weaker
            },
            {name: len(seen.digests) for name, seen in first.items() if seen.digests},
            tuple(name for name, seen in first.items() if seen.outputs is not None),
        )  # fmt: skip

    def _look(self, link: Link) -> _Seen:
        fleet, canaries = self._fleet, sorted(self._canaries)
        told = link.told("serves", len(fleet.plan.tensors), fleet.timeout)
        digests = link.digests(canaries, fleet.timeout)
        outputs: Callable[[float], bytes] | None = getattr(link.sink, "outputs", None)
        return _Seen(
            told.fingerprints, digests.values, outputs(fleet.timeout) if outputs is not None else None,
            told.weaker, dict(zip(canaries, digests.touched, strict=True)),
        )  # fmt: skip

    def _same(self, first: dict[str, _Seen], what: str) -> None:
        for link in self._fleet.links:
            was, now = first[link.name], self._look(link)
            names = differing(self._fleet.plan.tensors, was.fingerprints, now.fingerprints)
            names += tuple(sorted(n for n, v in was.digests.items() if now.digests.get(n) != v))
            if names:
                self._faults.append(f"{link.name}: {what} {capped(map(tick, names))}")
            if was.outputs != now.outputs:
                self._faults.append(f"{link.name}: {what} what it answers")

    def _sing(self, version: int, first: dict[str, _Seen]) -> None:
        fleet = self._fleet
        try:
            with self._reading() as packer:
                # Not as `version`, which is served with other weights; no sink comes to serve this one.
                fleet.open(version + 1, force=False, fingerprints=True)
                fleet.stream(packer, self._canaries)
                fleet.prepare(packer.values())
                for link in fleet.links:
                    self._hear(link, first[link.name])
        except RefitError as error:
            self._faults.append(f"the canaries were refused: {error.what}")
        finally:
            fleet.abort("self-test")

    def _hear(self, link: Link, was: _Seen) -> None:
        """What the canaries, and nothing else, must have changed."""
        plan = self._fleet.plan
        told = link.told("pending", len(plan.tensors), self._fleet.timeout)
        changed = set(differing(plan.tensors, was.fingerprints, told.fingerprints))
        wanted = {plan.tensors[i].name for i in self._canaries}
        if changed != wanted:
            names = capped(sorted(map(tick, changed ^ wanted)))
            self._faults.append(f"{link.name}: a canary in {names} did not show, or showed elsewhere")
        if not was.digests or link.mode not in IN_PLACE:
            return
        now = link.digests([], self._fleet.timeout).values
        moved = {name for name, value in was.digests.items() if now.get(name) != value}
        expected = {name for names in was.touched.values() for name in names}
        for name in sorted(expected - moved):
            tensors = [plan.tensors[i].name for i, names in was.touched.items() if name in names]
            self._faults.append(
                f"{link.name}: {tick(name)} did not change with {capped(map(tick, tensors))}: it is stale"
            )
        if all(was.touched.values()) and (strays := moved - expected):
            self._faults.append(f"{link.name}: the canaries changed {capped(sorted(map(tick, strays)))} too")
