"""All sinks of a sync and the transaction open in them: they prepare together, or give up together."""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence

from convtools.errors import UsageError, capped, tick
from convtools.refit.bucket import Ring
from convtools.refit.errors import FrameError, PeerError, RefitError
from convtools.refit.link import Link
from convtools.refit.packing import Packer
from convtools.refit.plan import RefitPlan
from convtools.refit.protocol import (
    ABORT,
    CLEAN,
    DRAIN,
    KEEP,
    MAX_SECONDS,
    Abort,
    Bucket,
    Commit,
    InFlight,
    Open,
    PartRow,
    Prepare,
    wire_text,
)  # fmt: skip
from convtools.refit.refusal import committed_in_part, committed_nowhere
from convtools.refit.sinks.base import Sink
from convtools.refit.trace import Trace


class Fleet:
    """Links to sinks, and one attempt at a time."""

    def __init__(
        self,
        sinks: Iterable[Sink],
        plan: RefitPlan,
        ring: Ring,
        *,
        timeout: float,
        lease: float,
        in_flight: InFlight,
        flush: bool,
        trace: Trace,
        checksums: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Raises UsageError for two sinks of one name, and for what no engine would take."""
        for name, seconds in (("timeout", timeout), ("lease", lease)):
            if not 0 < seconds <= MAX_SECONDS:
                raise UsageError(f"a {name} of {seconds!r} s", expected=f"above 0, at most {MAX_SECONDS}")
        if in_flight not in (DRAIN, ABORT, KEEP):
            raise UsageError("no such policy", expected="drain, abort or keep", found=repr(in_flight))
        self.links: list[Link] = []
        self.plan, self.ring, self.timeout = plan, ring, timeout
        self._lease, self._in_flight, self._flush, self._checksums = lease, in_flight, flush, checksums
        self._trace, self._progress = trace, progress
        self._attempt = b""
        self.took_part: list[Link] = []
        """In the last commit."""
        for sink in sinks:
            self.join(sink)

    @property
    def attempt(self) -> bytes:
        """Of the last transaction that was opened."""
        return self._attempt

    def join(self, sink: Sink) -> None:
        """One more. Raises UsageError."""
        if self.ring.device is not None and not getattr(sink, "devices", False):
            raise UsageError(f"{tick(sink.name)} takes no buckets on a device", fix="leave `device` out")
        if any(link.name == sink.name for link in self.links):
            raise UsageError("two sinks have one name", found=tick(sink.name))
        self.links.append(Link(sink))

    def leave(self, name: str) -> None:
        """One less: hang up. Raises UsageError where there is none of that name."""
        for link in self.links:
            if link.name == name:
                link.drop()
                self.links.remove(link)
                return
        raise UsageError("no such sink", expected=capped(link.name for link in self.links), found=name)

    def open(
        self, version: int, *, force: bool, fingerprints: bool, only: Sequence[Link] | None = None
    ) -> None:
        """Begin an attempt everywhere. Raises RefitError."""
        links = self.links[:] if only is None else only
        for link in links:
            link.refresh(self.plan, self.ring, self.timeout, force)
        self._attempt = secrets.token_bytes(16)
        for link in links:
            question = Open(
                link.version, version, self.plan.digest, link.token + 1, self._attempt, self._lease, force,
                fingerprints, self._in_flight, self._flush, self._checksums,
            )  # fmt: skip
            link.token += 1
            with self._trace.timed("open", link.name):
                link.open(question, self.timeout)

    def stream(self, packer: Packer, canaries: frozenset[int] = frozenset()) -> None:
        """Fill the ring and hand it over, bucket by bucket, until the last is consumed. Raises RefitError."""
        slots, ahead = self.ring.slots, self.ring.ahead
        links = [link for link in self.links if link.is_open]
        for index, bucket in enumerate(self.plan.buckets):
            self._await(packer, links, index - ahead + 1)
            slot = index % slots
            data = self.ring.slot(slot, bucket.nbytes)
            with self._trace.timed("pack", "trainer", bucket=index, nbytes=bucket.nbytes):
                mark = packer.pack(index, bucket, data, canaries)
            rows = [PartRow(p.tensor, p.start, p.nbytes, p.offset) for p in bucket.parts]
            for link in links:
                question = Bucket(link.token, self._attempt, index, slot, bucket.nbytes, mark, rows)
                link.send_bucket(question, self.timeout)
            if self._progress is not None:
                self._progress(sum(p.nbytes for p in bucket.parts))
        self._await(packer, links, len(self.plan.buckets))

    def _await(self, packer: Packer, links: list[Link], count: int) -> None:
        """Until every sink has consumed `count` buckets."""
        began = time.perf_counter()
        for link in links:
            while link.consumed < count:
                seconds = link.await_bucket(self.timeout)
                now = time.perf_counter()
                self._trace.span("consume", link.name, now - seconds, now, bucket=link.consumed - 1)
        ended = time.perf_counter()
        packer.wait_seconds += ended - began
        if count > 0:
            self._trace.span("wait", "trainer", began, ended)

    def prepare(self, fingerprints: list[bytes]) -> None:
        """Everywhere. Raises RefitError at the first sink that has not all, or not the same."""
        for link in self.links[:]:
            if link.is_open:
                with self._trace.timed("prepare", link.name):
                    link.prepare(Prepare(link.token, self._attempt, fingerprints), self.timeout)

    def commit(self, version: int) -> None:
        """Everywhere. Where the first refuses, nowhere; once one has done it, all others are tried.

        Raises RefitError, with the state of each sink.
        """
        failed, begun = list[RefitError](), False
        self.took_part = [link for link in self.links if link.is_open]
        for link in self.took_part:
            before = link.version
            try:
                with self._trace.timed("commit", link.name):
                    link.commit(Commit(link.token, self._attempt), version, self.timeout)
                begun = True
            except RefitError as error:
                failed.append(error)
                said_no = link.connected and not isinstance(error, PeerError | FrameError)
                link.abort(Abort(link.token, self._attempt, "the commit failed"), self.timeout)
                if not begun and said_no and link.version == before:
                    self.abort("another sink could not commit")
                    raise committed_nowhere(version, error, self._whole(), self.states()) from error
                begun = True
        if failed:
            raise committed_in_part(version, failed, len(self.took_part), self.states())

    def _whole(self) -> bool:
        return all(link.state == CLEAN for link in self.took_part)

    def abort(self, why: object) -> None:
        """Everywhere."""
        for link in self.links[:]:
            if link.is_open:
                link.abort(Abort(link.token, self._attempt, wire_text(why, 1000)), self.timeout)

    def states(self) -> str:
        """For an error."""
        return capped(link.standing() for link in self.links)

    def not_flushed(self) -> list[str]:
        """Of the last commit, for the report: sinks that did not say that they emptied caches."""
        return [
            f"flush: {link.name} has no caches to empty, or did not say"
            for link in self.took_part
            if self._flush and not link.flushed and getattr(link.sink, "caches", True)
        ]

    def close(self) -> None:
        """Hang up everywhere."""
        for link in self.links:
            link.drop()
