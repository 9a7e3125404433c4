"""The engine's state machine, by hand: who may do what when, and what is left after each fault."""

import secrets
from typing import Any

import numpy as np
import pytest

from convtools.refit.applier import InPlaceApplier, ShadowApplier
from convtools.refit.bucket import Ring, checksum
from convtools.refit.errors import NotServing, RefitError
from convtools.refit.plan import RefitPlan, Tensor, make_plan
from convtools.refit.protocol import (
    Abort,
    Aborted,
    Agree,
    Agreed,
    Ask,
    Bucket,
    Commit,
    Committed,
    Consumed,
    Open,
    Opened,
    PartRow,
    Prepare,
    Prepared,
    Refused,
    TensorRow,
    Told,
)  # fmt: skip
from convtools.refit.receiver import Receiver
from convtools.refit.weights import SwappedWeights, TensorWeights, described
from tests.refit.engines import MODES, Engine, model, versions_in

ME, OTHER = object(), object()


def with_head(rows: list[TensorRow], dtype: str, shape: tuple[int, ...]) -> list[TensorRow]:
    return [TensorRow("head", dtype, shape) if r.name == "head" else r for r in rows]


class Trainer:
    """Says one thing at a time, and may say it wrong."""

    def __init__(self, engine: Engine, owner: object = ME, version: int = 1) -> None:
        self.receiver, self.owner, self.version = engine.receiver, owner, version
        self.plan: RefitPlan = make_plan([described(n, t) for n, t in engine.tensors.items()], 4096)
        self.ring = Ring(4096, 2)
        self.attempt = secrets.token_bytes(16)
        self.token = 1
        self.sent = model(version)

    def say(self, message: Any) -> Any:
        return self.receiver.handle(message, self.owner, self.ring)

    def agree(self, **wrong: Any) -> Any:
        rows = [TensorRow(*t) for t in self.plan.tensors]
        given = {"protocol": 1, "tensors": rows, "bucket_bytes": 4096, "slots": 2, "digest": self.plan.digest}
        return self.say(Agree(**(given | wrong)))

    def open(self, **wrong: Any) -> Any:
        given = {
            "base": self.receiver.version, "version": self.version, "digest": self.plan.digest,
            "token": self.token, "attempt": self.attempt, "lease": 5.0, "fingerprints": False,
        }  # fmt: skip
        return self.say(Open(**(given | wrong)))

    def question(self, which: int, **wrong: Any) -> Bucket:
        bucket, slot = self.plan.buckets[which], which % 2
        data = self.ring.slot(slot, bucket.nbytes)
        for p in bucket.parts:
            flat = self.sent[self.plan.tensors[p.tensor].name].reshape(-1).view("u1")
            data[p.offset : p.offset + p.nbytes] = flat[p.start : p.start + p.nbytes].tobytes()
        given = {
            "token": self.token, "attempt": self.attempt, "index": which, "slot": slot,
            "nbytes": bucket.nbytes,
            "checksum": checksum(data),
            "parts": [PartRow(p.tensor, p.start, p.nbytes, p.offset) for p in bucket.parts],
        }  # fmt: skip
        return Bucket(**(given | wrong))

    def bucket(self, which: int, **wrong: Any) -> Any:
        return self.say(self.question(which, **wrong))

    def buckets(self) -> None:
        for i in range(len(self.plan.buckets)):
            assert isinstance(self.bucket(i), Consumed)

    def prepare(self, fingerprints: list[bytes] | None = None) -> Any:
        return self.say(Prepare(self.token, self.attempt, fingerprints or []))

    def commit(self) -> Any:
        return self.say(Commit(self.token, self.attempt))

    def abort(self) -> Any:
        return self.say(Abort(self.token, self.attempt, "enough"))


def begun(mode: str = "shadow", **options: Any) -> tuple[Engine, Trainer]:
    engine = Engine(mode, **options)
    trainer = Trainer(engine)
    assert isinstance(trainer.agree(), Agreed)
    assert trainer.open() == Opened(1)
    return engine, trainer


def left(mode: str, *, wrote: bool) -> str:
    return "poisoned" if mode == "quarantine" and wrote else "clean"


@pytest.mark.parametrize("mode", MODES)
def test_a_push_changes_the_version_at_the_commit_only(mode: str) -> None:
    engine, trainer = begun(mode)
    for i in range(len(trainer.plan.buckets)):
        assert (engine.receiver.state, engine.receiver.version) == ("updating", 0)
        assert engine.look() == (0 if mode == "shadow" else None)
        assert isinstance(trainer.bucket(i), Consumed)
    assert trainer.prepare() == Prepared(1)
    assert engine.look() == (0 if mode == "shadow" else None)
    assert trainer.commit() == Committed(1, 1)
    assert engine.look() == 1 and versions_in(engine.tensors) == {1.0}
    assert not engine.mixes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("how", ["abort", "lost", "lease", "altered", "prepare", "agree"])
def test_whatever_ends_it_early_leaves_the_old_weights_or_quarantine(mode: str, count: int, how: str) -> None:
    engine, trainer = begun(mode)
    clock = [0.0]
    if how == "lease":
        engine.receiver._clock = lambda: clock[0]
        engine.receiver._transaction.deadline = 5.0
    for i in range(count):
        assert isinstance(trainer.bucket(i), Consumed)
    if how == "abort":
        assert trainer.abort() == Aborted(1, left(mode, wrote=count > 0), 0)
    elif how == "lost":
        engine.receiver.lost(ME)
    elif how == "lease":
        clock[0] = 4.9
        engine.receiver.expire()
        assert engine.receiver.state == "updating"
        clock[0] = 100.0
        engine.receiver.expire()
    elif how == "altered":
        assert "altered on its way" in trainer.bucket(count, checksum=bytes(16)).reason
    elif how == "prepare":
        assert "not every element has come" in trainer.prepare().reason
    else:
        trainer.agree()
    state = left(mode, wrote=count > 0)
    assert (engine.receiver.state, engine.receiver.version) == (state, 0)
    assert engine.look() == (0 if state == "clean" else None)
    assert versions_in(engine.tensors) == {0.0} or state == "poisoned"
    assert isinstance(trainer.bucket(0), Refused) and isinstance(trainer.commit(), Refused)
    trainer.agree()
    trainer.token, trainer.attempt = 2, secrets.token_bytes(16)
    assert trainer.open() == Opened(2)
    if state == "poisoned":
        assert engine.look() is None
    trainer.buckets()
    trainer.prepare()
    assert trainer.commit() == Committed(2, 1)
    assert engine.look() == 1 and not engine.mixes


def test_a_poisoned_engine_stays_so_until_a_full_push() -> None:
    engine, trainer = begun("quarantine")
    trainer.bucket(0)
    trainer.abort()
    for token in (2, 3):
        trainer.token = token
        trainer.open()
        if token == 2:  # nothing was written: back to what it was, which is poisoned
            assert trainer.abort() == Aborted(2, "poisoned", 0)
        assert engine.look() is None
        with pytest.raises(NotServing), engine.receiver.serving():
            pass


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"token": 0 + 1}, None),
        ({"base": 7}, "another version is served"),
        ({"digest": bytes(32)}, "not agreed on"),
    ],
)
def test_open_is_refused(wrong: dict[str, Any], reason: str | None) -> None:
    engine = Engine()
    trainer = Trainer(engine)
    trainer.agree()
    answer = trainer.open(**wrong)
    if reason is None:
        assert answer == Opened(1)
        trainer.abort()
        answer, reason = trainer.open(), "an old attempt"
    assert reason in answer.reason
    assert engine.receiver.state == "clean"


def test_a_version_is_lowered_by_force_only() -> None:
    _, trainer = begun()
    trainer.buckets()
    trainer.prepare()
    trainer.commit()
    trainer.token = 2
    assert "never lowered" in trainer.open(version=0).reason
    assert trainer.open(version=0, force=True) == Opened(2)


def test_another_trainer_waits_and_a_late_bucket_touches_nothing() -> None:
    engine, first = begun()
    second = Trainer(engine, OTHER, version=2)
    second.agree()
    second.token = 2
    assert "attempt 1 is open" in second.open().reason
    late = first.question(0)
    first.abort()
    assert second.open() == Opened(2)
    assert "not open" in first.say(late).reason  # the old attempt
    assert "not open" in first.bucket(0, token=2, attempt=second.attempt).reason  # the other's, from our side
    assert engine.receiver.state == "updating"
    second.buckets()
    second.prepare()
    assert isinstance(first.commit(), Refused)
    assert second.commit() == Committed(2, 2)
    assert engine.look() == 2


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"slot": 2}, "outside of the ring"),
        ({"nbytes": 4097}, "outside of the ring"),
        ({"index": 99}, "out of turn"),
        ({"parts": [PartRow(99, 0, 4, 0)]}, "not in the plan"),
        ({"parts": [PartRow(0, 2, 4, 0)]}, "splits an element"),
        ({"parts": [PartRow(0, 0, 4, 1)]}, "splits an element"),
        ({"parts": [PartRow(0, 0, 0, 0)]}, "lies outside"),
        ({"parts": [PartRow(0, 0, 4, 1 << 40)]}, "lies outside"),
        ({"parts": [PartRow(0, 1 << 40, 4, 0)]}, "lies outside"),
        ({"parts": [PartRow(0, 0, 8192, 0)]}, "lies outside"),
        ({"parts": [PartRow(0, 0, 8, 0), PartRow(0, 8, 8, 4)]}, "overlap"),
        ({"parts": [PartRow(0, 0, 8, 0), PartRow(0, 4, 8, 8)]}, "given twice"),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_bucket_that_lies_is_refused_before_a_byte_is_written(
    mode: str, wrong: dict[str, Any], reason: str
) -> None:
    engine, trainer = begun(mode)
    assert reason in trainer.bucket(0, **wrong).reason
    assert (engine.receiver.state, engine.look()) == ("clean", 0)
    assert versions_in(engine.tensors) == {0.0} and not engine.mixes


def test_a_bucket_counts_once() -> None:
    _, trainer = begun()
    trainer.bucket(0)
    assert "out of turn" in trainer.bucket(0).reason


def test_buckets_may_come_in_any_order() -> None:
    engine, trainer = begun()
    for i in reversed(range(len(trainer.plan.buckets))):
        assert isinstance(trainer.bucket(i), Consumed)
    trainer.prepare()
    assert trainer.commit() == Committed(1, 1) and engine.look() == 1


def test_prepare_compares_fingerprints_and_commit_needs_it() -> None:
    engine, trainer = begun()
    trainer.buckets()
    assert "Commit before Prepare" in trainer.commit().reason
    for wrong, reason in (
        ([bytes(16)] * 7, "not as they were sent"),
        ([], "not a fingerprint for every tensor"),
    ):
        engine = Engine()
        trainer = Trainer(engine)
        trainer.agree()
        trainer.open(fingerprints=True)
        trainer.buckets()
        assert reason in trainer.prepare(wrong).reason
        assert engine.receiver.state == "clean"
    engine, trainer = begun()
    trainer.buckets()
    trainer.prepare()
    assert "out of turn" in trainer.bucket(0, index=1).reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rows: rows[:-1], "the source does not give: `head`"),
        (lambda rows: [*rows, TensorRow("more", "F32", (1,))], "engine has no tensor of that name: `more`"),
        (lambda rows: with_head(rows, "I2", (97, 3)), "engine holds I16 [97, 3], the source gives I2"),
        (lambda rows: with_head(rows, "I16", (3, 97)), "[97, 3], the source gives I16 [3, 97]"),
        (lambda rows: [TensorRow("x", "U8", (1 << 62,) * 16)], "no tensor of that name: `x`"),
    ],
)  # fmt: skip
def test_an_engine_takes_exactly_its_tensors(change: Any, reason: str) -> None:
    trainer = Trainer(Engine())
    rows = [TensorRow(*t) for t in trainer.plan.tensors]
    assert reason in trainer.agree(tensors=change(rows)).reason
    assert "plans differ" in trainer.agree(digest=bytes(32)).reason
    assert "another protocol" in trainer.agree(protocol=2).reason


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_flush_fails_the_push(mode: str) -> None:
    fail = [True]

    def flush() -> None:
        if fail[0]:
            raise ValueError("the cache would not go")

    engine, trainer = begun(mode, flush=flush)
    trainer.buckets()
    trainer.prepare()
    assert "the cache would not go" in trainer.commit().reason
    assert (engine.receiver.state, engine.receiver.version) == (left(mode, wrote=True), 0)
    assert engine.look() == (None if mode == "quarantine" else 0)
    fail[0], trainer.token = False, 2
    assert trainer.open() == Opened(2)
    trainer.buckets()
    trainer.prepare()
    assert trainer.commit() == Committed(2, 1, flushed=True) and engine.look() == 1 and not engine.mixes


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_that_fails_to_write(mode: str) -> None:
    engine, trainer = begun(mode)
    trainer.bucket(0)

    def fails(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    engine.applier.write = fails
    assert "No space left" in trainer.bucket(1).reason
    assert engine.receiver.state == left(mode, wrote=True)

    def cannot() -> bool:
        raise RuntimeError("nor back")

    del engine.applier.write
    engine.applier.abort = cannot
    trainer.token = 2
    trainer.open()
    trainer.abort()
    assert (engine.receiver.state, engine.look()) == ("poisoned", None)
    assert "nor back" in engine.receiver.reason


@pytest.mark.parametrize("mode", MODES)
def test_requests_in_flight_keep_their_weights(mode: str) -> None:
    engine = Engine(mode)
    engine.receiver._drain = 0.01
    trainer = Trainer(engine)
    trainer.agree()
    with engine.receiver.serving() as version:
        answer = trainer.open()
        if mode == "shadow":
            trainer.buckets()
            trainer.prepare()
            answer = trainer.commit()
        assert "still being answered" in answer.reason
        assert version == 0 and versions_in(engine.tensors) == {0.0}
    assert engine.look() == 0 and engine.receiver.state == "clean"


def test_tied_tensors_need_one_name_and_agree_under_both() -> None:
    embed = np.zeros((4, 4), "f4")
    tied = {"embed": embed, "head": embed}
    new = np.ones((4, 4), "f4")
    for applier in (ShadowApplier, lambda w: InPlaceApplier(w, undo_budget=1 << 20)):
        for given, fine in (
            ({"embed": new}, True), ({"head": new}, True), ({"embed": new, "head": new}, True),
            ({"embed": new, "head": new * 2}, False),
        ):  # fmt: skip
            embed[...] = 0
            engine = Engine()
            engine.tensors = given
            engine.receiver = Receiver(applier(TensorWeights(tied)))
            trainer = Trainer(engine)
            trainer.sent = given
            assert isinstance(trainer.agree(), Agreed)
            trainer.open()
            trainer.buckets()
            answer = trainer.prepare()
            assert isinstance(answer, Prepared) == fine
            trainer.commit()
            assert (embed == (1 if fine else 0)).all()


def test_swapped_weights_are_never_copied_and_swap_back() -> None:
    engine = Engine()
    used: dict[str, Any] = {}
    weights = SwappedWeights(engine.tensors, lambda name, data: used.__setitem__(name, data))
    flush: list[Any] = [ValueError("no")]

    def flushed() -> None:
        if flush:
            raise flush.pop()

    engine.receiver = Receiver(ShadowApplier(weights), flush=flushed)
    trainer = Trainer(engine)
    trainer.agree()
    trainer.open()
    trainer.buckets()
    trainer.prepare()
    assert isinstance(trainer.commit(), Refused)
    assert all(np.shares_memory(used[n], engine.tensors[n]) for n in used)
    trainer.token = 2
    trainer.open()
    trainer.buckets()
    trainer.prepare()
    assert trainer.commit() == Committed(2, 1, flushed=True)
    assert {float(v) for n in used for v in used[n].view(engine.tensors[n].dtype)} == {1.0}
    assert versions_in(engine.tensors) == {0.0}  # the old memory, now the shadow


def test_ask_tells_state_and_fingerprints() -> None:
    engine, trainer = begun()
    assert trainer.say(Ask()) == Told("updating", 0, 1)
    before = trainer.say(Ask("serves")).fingerprints
    assert "nothing is pending" in trainer.say(Ask("pending")).reason
    trainer.buckets()
    trainer.prepare()
    pending = trainer.say(Ask("pending")).fingerprints
    assert trainer.say(Ask("serves")).fingerprints == before != pending
    trainer.commit()
    assert trainer.say(Ask("serves")).fingerprints == pending
    assert "not agreed on" in engine.receiver.handle(Ask("serves"), OTHER, None).reason


def test_half_an_undo_log_is_refused() -> None:
    from convtools.errors import UsageError

    with pytest.raises(UsageError, match="cannot hold the model"):
        InPlaceApplier(TensorWeights(model(0)), undo_budget=100)
    assert InPlaceApplier(TensorWeights(model(0))).undo_bytes() == 0
    assert issubclass(RefitError, Exception) and Tensor("a", "F32", (2,)).nbytes == 8
