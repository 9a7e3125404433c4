"""What a transaction does with bytes where the engine is an SGLang server: whole groups, loaded in place.

Parts are put together in staging memory. What a bucket makes whole is loaded before the bucket counts as
consumed; what it leaves unfinished waits there, within the bound. All of it is loaded at Prepare; the commit
loads the smallest group once more, and that request alone carries the flush and the new version.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from convtools.errors import ConvtoolsError, capped, tick
from convtools.refit.applier import QUARANTINE
from convtools.refit.errors import PeerError, RefitError
from convtools.refit.groups import Group
from convtools.refit.plan import Part, RefitPlan, Tensor
from convtools.refit.protocol import CLEAN, POISONED, UPDATING, Open
from convtools.refit.sinks.sglang_names import is_kept_whole, is_mtp, merged, quantised, touched, unwritten
from convtools.refit.sinks.sglang_payload import Placed, payload
from convtools.refit.sinks.sglang_server import Mark, ServerInfo, SGLangServer
from convtools.refit.sinks.sglang_staging import Layout, SharedStaging

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, Any]

ABORT_SECONDS = 10.0
"""For all that giving up asks of the server."""


class SGLangApplier:
    """Implements `Applier`; an abort after the first load leaves a server that is paused, and marked."""

    mode = QUARANTINE

    def __init__(
        self,
        server: SGLangServer,
        info: ServerInfo,
        mark: Mark,
        layout: Layout,
        staging: SharedStaging,
        *,
        drain: float,
        unknown: Literal["refuse", "allow"],
        mtp: Literal["refuse", "ignore"],
    ) -> None:
        """`mark`: what the server's weight version said at connect."""
        self._server, self._info, self.mark = server, info, mark
        self._layout, self._staging = layout, staging
        self._drain, self._unknown, self._mtp = drain, unknown, mtp
        self._policy, self._before = "drain", mark
        self._opened: Open | None = None
        self._plan: RefitPlan | None = None
        self._known: dict[str, str] = {}
        self._ranks: list[dict[str, str]] = []
        self._touched = self._loaded = False

    # What is taken.

    def accept(self, tensors: Sequence[Tensor]) -> None:
        """Raises RefitError for names that the server would skip in silence, or leave as they are."""
        self._ranks = self._server.checksums()
        if len(self._ranks) != self._info.tp:
            raise PeerError("not a digest for every rank", expected=self._info.tp, found=len(self._ranks))
        self._known = self._ranks[0]
        if found := quantised(self._known):
            raise RefitError("the server's layers are quantised", found=capped(map(tick, found)))
        names = [t.name for t in tensors if t.nbytes]
        mtp = [n for n in names if is_mtp(n) and not self._info.draft]
        if mtp and self._mtp == "refuse":
            raise RefitError(
                "the server serves no draft model and would skip the MTP layers in silence",
                found=capped(map(tick, mtp)),
                fix='serve a draft model, leave them out, or SGLangSink(..., mtp="ignore")',
            )
        strange = [n for n in names if not is_mtp(n) and not touched(n, self._known)]
        left = unwritten(names, self._known)
        if (strange or left) and self._unknown == "refuse":
            problems = [f"unknown: {tick(n)}" for n in strange] + [f"never written: {tick(n)}" for n in left]
            raise RefitError(
                "the server's model has other tensors",
                found=capped(problems),
                fix='push the model that it serves; if SGLang has other names, unknown="allow" and check()',
            )

    def undo_bytes(self) -> int:
        """It cannot go back; the staging memory is reported by the sink."""
        return 0

    def in_place(self) -> bool:
        """SGLang loads over what it serves."""
        return True

    def usher(self, policy: str) -> None:
        """What the requests in flight do; the server does it when the update begins."""
        self._policy = policy

    def opening(self, question: Open) -> None:
        """The Open that follows, of which an applier is not told all."""
        self._opened = question

    # A transaction.

    def begin(self, plan: RefitPlan) -> None:
        """Pause the server, open its update, mark it."""
        assert self._opened is not None
        self._plan, self._loaded = plan, False
        self._parts = iter([(i, part) for i, bucket in enumerate(plan.buckets) for part in bucket.parts])
        self._next: tuple[int, Part] | None = next(self._parts, None)
        self._filled = 0
        self.check_mark()
        self._before, self._touched = self.mark, True
        is_open = self._server.quiet(self._policy, self._drain)
        self.check_mark()
        self._set_mark(UPDATING)
        self._check_ours()  # of two who came here at once, one goes on
        if not is_open:
            self._server.open()

    def write(self, tensor: Tensor, start: int, data: "Bytes") -> "Bytes":
        """Into the staging memory; what is whole after a bucket is loaded."""
        import numpy as np

        assert self._plan is not None
        if self._next is None:
            raise RefitError("more buckets than were planned")
        index, part = self._next
        if self._plan.tensors[part.tensor] != tensor or start != part.start + self._filled:
            raise RefitError("buckets must come in their order here", found=tick(tensor.name))
        at = self._layout.at[part.tensor] + start
        to = np.frombuffer(self._staging.slice(at, len(data)), "u1")
        to[:] = data
        self._filled += len(data)
        if self._filled == part.nbytes:
            self._filled, self._next = 0, next(self._parts, None)
            if self._next is None or self._next[0] != index:
                self._load(self._layout.loads.get(index, ()))
        return to

    def swap(self, version: int) -> None:
        """The last request, which flushes and names the version; then the server goes on."""
        assert self._opened is not None
        last = (self._layout.last,) if self._layout.last else ()
        self._load(last, flush=self._opened.flush, version=str(version))
        self._server.end()
        found = self._server.mark()
        if found != self.mark:
            raise PeerError("the server did not take the version", expected=version, found=found.text)
        self._server.resume()

    def finish(self) -> None:
        """The server goes on already."""
        self._touched = self._loaded = False

    def abort(self) -> bool:
        """Nothing was loaded: as it was. Otherwise the server stays paused, marked until a push succeeds."""
        if not self._touched:
            return True
        as_it_was = not self._loaded and self._before.state == CLEAN
        self._touched = self._loaded = False
        self._server.client.hurry(ABORT_SECONDS)
        try:
            found, ours = self._server.mark(), (self.mark, self._committed())
            if found not in ours:  # another trainer's now
                if found.state == CLEAN:
                    self._server.resume()
                return False
            self._server.pause()
            self._close_update()
            if not as_it_was:
                self._set_mark(POISONED)
                return False
            self._server.set_mark(self._before)
            self._server.resume()
            self.mark = self._before
            return True
        except ConvtoolsError:  # it cannot be told: its mark still says that an update did not end
            return False
        finally:
            self._server.client.calm()

    def _committed(self) -> Mark:
        assert self._opened is not None
        return Mark(CLEAN, self._opened.version, self._opened.version)

    def _close_update(self) -> None:
        try:
            self._server.end()
        except PeerError as error:
            if "no weight-update session is open" not in error.what:
                raise

    def check_mark(self) -> None:
        """Raises RefitError where the server is not as it was left: another trainer, or another start."""
        info = self._server.info(tp=self._info.tp, untested=True)
        found = self._server.mark()
        if info.incarnation != self._info.incarnation:
            raise PeerError("the server was started again")
        if found.is_held() and found.owner != self._staging.owner:
            raise RefitError("another trainer's push is under way", found=found.text)
        if (found.state, found.base) != (self.mark.state, self.mark.base):
            raise PeerError(
                "the server's weights were changed by another", expected=self.mark.text, found=found.text
            )

    def _load(self, groups: Sequence[Group], *, flush: bool = False, version: str | None = None) -> None:
        assert self._plan is not None
        if not groups and version is None:
            return
        self._keep_lease()
        tensors = self._plan.tensors
        placed = [Placed(tensors[i], self._layout.at[i]) for g in groups for i in g.tensors]
        self._loaded = True
        with self._staging.names(self._info.tp) as names:
            payloads = [payload(name, self._staging.nbytes, placed) for name in names]
            self._server.load(payloads, flush=flush, version=version)
        if version is not None:
            self.mark = self._committed()

    def _keep_lease(self) -> None:
        """Raises RefitError where it is over, or the update is ours no longer."""
        assert self._opened is not None
        if time.time() > self.mark.until:
            raise RefitError(f"the lease of {self._opened.lease:g} s ran out")
        self._check_ours()
        if self.mark.until - time.time() < self._opened.lease / 2:
            self._set_mark(UPDATING)

    def _check_ours(self) -> None:
        """Raises RefitError where the update is another trainer's now."""
        if (found := self._server.mark()) != self.mark:
            raise RefitError(
                "another trainer took the server over", expected=self.mark.text, found=found.text
            )

    def _set_mark(self, state: str) -> None:
        assert self._opened is not None
        until = int(time.time() + self._opened.lease) + 1 if state == UPDATING else 0
        mark = Mark(state, self._before.base, self._opened.version, self._staging.owner, until)
        self._server.set_mark(mark)
        self.mark = mark

    # What can be read back.

    def serves(self, tensor: Tensor) -> "Bytes | None":
        """SGLang does not give tensors back."""
        return None

    def pending(self, tensor: Tensor) -> "Bytes | None":
        """SGLang does not give tensors back."""
        return None

    def weaker(self, tensor: Tensor) -> str:
        """How far its own parameters were looked at."""
        if is_mtp(tensor.name) and not self._info.draft:
            return "sent, and ignored by the server: it serves no draft model"
        found = touched(tensor.name, self._known)
        if found and self._is_rounded(tensor):
            return f"not given back; sent as {tensor.dtype}, and {tick(found[0])} may be rounded to 16 bits"
        if found:
            return f"not given back; it lies in SGLang's {tick(found[0])}, whose digest check() looks at"
        return "not given back, and SGLang has no parameter of a name like this"

    def digests(self) -> dict[str, bytes]:
        """Of SGLang's own parameters; of all ranks together."""
        self._ranks = self._server.checksums()
        return merged(self._ranks)

    def touches(self, tensor: Tensor) -> tuple[str, ...]:
        """The parameters in `digests` that it ends up in; none where its lowest bits may be rounded away."""
        return () if self._is_rounded(tensor) else touched(tensor.name, self._known)

    def _is_rounded(self, tensor: Tensor) -> bool:
        return self._info.rounds and tensor.dtype in ("F32", "F64") and not is_kept_whole(tensor.name)
