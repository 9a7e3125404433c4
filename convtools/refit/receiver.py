"""The engine's side of a transaction, whatever carries it: questions in, answers out.

    clean --Open--> updating --Commit--> clean, at the new version
                    updating --Abort, lease over, peer gone, any fault--> clean, at the old version
                                                                      --> poisoned, where it cannot go back
    poisoned --Open ... Commit--> clean: only a full push heals it

The version is raised in one place, after the swap. One transaction at a time; an attempt's token must be
higher than any before it, and whatever carries another token or nonce touches nothing.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from convtools.errors import ConvtoolsError
from convtools.refit import protocol as say
from convtools.refit.applier import Applier, applier_of
from convtools.refit.bucket import Slots
from convtools.refit.errors import NotServing, RefitError
from convtools.refit.gate import Gate, not_serving
from convtools.refit.plan import RefitPlan, Tensor, make_plan, make_windows
from convtools.refit.protocol import ABORT, CLEAN, DRAIN, KEEP, POISONED, PROTOCOL, UPDATING, wire_text
from convtools.refit.readback import digests_of, fingerprints_of, list_of
from convtools.refit.transaction import Transaction, check_open

MAX_LEASE = 3600.0


class Receiver:
    """One engine's weights: their state, their version, and the transaction that changes them.

    `flush` is called after the swap and before the version is raised (KV and prefix caches): what it
    raises fails the push. `drain` is how long requests in flight may take until they must be out;
    `in_flight` is called with the trainer's policy for them once nobody is let in any more (abort: end
    them; keep: leave between two tokens, come back, and recompute what was cached). Without it they drain.
    """

    def __init__(
        self,
        applier: Applier,
        *,
        version: int = 0,
        state: str = CLEAN,
        flush: Callable[[], None] | None = None,
        drain: float = 10.0,
        in_flight: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises UsageError for what is no applier."""
        self.incarnation = secrets.token_hex(8)
        """Another one after every start of the engine."""
        self.gate = Gate()
        self._applier, self._flush, self._drain, self._clock = applier_of(applier), flush, drain, clock
        self._in_flight, self._received = in_flight, dict[str, bytes]()
        self._committed: dict[str, bytes] = {}  # what `_version` means, also while nobody knows what is held
        self._state, self._version, self._token = state, version, 0
        if state != CLEAN:
            self.gate.shut()  # a push that begins changes the state, but does not let anybody in
        self._transaction: Transaction | None = None
        self._agreed: dict[object, RefitPlan] = {}
        self._lock = threading.RLock()
        self.reason = ""
        """Why the last transaction was given up."""
        self.origin = ""
        """The checkpoint that the engine was started from, where it says so."""

    @property
    def state(self) -> str:
        """clean, updating or poisoned."""
        return self._state

    @property
    def version(self) -> int:
        """Of the last commit."""
        return self._version

    @property
    def policies(self) -> tuple[str, ...]:
        """What requests in flight may do when the weights change."""
        return (DRAIN,) if self._in_flight is None else (DRAIN, ABORT, KEEP)

    @contextmanager
    def serving(self, wait: float = 0.0) -> Iterator[int]:
        """Hold the weights still for one request; gives their version.

        Raises NotServing where they are being changed, or not whole, for longer than `wait` seconds.
        """
        with self.gate.request(wait, self._not_serving):
            if self._state == POISONED:
                raise self._not_serving()
            yield self._version

    def _not_serving(self) -> NotServing:
        now = self._transaction
        return not_serving(self._state, now.before if now is not None else self._state, self.reason)

    def handle(self, message: say.Question, owner: object, ring: Slots | None) -> say.Answer:
        """Answer a question of connection `owner`, whose buckets lie in `ring`; raises nothing but bugs.

        A fault of the one who has the open transaction ends it; anyone else's touches nothing.
        """
        with self._lock:
            self.expire()
            try:
                answer = self._handle(message, owner, ring)
                if (now := self._transaction) is not None and now.owner is owner:
                    now.deadline = self._clock() + now.lease
                return answer
            except Exception as error:  # an engine's own tensors may raise anything: it must not stay open
                reason = (
                    str(error) if isinstance(error, ConvtoolsError) else f"{type(error).__name__}: {error}"
                )
                if self._is_current(message, owner):
                    self._abort(reason)
                return self.refusal(reason)
            except BaseException:
                self._abort("the engine was interrupted")
                self._settle()
                raise

    def refusal(self, reason: str) -> say.Refused:
        """A refusal, and what the engine holds."""
        return say.Refused(wire_text(reason), self._state, self._version)

    def expire(self) -> None:
        """Give up a transaction whose lease is over. To be called now and then."""
        with self._lock:
            open_ = self._transaction
            if open_ is not None and self._clock() > open_.deadline:
                self._abort(f"the lease of {open_.lease:g} s ran out")

    def lost(self, owner: object) -> None:
        """A connection ended: its transaction is given up."""
        with self._lock:
            self._agreed.pop(owner, None)
            if self._transaction is not None and self._transaction.owner is owner:
                self._abort("the trainer's connection ended")

    def _handle(self, message: say.Question, owner: object, ring: Slots | None) -> say.Answer:
        match message:
            case say.Agree():
                return self._agree(message, owner)
            case say.Open():
                return self._open(message, owner)
            case say.Ask():
                return self._ask(message, owner)
            case say.Digest():
                return digests_of(self._planned(owner), self._applier, message)
            case say.List():
                return list_of(self._applier, self.origin)
        current = self._current(message, owner)
        match message:
            case say.Bucket():
                return self._bucket(current, message, ring)
            case say.Prepare():
                return self._prepare(current, message)
            case say.Commit():
                return self._commit(current)
            case say.Abort():
                self._abort(f"the trainer gave it up: {message.reason}")
                return say.Aborted(message.token, self._state, self._version)

    def _is_current(self, message: say.Question, owner: object) -> bool:
        now = self._transaction
        return (
            now is not None
            and now.owner is owner
            and isinstance(message, say.Bucket | say.Prepare | say.Commit | say.Abort)
            and (message.token, message.attempt) == (now.token, now.attempt)
        )

    def _current(
        self, message: say.Bucket | say.Prepare | say.Commit | say.Abort, owner: object
    ) -> Transaction:
        now = self._transaction
        if now is None or not self._is_current(message, owner):
            raise RefitError(
                f"{type(message).__name__} of an attempt that is not open",
                expected=f"attempt {now.token}" if now else "an Open first",
                found=f"attempt {message.token}; before that: {self.reason or 'nothing'}",
            )
        return now

    def _agree(self, message: say.Agree, owner: object) -> say.Agreed:
        if message.protocol != PROTOCOL:
            raise RefitError("another protocol", expected=PROTOCOL, found=message.protocol)
        rows = [Tensor(t.name, t.dtype, t.shape) for t in message.tensors]
        self._applier.accept(rows)  # before anything is planned for shapes that a peer made up
        plan = (make_windows if message.windows else make_plan)(rows, message.bucket_bytes)
        if plan.digest != message.digest:
            raise RefitError("the plans differ", expected=plan.digest.hex(), found=message.digest.hex())
        if self._transaction is not None and self._transaction.owner is owner:
            self._abort("the trainer began anew")
        self._agreed[owner] = plan
        return say.Agreed(
            plan.digest, self._state, self._version, self._token, self.incarnation,
            self._applier.mode, self._applier.undo_bytes(), list(self.policies),
        )  # fmt: skip

    def _open(self, message: say.Open, owner: object) -> say.Opened:
        plan = self._agreed.get(owner)
        if plan is None or plan.digest != message.digest:
            raise RefitError("Open of a plan that was not agreed on")
        if self._transaction is not None:
            raise RefitError(f"attempt {self._transaction.token} is open", fix="wait until it ends")
        check_open(message, self._token, self._version, self.policies)
        lease = min(message.lease, MAX_LEASE)
        if self._applier.in_place():
            self._close_gate(message.in_flight)
        self._token = message.token
        self._transaction = Transaction.of(message, owner, plan, lease, self._clock() + lease, self._state)
        self._state = UPDATING
        try:
            self._applier.begin(plan)
        except BaseException as error:
            self._abort(f"it could not begin: {error}")
            raise
        return say.Opened(message.token)

    def _bucket(self, now: Transaction, message: say.Bucket, ring: Slots | None) -> say.Consumed:
        began = time.perf_counter()
        if ring is None or now.prepared:
            raise RefitError(f"bucket {message.index} is out of turn")
        now.consume(message, ring.slot(message.slot, message.nbytes), self._applier, self._aliases())
        return say.Consumed(message.token, message.index, time.perf_counter() - began)

    def _prepare(self, now: Transaction, message: say.Prepare) -> say.Prepared:
        now.check_whole(message.fingerprints, self._aliases())
        now.check_version(self._version, self._committed, self._aliases())
        load: Callable[[], None] | None = getattr(self._applier, "prepare", None)
        if load is not None:
            load()
        now.prepared = True
        return say.Prepared(message.token)

    def _aliases(self) -> Mapping[str, str]:
        found: Mapping[str, str] = getattr(self._applier, "aliases", dict)()
        return found

    def _commit(self, now: Transaction) -> say.Committed:
        if not now.prepared:
            raise RefitError("Commit before Prepare")
        self._close_gate(now.in_flight)
        self._applier.swap(now.version)
        flushes = self._flush is not None and now.flush
        if self._flush is not None and flushes:
            self._flush()
        self._version, self._state, self._transaction, self.reason = now.version, CLEAN, None, ""
        self._received = self._committed = now.received()
        try:
            self._applier.finish()
        finally:
            self.gate.open()
        return say.Committed(now.token, self._version, flushes)

    def _close_gate(self, policy: str) -> None:
        """Let nobody in; those inside do what the trainer chose for them."""
        leave = self._in_flight
        self.gate.close(self._drain, None if leave is None else lambda: leave(policy))

    def _abort(self, reason: str) -> None:
        """End the open transaction, if there is one, without raising the version."""
        now, self._transaction = self._transaction, None
        if now is None:
            return
        self.reason, restored = reason, False
        try:
            restored = self._applier.abort()
        except Exception as error:
            self.reason += f"; and it could not go back: {type(error).__name__}: {error}"
        finally:
            self._state = now.before if restored else POISONED
            if not restored:
                self._received = {}  # nobody knows what it holds now
        self._settle()

    def _settle(self) -> None:
        (self.gate.open if self._state == CLEAN else self.gate.shut)()

    def _ask(self, message: say.Ask, owner: object) -> say.Told:
        if message.fingerprints == "none":
            return say.Told(self._state, self._version, self._token)
        plan, now = self._planned(owner), self._transaction
        if message.fingerprints == "pending":
            if now is None or now.owner is not owner or not now.prepared:
                raise RefitError("nothing is pending")
            read, received = self._applier.pending, now.received()
        else:
            read, received = self._applier.serves, self._received
        found, weaker = fingerprints_of(plan, self._applier, read, received)
        return say.Told(self._state, self._version, self._token, found, weaker)

    def _planned(self, owner: object) -> RefitPlan:
        plan = self._agreed.get(owner)
        if plan is None:
            raise RefitError("tensors of a plan that was not agreed on")
        return plan
