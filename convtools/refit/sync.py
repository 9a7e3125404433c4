"""`WeightSync`, the one object that a training loop holds: it plans once, and replays the plan at each push.

All sinks prepare before any commits, and any failure before that is an abort everywhere.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from convtools.errors import ConvtoolsError, UsageError, capped, tick
from convtools.refit.bucket import Ring
from convtools.refit.errors import RefitError
from convtools.refit.link import Link
from convtools.refit.packing import Packer, canaries_of
from convtools.refit.plan import RefitPlan, make_plan
from convtools.refit.protocol import Abort, Bucket, Commit, Open, PartRow, Prepare, wire_text
from convtools.refit.report import CheckReport, PushReport, SinkReport, VerifyReport
from convtools.refit.sinks.base import Sink
from convtools.refit.source import open_push_source

BUCKET_BYTES = 8 << 20  # what one side wrote is still in the cache when the other reads it


class WeightSync:
    """Pushes a source's weights into sinks, all or nothing.

    `source`: named tensors, a module, a call that gives them, `Shards`, or a checkpoint's path. `tied`
    names live tensors that must repeat another and are not sent. `before_read` is called at the start of
    a push, and raises while the tensors must not be read (a gather is pending). `timeout` bounds every
    wait for a sink, `lease` how long a sink waits for us. Staging memory is `slots * bucket_bytes`.

    Every bucket has a checksum. `fingerprints` compares each tensor besides, as it was read and as it lies
    in the engine; `finite` refuses NaN and infinity. What is switched off is named in the report.
    """

    def __init__(
        self,
        source: Any,
        sinks: Iterable[Sink],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        slots: int = 2,
        timeout: float = 60.0,
        lease: float = 60.0,
        finite: bool = True,
        fingerprints: bool = True,
        tied: Mapping[str, str] | None = None,
        before_read: Callable[[], None] | None = None,
    ) -> None:
        """Raises UsageError, RefitError, and what opening the source raises."""
        self._links = [Link(sink) for sink in sinks]
        if not self._links:
            raise UsageError("a push needs a sink at least")
        if len({link.name for link in self._links}) != len(self._links):
            raise UsageError("two sinks have one name", found=capped(link.name for link in self._links))
        self._source = open_push_source(source, tied)
        self._timeout, self._lease = timeout, lease
        self._finite, self._fingerprints = finite, fingerprints
        self._before_read = before_read
        self.plan: RefitPlan = make_plan(self._source.tensors(), bucket_bytes)
        """What goes where."""
        self._ring = Ring(bucket_bytes, slots)
        self._busy = False

    def push(self, version: int, *, force: bool = False) -> PushReport:
        """Make every sink serve the source's weights as `version`.

        With `force`, whatever version a sink serves is accepted, and may be lowered. Raises RefitError
        after an abort everywhere; it names the state of each sink, and the next push starts afresh.
        """
        if type(version) is not int or not 0 <= version < 1 << 62:
            raise UsageError("a version is a step of the trainer", found=repr(version))
        began = time.perf_counter()
        with _Reading(self) as packer:
            prepared = 0.0
            try:
                self._open(version, force)
                self._stream(packer)
                prepared = time.perf_counter()
                self._prepare(packer)
            except BaseException as error:
                self._abort(error)
                if isinstance(error, ConvtoolsError):
                    raise self._refused(version, error) from error
                raise
            self._commit(version)
            ended = time.perf_counter()
            return PushReport(
                version, len(self.plan.tensors), len(self.plan.buckets), self.plan.nbytes, self._ring.nbytes,
                ended - began, packer.gather_seconds, packer.pack_seconds, packer.wait_seconds,
                ended - prepared, tuple(_report(link) for link in self._links),
                tuple(n for n in ("finite", "fingerprints") if not getattr(self, f"_{n}")),
            )  # fmt: skip

    def verify(self) -> VerifyReport:
        """Compare the source's tensors with those that every sink serves now, by their fingerprints."""
        with _Reading(self, fingerprints=True) as packer:
            wanted = self._values(packer)
            differing: dict[str, tuple[str, ...]] = {}
            unreadable: dict[str, str] = {}
            for link in self._links:
                try:
                    link.refresh(self.plan, self._ring, self._timeout, True)
                    found = self._served(link)
                except RefitError as error:
                    unreadable[link.name] = error.what
                    continue
                if names := self._differ(wanted, found):
                    differing[link.name] = names
            return VerifyReport(len(self.plan.tensors), differing, unreadable)

    def check(self, version: int | None = None) -> CheckReport:
        """The self-test: a second push of the same weights changes nothing, and one changed bit shows.

        Pushes the source first, as `version` (by default the highest that a sink serves). The canaries are
        written in a transaction that is prepared, read back and aborted: they are never served. A sink
        that writes in place without an undo log would be left in quarantine by that, and is skipped.
        """
        for link in self._links:
            link.refresh(self.plan, self._ring, self._timeout, False)
        at = max(link.version for link in self._links) if version is None else version
        self.push(at)
        first = {link.name: self._served(link) for link in self._links}
        self.push(at)
        identity = all(self._served(link) == first[link.name] for link in self._links)
        faults: list[str] = []
        skipped = {
            link.name: "it writes in place and cannot go back" for link in self._links
            if link.mode not in ("shadow", "undo")
        }  # fmt: skip
        canaries = canaries_of(self.plan)
        if len(skipped) < len(self._links):
            faults = self._sing(at, canaries, first, set(skipped))
        names = tuple(self.plan.tensors[i].name for i in canaries)
        return CheckReport(identity, names, tuple(faults), skipped)

    def close(self) -> None:
        """Hang up everywhere, and give the staging memory back."""
        for link in self._links:
            link.drop()
        self._ring.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, version: int, force: bool) -> None:
        for link in self._links:
            link.refresh(self.plan, self._ring, self._timeout, force)
        self._attempt = secrets.token_bytes(16)
        for link in self._links:
            question = Open(
                link.version, version, self.plan.digest, link.token + 1, self._attempt, self._lease, force,
                self._fingerprints,
            )  # fmt: skip
            link.token += 1
            link.open(question, self._timeout)

    def _stream(self, packer: Packer, canaries: frozenset[int] = frozenset()) -> None:
        slots, links = self._ring.slots, [link for link in self._links if link.is_open]
        for index, bucket in enumerate(self.plan.buckets):
            self._await(packer, links, index - slots + 1)
            slot = index % slots
            data = self._ring.slot(slot, bucket.nbytes)
            mark = packer.pack(bucket, data, canaries)
            rows = [PartRow(p.tensor, p.start, p.nbytes, p.offset) for p in bucket.parts]
            for link in links:
                question = Bucket(link.token, self._attempt, index, slot, bucket.nbytes, mark, rows)
                link.send_bucket(question, self._timeout)
        self._await(packer, links, len(self.plan.buckets))

    def _await(self, packer: Packer, links: list[Link], count: int) -> None:
        """Until every sink has consumed `count` buckets."""
        began = time.perf_counter()
        for link in links:
            while link.consumed < count:
                link.await_bucket(self._timeout)
        packer.wait_seconds += time.perf_counter() - began

    def _prepare(self, packer: Packer) -> None:
        fingerprints = packer.values()
        for link in self._links:
            if link.is_open:
                link.prepare(Prepare(link.token, self._attempt, fingerprints), self._timeout)

    def _commit(self, version: int) -> None:
        """Everywhere; a sink that fails now cannot take back what the others did, so all are tried."""
        failed: list[str] = []
        for link in self._links:
            try:
                link.commit(Commit(link.token, self._attempt), version, self._timeout)
            except RefitError as error:
                failed.append(error.what)
                link.abort(Abort(link.token, self._attempt, "the commit failed"), self._timeout)
        if failed:
            raise RefitError(
                f"version {version} was prepared everywhere and not committed everywhere",
                found=f"{capped(failed)}; now {self._states()}",
                fix="each sink serves one whole version or none; push again",
            )

    def _abort(self, why: object) -> None:
        """Everywhere."""
        for link in self._links:
            if link.is_open:
                link.abort(Abort(link.token, self._attempt, wire_text(why, 1000)), self._timeout)

    def _refused(self, version: int, error: ConvtoolsError) -> RefitError:
        """The same, with the state of each sink."""
        return RefitError(
            f"version {version} was not pushed: {error.what}",
            where=error.where, expected=error.expected,
            found=f"{error.found}; now {self._states()}" if error.found is not None else self._states(),
            fix=error.fix,
        )  # fmt: skip

    def _states(self) -> str:
        return capped(f"{tick(link.name)} {link.state} at version {link.version}" for link in self._links)

    def _served(self, link: Link) -> list[bytes]:
        return link.fingerprints("serves", len(self.plan.tensors), self._timeout)

    def _values(self, packer: Packer) -> list[bytes]:
        for bucket in self.plan.buckets:
            packer.pack(bucket, self._ring.slot(0, bucket.nbytes))
        return packer.values()

    def _differ(self, a: list[bytes], b: list[bytes]) -> tuple[str, ...]:
        pairs = zip(self.plan.tensors, a, b, strict=True)
        return tuple(tensor.name for tensor, x, y in pairs if x != y)

    def _sing(
        self, version: int, canaries: frozenset[int], first: Mapping[str, list[bytes]], skipped: set[str]
    ) -> list[str]:
        """Push canaries into a transaction that is given up; what was not as it must be."""
        faults: list[str] = []
        links, self._links = self._links, [link for link in self._links if link.name not in skipped]
        try:
            with _Reading(self, finite=False) as packer:
                try:
                    self._open(version, False)
                    self._stream(packer, canaries)
                    self._prepare(packer)
                    for link in self._links:
                        found = link.fingerprints("pending", len(self.plan.tensors), self._timeout)
                        changed = set(self._differ(first[link.name], found))
                        wanted = {self.plan.tensors[i].name for i in canaries}
                        if changed != wanted:
                            names = capped(sorted(map(tick, changed ^ wanted)))
                            faults.append(
                                f"{link.name}: a canary in {names} did not show, or showed elsewhere"
                            )
                finally:
                    self._abort("self-test")
                faults += [
                    f"{link.name}: an abort did not restore its tensors" for link in self._links
                    if self._served(link) != first[link.name]
                ]  # fmt: skip
        finally:
            self._links = links
        return faults


class _Reading:
    """The source, open for one pass."""

    def __init__(
        self, sync: WeightSync, *, finite: bool | None = None, fingerprints: bool | None = None
    ) -> None:
        self._sync = sync
        self._finite = sync._finite if finite is None else finite
        self._fingerprints = sync._fingerprints if fingerprints is None else fingerprints

    def __enter__(self) -> Packer:
        sync = self._sync
        if sync._busy:
            raise UsageError("a push is under way", fix="one thread holds a WeightSync")
        if sync._before_read is not None:
            sync._before_read()
        sync._busy = True
        try:
            sync._source.begin()
        except BaseException:
            self.__exit__()
            raise
        return Packer(sync._source, sync.plan, finite=self._finite, fingerprints=self._fingerprints)

    def __exit__(self, *_: object) -> None:
        self._sync._busy = False
        self._sync._source.end()


def _report(link: Link) -> SinkReport:
    return SinkReport(link.name, link.state, link.version, link.mode, link.undo_bytes, link.consume_seconds)
