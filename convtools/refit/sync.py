"""`WeightSync`, the one object that a training loop holds: it plans once, and replays the plan at each push.

All sinks prepare before any commits, and any failure before that is an abort everywhere.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from convtools.errors import ConvtoolsError, UsageError, capped, tick
from convtools.refit.arena import Arena
from convtools.refit.arguments import listed_sinks, step_of
from convtools.refit.bucket import Ring
from convtools.refit.errors import RefitError
from convtools.refit.fleet import Fleet
from convtools.refit.healing import heal
from convtools.refit.link import Link
from convtools.refit.packing import Packer
from convtools.refit.plan import RefitPlan, make_plan
from convtools.refit.protocol import DRAIN, POISONED, InFlight
from convtools.refit.ranks.gathering import check_gathered
from convtools.refit.ranks.source import RankedSource
from convtools.refit.reading import reading
from convtools.refit.refusal import not_pushed
from convtools.refit.report import CheckReport, PushReport, VerifyReport, differing
from convtools.refit.selftest import SelfTest
from convtools.refit.sinks.base import Sink
from convtools.refit.source import PushSource, open_push_source
from convtools.refit.staging import staged
from convtools.refit.trace import Trace
from convtools.refit.verifying import compared

_Report = TypeVar("_Report")
BUCKET_BYTES = 4 << 20  # what one side wrote is still in the cache when the other reads it


class WeightSync(AbstractContextManager["WeightSync"]):
    """Pushes a source's weights into sinks, all or nothing.

    `source`: named tensors, a module, a call that gives them, `Shards`, or a checkpoint's path. `tied`
    names live tensors that must repeat another and are not sent. `before_read` is called at the start of
    a push, and raises while the tensors must not be read (a gather is pending). `timeout` bounds every
    wait for a sink, `lease` how long a sink waits for us. Staging memory is `slots * bucket_bytes`.

    `in_flight`: what requests do that are being answered when the weights change: they finish (drain), end
    with an error (abort), or go on under the new weights, recomputing what was cached (keep). `flush`
    empties KV and prefix caches at the commit. `base(version)` gives the weights of a version that was
    pushed before, in any form that `source` may have: a sink that an abort left poisoned gets them back.

    Every bucket has a checksum, verified before it is applied (`checksums`). `fingerprints` compares each
    tensor besides, as it was read and as it lies in the engine; `finite` refuses NaN and infinity. What is
    switched off is named in the report. `trace` is a file for a trace of all pushes, `progress` is told of
    bytes as they are handed over.

    With an `Arena` as the source nothing is packed, and `bucket_bytes` and `slots` do not count: engines read
    the trainer's own tensors, window by window. With a `device`, such as `cuda`, buckets lie on
    that GPU, which must be the engines' too.

    With a `RankedSource` every rank makes one and calls `push`, `verify` and `check` in step; the sinks are
    those of the rank that leads, and the report, or the error, is the same on all.
    """

    def __init__(
        self,
        source: Any,
        sinks: Iterable[Sink],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        slots: int = 4,
        timeout: float = 60.0,
        lease: float = 60.0,
        finite: bool = True,
        fingerprints: bool = True,
        checksums: bool = True,
        tied: Mapping[str, str] | None = None,
        before_read: Callable[[], None] | None = None,
        in_flight: InFlight = DRAIN,
        flush: bool = True,
        base: Callable[[int], Any] | None = None,
        trace: str | os.PathLike[str] | None = None,
        progress: Callable[[int], None] | None = None,
        device: Any = None,
    ) -> None:
        """Raises UsageError, RefitError, and what opening the source raises."""
        listed = listed_sinks(sinks)
        self._source = open_push_source(source, tied, device)
        if not listed and self._source.leads:
            raise UsageError("a push needs a sink at least")
        self._timeout, self._base, self._before_read = timeout, base, before_read
        self._finite, self._fingerprints, self._flush = finite, fingerprints, flush
        self._arena, self._checksums = source if isinstance(source, Arena) else None, checksums
        self.plan: RefitPlan = (
            make_plan(self._source.tensors(), bucket_bytes) if self._arena is None else self._arena.plan
        )
        """What goes where."""
        self._ranks = self._source if isinstance(self._source, RankedSource) else None
        if self._ranks is not None:
            self._ranks.bind(self.plan, before_read, timeout * (4 + 4 * len(listed)))
            self._before_read, said = None, progress
            progress = partial(self._ranks.progress, said)
        elif before_read is None:
            self._before_read = partial(check_gathered, source)
        self._ring, self._packs = staged(source, bucket_bytes, slots, device)
        with ExitStack() as made:
            made.callback(nullcontext if self._arena is not None else self._ring.close)
            self._trace = Trace(trace)
            made.callback(self._trace.close)
            self._fleet = Fleet(
                listed if self._source.leads else (), self.plan, self._ring, timeout=timeout, lease=lease,
                in_flight=in_flight, flush=flush, trace=self._trace, progress=progress, checksums=checksums,
            )  # fmt: skip
            made.pop_all()
        self._busy, self._closed = threading.Lock(), False
        self._last: list[bytes] = []

    @property
    def _links(self) -> list[Link]:
        return self._fleet.links

    def join(self, sink: Sink) -> None:
        """One sink more, from the next push on; it may serve any version that is not higher.

        Raises UsageError where another has its name.
        """
        self._fleet.join(sink)

    def leave(self, name: str) -> None:
        """One sink less: hang up, and push to it no more. Raises UsageError where there is none."""
        self._fleet.leave(name)

    def push(self, version: int, *, force: bool = False) -> PushReport:
        """Make every sink serve the source's weights as `version`.

        With `force`, whatever version a sink serves is accepted, may be lowered, and may get other weights
        than it was committed with. Raises RefitError after an abort everywhere; it names the state of each
        sink, and the next push starts afresh.
        """
        return self._together("push", (step_of(version), force), lambda: self._push(version, force))

    def _together(self, what: str, args: tuple[int | None, ...], run: Callable[[], _Report]) -> _Report:
        """Of several ranks one does it, and the others serve it their bytes."""
        if self._ranks is None:
            return run()
        found: _Report = self._ranks.together(what, args, run)
        return found

    def _reading(
        self,
        inside: PushSource | None = None,
        *,
        finite: bool = True,
        fingerprints: bool = False,
        refused: Callable[[ConvtoolsError], ConvtoolsError] | None = None,
    ) -> AbstractContextManager[Packer]:
        """Of the source, or of another one `inside` of such a pass."""
        if self._closed or not self._links:
            raise UsageError("it is closed" if self._closed else "a push needs a sink at least")
        return reading(
            inside or self._source, self.plan, None if inside else self._busy, self._before_read,
            finite=finite and self._finite, fingerprints=fingerprints or self._fingerprints,
            checksums=self._checksums, packs=self._packs, refused=refused,
        )  # fmt: skip

    def _push(self, version: int, force: bool) -> PushReport:
        began = time.perf_counter()
        refused = partial(self._refused, version)
        with self._reading(refused=refused) as packer, self._trace.timed("push", "push", version=version):
            try:
                self._fleet.open(version, force=force, fingerprints=self._fingerprints)
                self._fleet.stream(packer)
                prepared, values = time.perf_counter(), packer.values()
                self._fleet.prepare(values)
            except BaseException as error:
                self._fleet.abort(error)
                if isinstance(error, ConvtoolsError):
                    raise refused(error) from error
                raise
            try:
                self._fleet.commit(version)
            except BaseException as error:
                self._fleet.abort(error)  # where an interrupt left one prepared
                if isinstance(error, RefitError) and self._base is not None:
                    raise self._refused(None, error) from error
                raise
            changed = len(differing(self.plan.tensors, self._last, values)) if self._last and values else None
            self._last = values
            return self._report(version, packer, time.perf_counter() - began, prepared, changed)

    def verify(self) -> VerifyReport:
        """Compare the source's tensors with those that every sink serves now, by their fingerprints."""
        return self._together("verify", (), self._verify)

    def _verify(self) -> VerifyReport:
        with self._reading(fingerprints=True) as packer:
            wanted = self._values(packer)
            return compared(self._links, self.plan, self._ring, wanted, self._timeout)

    def check(self, version: int | None = None) -> CheckReport:
        """The self-test: a second push of the same weights changes nothing, and one changed bit shows.

        By default every sink must serve the source's weights, which are pushed as the version that it has:
        what is served does not change. With a `version` they are pushed as that, whatever is served. The
        canaries are written in a transaction that is prepared, read back and aborted: they are never
        served. A sink that writes in place and cannot go back serves nothing from then on until the push
        that ends it. Raises UsageError where a sink serves other weights, or cannot tell, RefitError.
        """
        if version is not None:
            step_of(version)
        return self._together("check", (version,), lambda: self._check(version))

    def _check(self, version: int | None) -> CheckReport:
        at = self._as_served() if version is None else version
        with self._packed():
            canaries = self._reading(finite=False, fingerprints=True)
            return SelfTest(self._fleet, self.push, lambda: canaries).run(at)

    def _as_served(self) -> int:
        """The version at which every sink serves the source's weights. Raises UsageError."""
        seen = self._verify()
        versions = {link.version for link in self._links}
        if seen.equal and len(versions) == 1:
            return versions.pop()
        found = [f"{tick(n)}: {len(names)} tensors differ" for n, names in seen.differing.items()]
        found += [f"{tick(n)}: {why}" for n, why in seen.unreadable.items()]
        raise UsageError(
            "the engine does not serve the source's weights" if found else "the sinks serve several versions",
            found=capped(found) if found else self._fleet.states(), fix="push first, or give check a version",
        )  # fmt: skip

    @contextmanager
    def _packed(self) -> Iterator[None]:
        """Through staging buffers, of an arena too: nothing may be written to the trainer's own tensors."""
        if self._arena is None:
            yield
            return
        before, live = (self._source, self.plan, self._ring), open_push_source(self._arena.tensors_sent())
        with Ring(self.plan.bucket_bytes) as staging:
            self._use(live, make_plan(live.tensors(), self.plan.bucket_bytes), staging)
            try:
                yield
            finally:
                self._use(*before)

    def _use(self, source: PushSource, plan: RefitPlan, ring: Ring) -> None:
        for link in self._links:
            state = link.state
            link.drop()
            link.state = state
        self._source, self.plan, self._ring = source, plan, ring
        self._fleet.plan, self._fleet.ring = plan, ring

    def close(self) -> None:
        """Hang up everywhere, and give the staging memory back."""
        self._closed = True
        self._fleet.close()
        if self._arena is None:
            self._ring.close()
        self._trace.close()  # last: it may raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _report(
        self, version: int, packer: Packer, seconds: float, prepared: float, changed: int | None
    ) -> PushReport:
        off = {"finite": self._finite, "fingerprints": self._fingerprints, "checksums": self._checksums,
               "flush": self._flush}  # fmt: skip
        return PushReport(
            version, len(self.plan.tensors), len(self.plan.buckets), self.plan.nbytes,
            self._ring.staging_bytes, seconds, packer.gather_seconds, packer.pack_seconds,
            packer.wait_seconds, time.perf_counter() - prepared,
            tuple(link.report() for link in self._fleet.took_part),
            (*(name for name, on in off.items() if not on), *self._fleet.not_flushed(),
             *getattr(self._source, "unchecked", ())), changed,
        )  # fmt: skip

    def _refused(self, version: int | None, error: ConvtoolsError) -> ConvtoolsError:
        """The same, with the state of each sink, after what can be healed was."""
        poisoned = self._base is not None and any(link.state == POISONED for link in self._links)
        with self._packed() if poisoned else nullcontext():
            healed = "" if self._base is None else heal(
                self._fleet, self._base, lambda source: self._reading(source), self._fingerprints
            )  # fmt: skip
        return not_pushed(version, error, healed, self._fleet.states())

    def _values(self, packer: Packer) -> list[bytes]:
        for index, bucket in enumerate(self.plan.buckets):
            packer.pack(index, bucket, self._ring.slot(index % self._ring.slots, bucket.nbytes))
        return packer.values()
