"""A running SGLang server as a sink, over its own HTTP routes; nothing of ours runs in it.

The engine's side of the transaction is played here, in the trainer's process, on a thread of its own, so
that a bucket is filled while the server loads another.
"""

import json
import queue
import threading
from typing import TYPE_CHECKING, Literal

from convtools.errors import UsageError, tick
from convtools.refit.bucket import Ring
from convtools.refit.errors import PeerError, RefitError
from convtools.refit.groups import Experts, group
from convtools.refit.plan import RefitPlan
from convtools.refit.protocol import CLEAN, POISONED, UPDATING, Answer, Ask, Open, Question
from convtools.refit.receiver import Receiver
from convtools.refit.sinks.base import agree
from convtools.refit.sinks.http_json import Base
from convtools.refit.sinks.sglang_applier import ABORT_SECONDS, SGLangApplier
from convtools.refit.sinks.sglang_http import HttpClient
from convtools.refit.sinks.sglang_local import check_local
from convtools.refit.sinks.sglang_server import SGLangServer
from convtools.refit.sinks.sglang_staging import Layout, SharedStaging, new_owner

if TYPE_CHECKING:
    from convtools.equality.canonical import Side
    from convtools.equality.options import CompareOptions
    from convtools.equality.verdict import Comparison

STAGING_BYTES = 4 << 30
PROMPT = [1, 5, 9, 3, 7]
"""Tokens that every model has."""


class SGLangSink:
    """The server at `url`, which runs as this user on this machine and sees its /dev/shm.

    `api_key`: the server's key, or its admin key. `tp`: refuse another number of ranks. `staging_bytes`
    bounds the shared memory in which tensors are put together; `experts="each"` needs less of it.
    `timeout` bounds every request, `drain` (shorter) the wait for requests in flight. `untested` takes an
    SGLang of another version. `unknown="allow"` pushes names that cannot be found among the server's own,
    and `mtp="ignore"` MTP layers that it skips; both are said in what `WeightSync` reports as weaker.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        tp: int | None = None,
        name: str | None = None,
        staging_bytes: int = STAGING_BYTES,
        experts: Experts = "layer",
        timeout: float = 300.0,
        drain: float = 30.0,
        untested: bool = False,
        unknown: Literal["refuse", "allow"] = "refuse",
        mtp: Literal["refuse", "ignore"] = "refuse",
    ) -> None:
        """Raises UsageError for a URL that is none."""
        if timeout <= 0 or drain <= 0 or staging_bytes <= 0:
            raise UsageError("timeouts and staging memory are more than nothing")
        self.name = name or url
        self._client = HttpClient(url, api_key)
        self._server, self._timeout = SGLangServer(self._client, timeout), timeout
        self._tp, self._bound, self._experts = tp, staging_bytes, experts
        self._drain, self._untested, self._unknown, self._mtp = drain, untested, unknown, mtp
        self._owner = new_owner()
        self._session: _Session | None = None

    @property
    def staging_bytes(self) -> int:
        """Shared memory that is held now, beside the ring."""
        return self._session.staging.nbytes if self._session is not None else 0

    def connect(self, plan: RefitPlan, ring: Ring, timeout: float) -> Answer:
        """Look at the server, refuse what cannot be refitted, make the staging memory. Raises RefitError."""
        self.close()
        check_local(self._client.base.host, self._client.base.port)
        info = self._server.info(tp=self._tp, untested=self._untested)
        mark = self._server.mark()
        if mark.is_held() and mark.owner != self._owner:
            raise RefitError("another trainer's push is under way", found=mark.text)
        layout = self._lay_out(plan)
        staging = SharedStaging(self._owner, max(layout.nbytes, 1))
        applier = SGLangApplier(
            self._server, info, mark, layout, staging,
            drain=self._drain, unknown=self._unknown, mtp=self._mtp,
        )  # fmt: skip
        receiver = Receiver(
            applier, version=mark.base, state=CLEAN if mark.state == CLEAN else POISONED,
            flush=lambda: None, in_flight=applier.usher, drain=self._drain,
        )  # fmt: skip
        receiver.incarnation = info.incarnation
        self._session = _Session(receiver, applier, staging, ring)
        self._session.ask(agree(plan, ring))
        return self.receive(timeout)

    def _lay_out(self, plan: RefitPlan) -> Layout:
        groups = group(plan.tensors, self._experts)
        layout = Layout(plan, groups)
        if layout.nbytes > self._bound:
            largest = max(groups, key=lambda g: g.nbytes)
            raise RefitError(
                "tensors that SGLang must be given together do not fit the staging memory; the largest are "
                f"the {len(largest.tensors)} of {tick(largest.name)}, {largest.nbytes} bytes",
                expected=f"{layout.nbytes} bytes", found=f"staging_bytes={self._bound}",
                fix=f"raise staging_bytes of the SGLangSink to {layout.nbytes}" + (
                    ', or give it experts="each"' if self._experts == "layer" else ""
                ),
            )  # fmt: skip
        return layout

    def send(self, question: Question, timeout: float) -> None:
        """It is answered on the sink's thread. Raises PeerError."""
        self._open().ask(question)

    def receive(self, timeout: float) -> Answer:
        """The oldest answer. Raises PeerError."""
        return self._open().answer(timeout)

    def outputs(self, timeout: float) -> bytes:
        """Tokens that it says now, for the self-test. Raises PeerError."""
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        found = self._client.post("/generate", {"input_ids": PROMPT, "sampling_params": sampling}, timeout)
        tokens = found.get("output_ids")
        if not isinstance(tokens, list) or not tokens:
            raise PeerError("the server generated nothing", found=repr(found)[:200])
        return json.dumps(tokens).encode()

    @property
    def base(self) -> Base:
        """The root of its routes."""
        return self._client.base

    def started(self, timeout: float) -> str:
        """What two starts of a server do not share. Raises PeerError, and RefitError while it is updating."""
        from convtools.refit.sinks.sglang_facts import standing

        return standing(self._client, timeout)[1]

    def compared(
        self, side: "Side", options: "CompareOptions", engine: str, timeout: float | None = None
    ) -> "Comparison":
        """What it serves against a checkpoint, by digests; nothing of it is held up, from any machine.

        `engine`: its letter, a or b. Raises PeerError, and RefitError where what it holds is no version.
        """
        from convtools.refit.sinks.sglang_compare import compare_digests
        from convtools.refit.sinks.sglang_facts import ask, standing

        timeout = timeout or self._timeout
        facts = ask(self._client, SGLangServer(self._client, timeout), timeout)
        found = compare_digests(side, facts, self.name, options, engine=engine)
        if (now := standing(self._client, timeout)) != (facts.version, facts.start):
            raise RefitError(
                f"{tick(self.name)} took other weights while it was compared",
                expected=f"version {facts.version}", found=f"version {now[0]}",
                fix="compare again when nobody pushes",
            )  # fmt: skip
        return found

    def close(self) -> None:
        """Give an open transaction up, and the staging memory back."""
        session, self._session = self._session, None
        if session is not None:
            session.close(self._client)

    def _open(self) -> "_Session":
        if self._session is None:
            raise PeerError("not connected")
        return self._session


class _Session:
    """Questions in, answers out, in order, on a thread."""

    def __init__(
        self, receiver: Receiver, applier: SGLangApplier, staging: SharedStaging, ring: Ring
    ) -> None:
        self.staging = staging
        self._receiver, self._applier, self._ring = receiver, applier, ring
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="convtools-sglang", daemon=True)
        self._thread.start()

    def ask(self, question: Question) -> None:
        """Without waiting."""
        self._questions.put(question)

    def answer(self, timeout: float) -> Answer:
        """Raises PeerError, and what answering raised."""
        try:
            found = self._answers.get(timeout=max(timeout, 0))
        except queue.Empty:
            raise PeerError(f"the server did not answer in {timeout:g} s") from None
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self, client: HttpClient) -> None:
        """Cut short what is under way; the open transaction is given up."""
        self._questions.put(None)
        self._thread.join(0.2)
        if self._thread.is_alive():
            client.hurry(ABORT_SECONDS)
            self._thread.join(3 * ABORT_SECONDS)
        client.calm()
        self.staging.close()

    def _run(self) -> None:
        while True:
            try:
                question = self._questions.get(timeout=1.0)
            except queue.Empty:
                self._receiver.expire()  # the trainer may hang
                continue
            if question is None:
                self._receiver.lost(self)
                return
            try:
                self._answers.put(self._handle(question))
            except BaseException as error:  # raised where the answer is waited for
                self._answers.put(error)

    def _handle(self, question: Question) -> Answer:
        if isinstance(question, Open):
            self._applier.opening(question)
        elif (
            isinstance(question, Ask) and self._receiver.state != UPDATING and question.fingerprints == "none"
        ):
            self._applier.check_mark()  # nobody else tells us of another trainer, or of a restart
        return self._receiver.handle(question, self, self._ring)
