"""`ShardSync`: the trainer's ranks send each engine rank its own shards; nothing is gathered anywhere.

The same transaction as `WeightSync`, one plan an engine rank: all prepare before any commits. The lead
talks to the engine ranks; the bytes go point to point.
"""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from convtools.errors import ConvtoolsError, UsageError, capped
from convtools.refit.bucket import Ring
from convtools.refit.errors import PeerError, RefitError
from convtools.refit.fleet import Fleet
from convtools.refit.link import Link
from convtools.refit.protocol import DRAIN, Bucket, InFlight, PartRow
from convtools.refit.ranks import steps
from convtools.refit.ranks.group import RankGroup
from convtools.refit.ranks.meeting import TRAINER, meet
from convtools.refit.ranks.shard_plan import ShardPlan, shard_plans
from convtools.refit.ranks.shard_sender import ShardSender
from convtools.refit.ranks.source import RankedSource
from convtools.refit.report import PushReport, VerifyReport, differing
from convtools.refit.sinks.process_group import GroupChannel
from convtools.refit.trace import Trace

if TYPE_CHECKING:
    pass

_TINY = 256


class ShardSync:
    """Made on every rank of the trainer at once with the engine ranks' `ShardTarget`; called in step.

    `group` (None: the whole job) has the ranks of `source` first, in their order, then the engine's.
    Each rank stages one bucket; each engine rank `slots + 1` of them. Raises UsageError, RefitError,
    PeerError, AccountingError, ParallelError: the same on every rank.
    """

    def __init__(
        self,
        source: RankedSource,
        group: Any = None,
        *,
        bucket_bytes: int = 8 << 20,
        slots: int = 2,
        timeout: float = 60.0,
        lease: float = 60.0,
        finite: bool = True,
        in_flight: InFlight = DRAIN,
        flush: bool = True,
    ) -> None:
        self._source, self._timeout, self._finite, self._flush = source, timeout, finite, flush
        self.group = RankGroup(group, timeout)
        if (self.group.rank, self.group.size > source.group.size) != (source.group.rank, True):
            raise UsageError("the group must have the trainer's ranks first, then the engine's")
        met = meet(self.group, TRAINER, source.holdings[source.group.rank], bucket_bytes)
        self._plans: list[ShardPlan] = []

        def digests() -> bytes:
            rank = self._source.group.rank
            self._plans = shard_plans(met.merged, met.targets, met.bucket_bytes, sender=rank)
            return b"".join(plan.legs.digest(rank) for plan in self._plans)

        met.compare(steps.agreed(self.group, digests))
        self._engines = range(source.group.size, self.group.size)
        source.patience = timeout * (4 + 4 * len(self._engines))
        self._sender = ShardSender(source, self.group, self._plans, timeout=timeout, finite=finite)
        source.serve, source.tell_values = self._sender.send, self._sender.told
        self._slots, self._ring, self._fleets = slots, None, []
        if source.leads:
            self._ring = Ring(_TINY, slots)  # the lead stages nothing: what agrees asks for its slots only
            self._channel = GroupChannel(self.group, engines=self._engines)
            for sink, plan in zip(self._channel.sinks, self._plans, strict=True):
                sink.shards = True
                self._fleets.append(
                    Fleet(
                        [sink], plan.plan, self._ring, timeout=timeout, lease=lease, in_flight=in_flight,
                        flush=flush, trace=Trace(None),
                    )
                )  # fmt: skip

    def push(self, version: int, *, force: bool = False) -> PushReport:
        """Make every engine rank serve its shards as `version`. Raises RefitError after an abort."""
        if type(version) is not int or not 0 <= version < 1 << 62:
            raise UsageError("a version is a step of the trainer", found=repr(version))
        found: PushReport = self._source.together(
            "push", (version, force), lambda: self._push(version, force)
        )
        return found

    def verify(self) -> VerifyReport:
        """Compare the source with what every engine rank serves now, tensor by tensor of its own."""
        found: VerifyReport = self._source.together("verify", (), self._verify)
        return found

    def close(self) -> None:
        """The lead ends the service of the engine ranks; every rank leaves the group."""
        if self._source.leads:
            self._channel.close()
            assert self._ring is not None
            self._ring.close()
        self.group.close()

    @property
    def _links(self) -> Iterator[Link]:
        return (link for fleet in self._fleets for link in fleet.links)

    def _push(self, version: int, force: bool) -> PushReport:
        began = time.perf_counter()
        self._source.begin()
        self._sender.forget()
        try:
            try:
                for fleet in self._fleets:
                    fleet.open(version, force=force, fingerprints=True)
                waited = self._stream()
                prepared = time.perf_counter()
                for fleet, values in zip(self._fleets, self._sender.gathered(again=False), strict=True):
                    fleet.prepare(values)
            except BaseException as error:
                cause = self._cause(error)
                for fleet in self._fleets:
                    fleet.abort(cause)
                if isinstance(cause, ConvtoolsError):
                    raise self._refused(version, cause) from error
                raise
            self._commit(version)
        finally:
            self._source.end()
        ended = time.perf_counter()
        plans = [plan.plan for plan in self._plans]
        return PushReport(
            version, sum(len(p.tensors) for p in plans), sum(len(p.buckets) for p in plans),
            sum(p.nbytes for p in plans), 0, ended - began, 0.0, prepared - began - waited, waited,
            ended - prepared,
            tuple(
                link.report() for link in self._links
            ),
            (*(n for n, on in (("finite", self._finite), ("flush", self._flush)) if not on),
             *(said for fleet in self._fleets for said in fleet.not_flushed()), *self._source.unchecked),
        )  # fmt: skip

    def _stream(self) -> float:
        """Bucket by bucket of every engine rank; gives the seconds of waiting for them."""
        waited, count = 0.0, max(len(plan.plan.buckets) for plan in self._plans)
        for index in range(count + self._slots - 1):
            began = time.perf_counter()
            for fleet in self._fleets:
                (link,) = fleet.links
                while link.consumed < min(index - self._slots + 1, len(fleet.plan.buckets)):
                    link.await_bucket(self._timeout)
            waited += time.perf_counter() - began
            if index >= count:
                continue
            self._source.group.command(steps.BUCKET, index)
            for fleet in self._fleets:
                if index < len(fleet.plan.buckets):
                    self._announce(fleet, index)
            self._sender.send(index)
        for fleet in self._fleets:
            (link,) = fleet.links
            while link.consumed < len(fleet.plan.buckets):
                link.await_bucket(self._timeout)
        return waited

    def _announce(self, fleet: Fleet, index: int) -> None:
        """Tell an engine rank that a bucket comes; it makes the checksum of what it put together."""
        (link,) = fleet.links
        bucket = fleet.plan.buckets[index]
        rows = [PartRow(p.tensor, p.start, p.nbytes, p.offset) for p in bucket.parts]
        question = Bucket(
            link.token, fleet.attempt, index, index % self._slots, bucket.nbytes, b"\0" * 16, rows
        )
        link.send_bucket(question, self._timeout)

    def _cause(self, error: BaseException) -> BaseException:
        """What a rank of the trainer says went wrong there, if one does; else the error itself."""
        if isinstance(error, PeerError) or not isinstance(error, ConvtoolsError):
            return error
        try:
            self._sender.gathered(again=False)
        except ConvtoolsError as found:
            return error if self._source.group.broken else found
        return error

    def _commit(self, version: int) -> None:
        failed, begun = [], False
        for fleet in self._fleets:
            (link,) = fleet.links
            before = link.version
            try:
                fleet.commit(version)
                begun = True
            except RefitError as error:
                failed.append(error.what)
                if not begun and link.connected and link.version == before:  # it said no: then nowhere
                    for other in self._fleets:
                        other.abort("another engine rank could not commit")
                    break
                begun = True
        if failed:
            raise RefitError(
                f"version {version} was prepared everywhere and not committed everywhere",
                found=f"{capped(failed)}; now {self._states()}",
                fix="each engine rank serves its whole shards of one version; push again",
            )

    def _refused(self, version: int, error: ConvtoolsError) -> RefitError:
        kind: Callable[..., RefitError] = RefitError
        return kind(
            f"version {version} was not pushed: {error.what}", where=error.where, expected=error.expected,
            found=f"{error.found}; now {self._states()}" if error.found else self._states(), fix=error.fix,
        )  # fmt: skip

    def _states(self) -> str:
        return capped(link.standing() for link in self._links)

    def _verify(self) -> VerifyReport:
        self._source.begin()
        try:
            wanted = self._sender.gathered(again=True)
        finally:
            self._source.end()
        differ: dict[str, tuple[str, ...]] = {}
        unreadable: dict[str, str] = {}
        for fleet, values in zip(self._fleets, wanted, strict=True):
            (link,) = fleet.links
            try:
                link.refresh(fleet.plan, fleet.ring, self._timeout, True)
                told = link.told("serves", len(values), self._timeout)
            except RefitError as error:
                unreadable[link.name] = error.what
                continue
            if names := differing(fleet.plan.tensors, values, told.fingerprints):
                differ[link.name] = names
        return VerifyReport(sum(len(values) for values in wanted), differ, unreadable)


__all__ = ["ShardSync"]
