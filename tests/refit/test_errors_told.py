"""Errors of a push: in whose eyes what is wrong, what is served now, and one thing to do."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convtools.errors import UsageError
from convtools.refit.applier import InPlaceApplier, ShadowApplier
from convtools.refit.errors import NotServing, PeerError, RefitError
from convtools.refit.receiver import Receiver
from convtools.refit.refusal import unfolded
from convtools.refit.sinks.base import DirectSink
from convtools.refit.sync import WeightSync
from convtools.refit.weights import TensorWeights
from tests.refit.engines import Engine, model, refill


def synced(source: Any, *engines: Engine, **options: Any) -> WeightSync:
    sinks = [DirectSink(e.receiver, str(i)) for i, e in enumerate(engines)]
    return WeightSync(source, sinks, bucket_bytes=4096, **options)


@pytest.mark.parametrize("ring", [True, False])
def test_the_first_element_that_is_not_finite_is_named(ring: bool) -> None:
    engine, source = Engine(), model(1)
    tensor = source["layers.1.w"]
    tensor = source["layers.1.w"] = tensor if ring else np.asfortranarray(tensor)
    tensor[21, 5] = np.inf
    tensor[21, 7] = tensor[39, 32] = np.nan
    with synced(source, engine) as sync, pytest.raises(RefitError, match="holds NaN or infinity") as caught:
        sync.push(1)
    run = len([p for b in sync.plan.buckets for p in b.parts])
    assert run > 1 and str(caught.value.where).startswith("element [21, 5]; ")
    assert "of the " in str(caught.value.where) and "elements looked at" in str(caught.value.where)
    assert caught.value.found == "now `0` clean at version 0"


@pytest.mark.parametrize(
    ("array", "where"),
    [
        (np.array(np.nan, "f4"), "element []; 1 of the 1 elements looked at"),
        (np.array([[1, 2], [complex(0, np.inf), 3]], "c8"), "element [1, 0]; 1 of the 4 elements looked at"),
        (np.array([1, np.inf, np.nan], "f2"), "element [1]; 2 of the 3 elements looked at"),
    ],
)
def test_elements_of_every_kind(array: Any, where: str) -> None:
    receiver = Receiver(ShadowApplier(TensorWeights({"w": np.zeros_like(array)})))
    with (
        WeightSync({"w": array}, [DirectSink(receiver)], bucket_bytes=256) as sync,
        pytest.raises(RefitError, match="holds NaN or infinity") as caught,
    ):
        sync.push(1)
    assert caught.value.where == where


def test_a_drain_that_takes_too_long_at_the_commit_changed_nothing() -> None:
    engine = Engine()
    engine.receiver._drain = 0.05
    with synced(model(1), engine) as sync, engine.receiver.serving():
        with pytest.raises(RefitError) as caught:
            sync.push(1)
        error = caught.value
        assert error.what == (
            "version 1 was committed nowhere, and nothing was changed: `0` refused: "
            "requests were still being answered"
        )
        assert error.found == "1 after 0.05 s; now `0` clean at version 0"
        assert "`Receiver(drain=)`" in str(error.fix) and "--drain" in str(error.fix)
        assert str(error).count("what to do") == 1


def test_what_failed_and_what_was_restored_is_told() -> None:
    flush: list[Exception] = []

    def flushed() -> None:
        if flush:
            raise flush.pop()

    engine, source = Engine("quarantine", flush=flushed), model(1)
    with synced(source, engine, base=lambda version: model(version)) as sync:
        sync.push(1)
        refill(source, 2)
        source["layers.2.w"][0, 0] = np.nan
        with pytest.raises(RefitError, match=r"version 2 was not pushed: `layers\.2\.w` holds NaN") as caught:
            sync.push(2)
        assert caught.value.found == "base(1) was restored at `0`; now `0` clean at version 1"
        assert engine.look() == 1
        sync._base = lambda version: {}[version]  # type: ignore[assignment]
        with pytest.raises(RefitError, match="holds NaN") as caught:
            sync.push(2)
        assert caught.value.found == (
            "base(1) could not be restored at `0`: KeyError: 1; now `0` poisoned at version 1"
        )


class Silent(DirectSink):
    """Whose answer to a commit gets lost."""

    def receive(self, timeout: float) -> Any:
        answer = super().receive(timeout)
        if type(answer).__name__ == "Committed":
            raise PeerError("it did not answer in 5 s")
        return answer


def test_one_sink_whose_commit_is_not_answered() -> None:
    engine = Engine()
    with WeightSync(model(1), [Silent(engine.receiver, "e")], bucket_bytes=4096) as sync:
        with pytest.raises(RefitError, match="it is not known whether it was committed: `e`: it did not"):
            sync.push(1)
        assert engine.look() == 1


def test_a_source_that_changed_says_where_the_sinks_stand() -> None:
    engine, source = Engine(), model(1)
    with synced(lambda: source, engine) as sync:
        source["head"] = source["head"].astype("i4")
        with pytest.raises(RefitError) as caught:
            sync.push(1)
        assert (
            caught.value.what == "version 1 was not pushed: the trainer's tensors are not those of the plan"
        )
        assert caught.value.found == "`head` is I32 [97, 3] now; now `0` never reached"
        assert "make a new one" in str(caught.value.fix)
        source = model(1)
        sync.push(1)
        source["head"] = source["head"][:5]
        with pytest.raises(RefitError, match="version 2 was not pushed") as caught:
            sync.push(2)
        assert "now `0` clean at version 1" in str(caught.value.found)
        with pytest.raises(RefitError, match=r"^the trainer's tensors"):
            sync.verify()


def test_waiting_helps_or_somebody_must_push() -> None:
    engine, source = Engine("quarantine"), model(1)

    def refused() -> NotServing:
        with pytest.raises(NotServing) as caught, engine.receiver.serving():
            pass
        return caught.value

    def fails(*_: Any) -> Any:
        seen.append(refused())
        raise OSError(5, "Input/output error")

    seen: list[NotServing] = []
    write = engine.applier.write
    with synced(source, engine) as sync:
        engine.applier.write = lambda *args: (write(*args), fails())
        for _ in range(2):
            with pytest.raises(RefitError, match="Input/output error"):
                sync.push(1)
        assert [(e.what, e.poisoned, e.fix) for e in seen] == [
            ("the engine is taking over new weights", False, "wait, and ask again"),
            (
                "the engine is taking over new weights, and holds none that are whole until it has", False,
                "wait, and ask again",
            ),
        ]  # fmt: skip
        last = refused()
        assert last.poisoned and "may hold a mix" in last.what and "Input/output error" in str(last.found)
        assert "push all weights again" in str(last.fix)
        engine.applier.write = write
        sync.push(1)
        assert engine.look() == 1


def test_an_engine_without_a_flush_hook_is_named_in_the_report(tmp_path: Path) -> None:
    from convtools.refit.sinks.checkpoint import CheckpointSink

    engines = [Engine(), Engine(flush=lambda: None)]
    said = "flush: 0 has no caches to empty, or did not say"
    with synced(model(1), *engines) as sync:
        sync.join(CheckpointSink(tmp_path / "out", {"config.json": b"{}"}, fsync=False))  # nobody answers
        report = sync.push(1)
        assert [s.flushed for s in report.sinks] == [False, True, False] and report.unchecked == (said,)
    with synced(model(1), *engines, flush=False) as sync:
        assert sync.push(2).unchecked == ("flush",)


@pytest.mark.parametrize(
    ("change", "found", "fix"),
    [
        (
            lambda m: {f"module.{n}": t for n, t in m.items()},
            "the engine has no tensor of that name: `module.layers.0.w`, `module.layers.0.norm`, "
            "`module.layers.1.w`, `module.layers.1.norm`, `module.layers.2.w` ... and 2 more; "
            "the source does not give: `layers.0.w`, ",
            "a wrapper's prefix",
        ),
        (
            lambda m: m | {"head": m["head"].astype("f4")},
            "`head`: the engine holds I16 [97, 3], the source gives F32 [97, 3]; now",
            "cast it explicitly: give the source as a call that returns i16 tensors",
        ),
        (
            lambda m: m | {"head": m["head"][:90]},
            "`head`: the engine holds I16 [97, 3], the source gives I16 [90, 3]; now",
            "is it another model",
        ),
    ],
)
def test_other_tensors_in_whose_eyes(change: Callable[[Any], Any], found: str, fix: str) -> None:
    with (
        synced(change(model(1)), Engine()) as sync,
        pytest.raises(RefitError, match="not pushed: `0` refused: the engine has other") as caught,
    ):
        sync.push(1)
    assert str(caught.value.found).startswith(found) and fix in str(caught.value.fix)


def _generated() -> Iterator[Any]:
    yield from model(1).items()


def test_sinks_that_are_none() -> None:
    sink = DirectSink(Engine().receiver)
    for given, message in (
        ("http://localhost:1", "not a URL or a path"),
        (Path("/run/engine"), "not a URL or a path"),
        (sink, r"into a list: \[sink\]"),
        (None, "sinks are a list(.|\n)*found: None"),
        (["http://localhost:1"], "not a sink(.|\n)*convtools.connect"),
        ([sink.receiver], r"not a sink(.|\n)*found: Receiver(.|\n)*DirectSink\(receiver\)"),
    ):
        with pytest.raises(UsageError, match=message):
            WeightSync(model(1), given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="needs a sink"):
        WeightSync(model(1), [])


def test_sources_that_are_none() -> None:
    sink = DirectSink(Engine().receiver)
    for given in (
        None, [np.zeros(3)], list(model(1).items()), iter(model(1).items()), _generated(), _generated, {}, 7,
        dict, sink, lambda: None,
    ):  # fmt: skip
        with pytest.raises(UsageError, match="no named tensors to push") as caught:
            WeightSync(given, [sink])
        for kind in ("a module", "a call", "`Shards`", "`RankedSource`", "`Arena`", "a checkpoint's path"):
            assert kind in str(caught.value.expected)
    with pytest.raises(UsageError, match=r"dict\(module.named_parameters\(\)\)"):
        WeightSync(_generated(), [sink])


def test_a_module_on_either_end_and_a_call_that_gives_one() -> None:
    import torch

    engine, trainer = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    receiver = Receiver(InPlaceApplier(TensorWeights(engine)))
    for source in (trainer, lambda: trainer):
        with torch.no_grad():
            trainer.weight.fill_(receiver.version + 5)
        with WeightSync(source, [DirectSink(receiver)]) as sync:
            sync.push(receiver.version + 1)
        assert torch.equal(engine.weight, trainer.weight)
    assert receiver.version == 2
    for given in (None, [], {}, 3):
        with pytest.raises(UsageError, match="an engine needs named tensors"):
            TensorWeights(given)  # type: ignore[arg-type]


def test_a_receiver_needs_an_applier() -> None:
    weights = TensorWeights(model(0))
    for given in (weights, ShadowApplier, model(0), None):
        with pytest.raises(UsageError, match=r"needs an applier(.|\n)*Receiver\(ShadowApplier\(weights\)\)"):
            Receiver(given)  # type: ignore[arg-type]


def test_what_an_engine_says_is_taken_apart_and_never_more_than_once() -> None:
    text = "a\nb\n  found: x\n  y\n  what to do: go\n  found: again\n  expected: "
    assert unfolded(text) == ("a\nb", {"found": "x\n  y", "fix": "go\n  found: again", "expected": ""})
    assert unfolded("") == ("", {}) and unfolded("found: 3") == ("found: 3", {})


def test_the_second_thread_is_told_that_a_push_is_under_way() -> None:
    engine, go, inside = Engine(), threading.Event(), threading.Event()

    def before() -> None:
        inside.set()
        go.wait(5)

    with synced(model(1), engine, before_read=before) as sync:
        thread = threading.Thread(target=sync.push, args=(1,))
        thread.start()
        inside.wait(5)
        with pytest.raises(UsageError, match=r"^a push is under way"):
            sync.push(2)
        go.set()
        thread.join()
