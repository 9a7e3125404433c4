"""A bit that turns over between the trainer's buffer and the engine's tensor: found, before it is applied."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from convtools.equality import one_pass
from convtools.refit.arena import Arena
from convtools.refit.bucket import Ring
from convtools.refit.errors import RefitError
from convtools.refit.sinks.base import DirectSink
from convtools.refit.sync import WeightSync

from .engines import Engine, model

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
BUCKET = 2048
BUCKETS = 8


@pytest.fixture(params=["kernel, if it was built", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(one_pass, "_kernel", lambda: None)
    return str(request.param)


class _Turns(DirectSink):
    """Alters a byte of a bucket after it was filled and before it is read."""

    def __init__(self, engine: Engine, at: int, turn: Callable[[Any, Any], None]) -> None:
        super().__init__(engine.receiver)
        self._at, self._turn = at, turn

    def send(self, question: Any, timeout: float) -> None:
        if type(question).__name__ == "Bucket" and question.index == self._at:
            self._turn(self._ring, question)
        super().send(question, timeout)


def in_part(data: st.DataObject, question: Any) -> tuple[int, int]:
    """Any byte of any part of the bucket, and what is turned over in it."""
    part = data.draw(st.sampled_from(question.parts))
    return part.offset + data.draw(st.integers(0, part.nbytes - 1)), data.draw(st.integers(1, 255))


@few
@given(st.integers(0, BUCKETS - 1), st.sampled_from(["shadow", "undo"]), st.data())
def test_in_a_bucket(way: str, index: int, mode: str, data: st.DataObject) -> None:
    def turn(ring: Ring, question: Any) -> None:
        at, bits = in_part(data, question)
        ring.slot(question.slot, question.nbytes)[at] ^= bits

    for options, told in (
        ({}, f"bucket {index} was altered on its way"),
        ({"fingerprints": False}, f"bucket {index} was altered on its way"),
        ({"checksums": False}, "tensors are not as they were sent"),
    ):
        engine = Engine(mode)
        sink = _Turns(engine, index, turn)
        with WeightSync(model(1), [sink], bucket_bytes=BUCKET, **options) as sync:
            assert len(sync.plan.buckets) >= BUCKETS
            with pytest.raises(RefitError, match=told):
                sync.push(1)
        assert engine.look() == 0 and engine.receiver.state == "clean" and not engine.mixes


@few
@given(st.integers(0, BUCKETS - 1), st.data())
def test_in_a_window_of_an_arena(way: str, index: int, data: st.DataObject) -> None:
    engine = Engine("undo")

    def turn(ring: Arena, question: Any) -> None:
        at, bits = in_part(data, question)
        ring.memory()[question.slot * BUCKET + at] ^= bits

    for options in ({}, {"fingerprints": False}):
        with Arena.like(model(1), window_bytes=BUCKET) as arena:  # anew: a flip stays
            sync = WeightSync(arena, [_Turns(engine, index, turn)], **options)
            with sync, pytest.raises(RefitError, match=f"bucket {index} was altered on its way"):
                sync.push(1)
            assert engine.look() == 0 and not engine.mixes


def test_an_engine_in_quarantine_was_not_written_by_a_damaged_first_bucket(way: str) -> None:
    engine = Engine("quarantine")

    def turn(ring: Ring, question: Any) -> None:
        ring.slot(question.slot, question.nbytes)[0] ^= 1

    sync = WeightSync(model(1), [_Turns(engine, 0, turn)], bucket_bytes=BUCKET)
    with sync, pytest.raises(RefitError, match="bucket 0 was altered"):
        sync.push(1)
    assert engine.look() == 0 and engine.receiver.state == "clean"
