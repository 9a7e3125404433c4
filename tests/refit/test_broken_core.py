"""What a push, a commit and a check must hold when something in the middle of them fails."""

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from convtools.errors import StorageError, UsageError
from convtools.refit.applier import ShadowApplier
from convtools.refit.channels.local_memory import Server
from convtools.refit.errors import FrameError, NotServing, RefitError
from convtools.refit.gate import Gate
from convtools.refit.plan import MAX_PARTS, Tensor, make_plan
from convtools.refit.protocol import (
    POISONED,
    Agreed,
    Digest,
    Digests,
    Opened,
    Refused,
    decode_answer,
    encode,
)  # fmt: skip
from convtools.refit.receiver import Receiver
from convtools.refit.sinks.base import DirectSink
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from convtools.refit.weights import SwappedWeights, TensorWeights
from tests.refit.engines import MODES, Engine, model, refill, versions_in
from tests.refit.test_receiver import Trainer

BUCKET = 4096


class Scarce(np.ndarray):  # type: ignore[type-arg]
    """Bytes of which no copy can be made when there is no memory: `left` copies succeed."""

    left: ClassVar = [10**9]

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        Scarce.left[0] -= 1
        if Scarce.left[0] < 0:
            raise MemoryError("no memory")
        return super().copy(*args, **kwargs)


class ScarceWeights(TensorWeights):
    def buffer(self, name: str) -> Any:
        return super().buffer(name).view(Scarce)


@pytest.mark.parametrize("copies", range(10))
def test_a_swap_that_fails_anywhere_is_taken_back(copies: int) -> None:
    tensors = {"a": np.zeros(1 << 17, "f4"), "b": np.zeros(5, "f4"), "c": np.zeros(1 << 18, "f4")}
    receiver = Receiver(ShadowApplier(ScarceWeights(tensors)))
    source = {name: np.ones_like(t) for name, t in tensors.items()}
    with WeightSync(source, [DirectSink(receiver)], bucket_bytes=1 << 20) as sync:
        Scarce.left[0] = copies  # seven are made by a swap, and as many as were made to go back
        try:
            sync.push(1)
        except RefitError:
            pass
        finally:
            Scarce.left[0] = 10**9
        if receiver.state == POISONED:
            with pytest.raises(NotServing), receiver.serving():
                pass
        else:
            assert versions_in(tensors) == {float(receiver.version)}
        assert sync.push(2).version == 2 and versions_in(tensors) == {1.0}


def test_an_engine_that_cannot_be_pointed_back_serves_nothing() -> None:
    engine, used, calls = Engine(), dict[str, Any](), [0]

    def point(name: str, data: Any) -> None:
        calls[0] += 1
        if 3 <= calls[0] < 8:
            raise RuntimeError("no")
        used[name] = data

    receiver = Receiver(ShadowApplier(SwappedWeights(engine.tensors, point)))
    with WeightSync(model(1), [DirectSink(receiver)], bucket_bytes=BUCKET) as sync:
        with pytest.raises(RefitError, match="version 1 was committed nowhere: `direct` refused") as caught:
            sync.push(1)
        assert "nothing was changed" not in str(caught.value) and receiver.state == POISONED
        calls[0] = 100
        sync.push(1)
    assert receiver.state == "clean"
    assert versions_in({n: d.view(engine.tensors[n].dtype) for n, d in used.items()}) == {1.0}


def test_tensors_that_share_a_part_of_their_memory_are_refused() -> None:
    whole = np.zeros(300, "f4")
    with pytest.raises(UsageError, match="`q` and `qkv` share a part of their memory"):
        TensorWeights({"qkv": whole, "q": whole[:100]})
    with pytest.raises(UsageError, match="share a part"):
        TensorWeights({"a": whole[:200], "b": whole[100:]})
    apart = TensorWeights({"a": whole[:100], "b": whole[100:], "tied": whole[:100], "none": whole[50:50]})
    assert apart.aliases() == {"tied": "a"}


def test_an_engine_that_starts_poisoned_serves_nothing_during_its_first_push() -> None:
    engine = Engine()
    engine.receiver = Receiver(engine.applier, state=POISONED)
    trainer = Trainer(engine)
    assert isinstance(trainer.agree(), Agreed) and trainer.open() == Opened(1)
    assert engine.look() is None
    trainer.abort()
    assert engine.look() is None and engine.receiver.state == POISONED


def test_a_gate_is_open_again_after_an_interrupted_wait() -> None:
    gate = Gate()

    def interrupted() -> None:
        def wait(*_: object) -> bool:
            raise KeyboardInterrupt

        gate._changed.wait = wait  # type: ignore[method-assign]

    with gate.request(), pytest.raises(KeyboardInterrupt):
        gate.close(5, interrupted)
    del gate._changed.wait
    assert gate.is_open


def test_requests_are_let_in_after_a_commit_whose_end_fails() -> None:
    engine = Engine()

    def finish() -> None:
        raise OSError("no")

    engine.applier.finish = finish
    with (
        WeightSync(model(1), [DirectSink(engine.receiver)], bucket_bytes=BUCKET) as sync,
        pytest.raises(RefitError, match="clean at version 1"),
    ):
        sync.push(1)
    assert engine.look() == 1 and not engine.mixes


def test_a_poisoned_engine_is_not_equal_whatever_its_bytes_are() -> None:
    flush: list[Exception] = []

    def flushed() -> None:
        if flush:
            raise flush.pop()

    engine = Engine("quarantine", flush=flushed)
    with WeightSync(model(1), [DirectSink(engine.receiver, "e")], bucket_bytes=BUCKET) as sync:
        sync.push(1)
        flush.append(ValueError("no"))
        with pytest.raises(RefitError):
            sync.push(2)
        report = sync.verify()
        assert not report.equal and "serves nothing" in report.unreadable["e"]
        sync.push(2)
        assert sync.verify().equal


@pytest.mark.parametrize("mode", MODES)
def test_what_is_being_changed_is_not_equal(mode: str) -> None:
    engine = Engine(mode)
    trainer = Trainer(engine)
    with WeightSync(model(1), [DirectSink(engine.receiver, "e")], bucket_bytes=BUCKET) as sync:
        trainer.agree()
        trainer.open()
        trainer.buckets()
        report = sync.verify()
        assert not report.equal and ("e" in report.unreadable) == (mode != "shadow")
        trainer.prepare([])
        trainer.commit()
        assert sync.verify().equal


def test_a_commit_that_leaves_a_mix_is_healed_by_the_base_version() -> None:
    flush: list[Exception] = []

    def flushed() -> None:
        if flush:
            raise flush.pop()

    engine, source = Engine("quarantine", flush=flushed), model(1)
    with WeightSync(
        source, [DirectSink(engine.receiver, "e")], bucket_bytes=BUCKET, base=lambda version: model(version)
    ) as sync:
        sync.push(1)
        refill(source, 2)
        flush.append(ValueError("no"))
        with pytest.raises(RefitError, match="committed nowhere: `e` refused: ValueError: no") as caught:
            sync.push(2)
        assert caught.value.found == (
            "now `e` poisoned at version 1; base(1) was restored at `e`; now `e` clean at version 1"
        )
        assert engine.look() == 1 and not engine.mixes


@pytest.mark.parametrize("mode", MODES)
def test_where_the_first_cannot_commit_none_does(mode: str) -> None:
    def no() -> None:
        raise ValueError("no")

    engines = [Engine("undo", flush=no), Engine(mode), Engine(mode)]
    for order in (engines, [engines[1], engines[0], engines[2]]):
        sinks = [DirectSink(e.receiver, str(i)) for i, e in enumerate(order)]
        with WeightSync(model(1), sinks, bucket_bytes=BUCKET) as sync:
            with pytest.raises(RefitError) as caught:
                sync.push(1, force=True)
            said = caught.value.what
            if order is engines:
                assert said.startswith("version 1 was committed nowhere") and (
                    ("nothing was changed" in said) == (mode != "quarantine")
                )
                assert [e.look() for e in order] == [0, None, None] if mode == "quarantine" else [0, 0, 0]
            else:  # the first had done it, and cannot take it back: all others are tried
                assert said == "version 1 was prepared everywhere and not committed everywhere"
                assert [e.look() for e in order] == [1, 0, 1]


def test_a_lease_that_runs_out_while_another_prepares_splits_nothing() -> None:
    engine, slow = Engine(), Engine()

    def prepare() -> None:
        threading.Event().wait(0.3)

    slow.applier.prepare = prepare
    sinks = [DirectSink(engine.receiver, "engine"), DirectSink(slow.receiver, "slow")]
    with WeightSync(model(1), sinks, bucket_bytes=BUCKET, lease=0.2) as sync:
        with pytest.raises(RefitError, match="committed nowhere, and nothing was changed") as caught:
            sync.push(1)
        assert "the lease of 0.2 s ran out" in str(caught.value.found)
        assert [engine.look(), slow.look()] == [0, 0]


def test_an_interrupt_between_two_commits_leaves_no_transaction_open() -> None:
    engines = Engine("undo"), Engine("undo")

    def interrupted() -> None:
        raise KeyboardInterrupt

    engines[0].receiver._flush = interrupted
    with WeightSync(
        model(1), [DirectSink(e.receiver, str(i)) for i, e in enumerate(engines)], bucket_bytes=BUCKET
    ) as sync:
        with pytest.raises(KeyboardInterrupt):
            sync.push(1)
        assert [e.look() for e in engines] == [0, 0]
        engines[0].receiver._flush = None
        sync.push(1)
        assert [e.look() for e in engines] == [1, 1]


def test_nobody_is_pushed_to_without_a_sink_or_after_the_end() -> None:
    engine = Engine()
    with WeightSync(model(1), [DirectSink(engine.receiver, "e")], bucket_bytes=BUCKET) as sync:
        sync.push(1)
        sync.leave("e")
        for call in (lambda: sync.push(2), sync.verify, sync.check):
            with pytest.raises(UsageError, match="needs a sink"):
                call()
        sync.join(DirectSink(engine.receiver, "e"))
        sync.push(2)
    for call in (lambda: sync.push(3), sync.verify, sync.check):
        with pytest.raises(UsageError, match="closed"):
            call()
    assert engine.look() == 2 or engine.receiver.version == 2


def test_the_report_tells_of_the_sinks_that_took_part() -> None:
    one, two = Engine(), Engine()

    def progress(_: int) -> None:
        if len(sync._links) == 1:
            sync.join(DirectSink(two.receiver, "two"))

    with WeightSync(
        model(1), [DirectSink(one.receiver, "one")], bucket_bytes=BUCKET, progress=progress
    ) as sync:
        assert [(s.name, s.version) for s in sync.push(1).sinks] == [("one", 1)]
        assert [(s.name, s.version) for s in sync.push(2).sinks] == [("one", 2), ("two", 2)]


def test_a_sync_that_is_refused_leaves_no_descriptor(tmp_path: Path) -> None:
    engine, wrong = Engine(), dict[str, Any]
    before = os.listdir("/proc/self/fd")
    (tmp_path / "there").touch()
    for options in (
        wrong(sinks=[DirectSink(engine.receiver)] * 2),
        wrong(trace=tmp_path / "there"),
        wrong(timeout=float("nan")), wrong(timeout=0), wrong(timeout=float("inf")),
        wrong(lease=float("nan")), wrong(lease=-1), wrong(lease=1e9),
        wrong(in_flight="drop", trace=tmp_path / "new"),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            WeightSync(
                model(1), **({"sinks": [DirectSink(engine.receiver)], "bucket_bytes": BUCKET} | options)
            )
    assert os.listdir("/proc/self/fd") == before


def test_two_threads_do_not_push_at_once() -> None:
    engine, waiting, go = Engine(), threading.Event(), threading.Event()

    def gather() -> None:
        waiting.set()
        go.wait(5)

    with WeightSync(model(1), [DirectSink(engine.receiver)], bucket_bytes=BUCKET, before_read=gather) as sync:
        other = threading.Thread(target=sync.push, args=(1,))
        other.start()
        waiting.wait(5)
        with pytest.raises(UsageError, match="under way"):
            sync.push(2)
        go.set()
        other.join()
        assert engine.look() == 1
        assert sync.push(2).version == 2


def test_a_trace_that_cannot_be_written_does_not_fail_the_push(tmp_path: Path) -> None:
    engine = Engine()
    sync = WeightSync(model(1), [DirectSink(engine.receiver)], bucket_bytes=BUCKET, trace=tmp_path / "t")
    assert sync._trace._file is not None
    sync._trace._file.close()
    sync._trace._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    assert sync.push(1).version == 1 and engine.look() == 1
    with pytest.raises(StorageError, match="not whole: No space left"):
        sync.close()


def test_a_liar_does_not_use_up_the_tokens() -> None:
    engine = Engine()
    trainer = Trainer(engine)
    trainer.agree()
    refused = trainer.open(token=1 << 62)
    assert isinstance(refused, Refused) and "an attempt from nowhere" in refused.reason
    with WeightSync(model(1), [DirectSink(engine.receiver)], bucket_bytes=BUCKET) as sync:
        assert sync.push(1).version == 1


class Interrupted(DirectSink):
    """Ctrl-C after the sink has answered, before anyone was told."""

    turns = -1

    def send(self, question: Any, timeout: float) -> None:
        super().send(question, timeout)
        self.turns -= 1
        if self.turns == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("mode", MODES)
def test_a_push_that_was_interrupted_anywhere_is_followed_by_one_that_is_not(mode: str) -> None:
    for turn in range(1, 12):
        engine, source = Engine(mode), model(1)
        sink = Interrupted(engine.receiver)
        with WeightSync(source, [sink], bucket_bytes=BUCKET) as sync:
            sync.push(1)
            refill(source, 2)
            sink.turns = turn
            with suppress(KeyboardInterrupt):
                sync.push(2)
            sink.turns = -1
            assert engine.look() in (1, 2, None) and not engine.mixes
            assert engine.receiver.state != "updating"
            refill(source, 3)
            sync.push(3)
            assert engine.look() == 3 and not engine.mixes


class Ends(ShadowApplier):
    """Ctrl-C when the new version was just raised."""

    def finish(self) -> None:
        raise KeyboardInterrupt


def test_requests_are_let_in_after_an_interrupt_behind_the_commit() -> None:
    engine = Engine()
    engine.receiver = Receiver(Ends(TensorWeights(engine.tensors)))
    with (
        WeightSync(model(1), [DirectSink(engine.receiver)], bucket_bytes=BUCKET) as sync,
        pytest.raises(KeyboardInterrupt),
    ):
        sync.push(1)
    assert engine.look() == 1 and not engine.mixes


def test_a_bucket_has_no_more_parts_than_a_frame_may_name(tmp_path: Path) -> None:
    plan = make_plan((Tensor(str(i), "U8", (1,)) for i in range(MAX_PARTS + 3)), 1 << 30)
    assert [len(b.parts) for b in plan.buckets] == [MAX_PARTS, 3]
    assert plan.buckets[1].parts[0].offset % 256 == 0
    tensors = {str(i): np.zeros(1, "u1") for i in range(300)}
    receiver = Receiver(ShadowApplier(TensorWeights(tensors)))
    with (
        Server(receiver, tmp_path / "e"),
        WeightSync(
            {n: np.ones_like(t) for n, t in tensors.items()}, [LocalSink(tmp_path / "e")], bucket_bytes=256
        ) as sync,
    ):
        assert sync.push(1).buckets == 300 and sync.verify().equal


@pytest.mark.parametrize(
    "lie",
    [{"token": 2**64 - 1}, {"token": -1}, {"version": -2}, {"state": "fine"}, {"mode": "x" * 65},
     {"undo_bytes": -1}, {"incarnation": "\x1b" * 99}],
)  # fmt: skip
def test_an_engine_that_lies_about_itself_is_hung_up_on(lie: dict[str, Any]) -> None:
    told = {
        "digest": bytes(32), "state": "clean", "version": 0, "token": 0, "incarnation": "a", "mode": "shadow",
        "undo_bytes": 0,
    }  # fmt: skip
    assert decode_answer(encode(Agreed(**told))) == Agreed(**told)  # type: ignore[arg-type]
    with pytest.raises(FrameError, match="not of the schema"):
        decode_answer(encode(Agreed(**(told | lie))))


def test_no_more_digests_are_asked_for_than_there_are_tensors() -> None:
    trainer = Trainer(Engine())
    trainer.agree()
    assert isinstance(trainer.say(Digest([0] * 7)), Digests)
    assert isinstance(trainer.say(Digest([0] * 8)), Refused)
