"""Zero-copy handover: the trainer's tensors in the memory that the engine reads."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from convtools.errors import UsageError
from convtools.refit.arena import Arena
from convtools.refit.bucket import RingView
from convtools.refit.channels.local_memory import Server
from convtools.refit.errors import PeerError, RefitError
from convtools.refit.plan import Tensor, make_windows
from convtools.refit.sinks.base import DirectSink
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from convtools.stores.base import DTYPE_NBYTES

from .engines import MODES, Engine, model, refill


def test_tensors_are_views_of_one_memory() -> None:
    given = {
        "a": torch.arange(7, dtype=torch.bfloat16),
        "n": np.arange(300, dtype="f8"),
        "s": torch.tensor(3),
    }
    given["empty"] = torch.zeros(0, 4)
    with Arena.like(given, window_bytes=512) as arena:
        assert [t.name for t in arena.plan.tensors] == ["a", "n", "s", "empty"]
        for name, tensor in given.items():
            made = arena.tensors[name]
            assert type(made) is type(tensor) and made.shape == tensor.shape and made.dtype == tensor.dtype
            assert bool((made == tensor).all())
        arena.tensors["a"][2] = 9
        assert (
            bytes(arena.slot(0, 14))
            == given["a"].index_fill(0, torch.tensor(2), 9).view(torch.uint8).numpy().tobytes()
        )
        arena.tensors["n"][:] = 1
        assert bytes(arena.slot(0, 512)[256:]) == np.ones(32).tobytes()
        assert len(arena.plan.buckets) == -(-(256 + 2560 + 8) // 512) == arena.slots
        assert (arena.staging_bytes, arena.ahead, arena.nbytes) == (0, 4, 6 * 512)


def test_what_is_handed_over_cannot_be_written() -> None:
    with Arena.like(model(1)) as arena:
        with pytest.raises(TypeError, match="read-only"):
            arena.slot(0, 8)[0] = 1
        with pytest.raises(PermissionError):
            mmap.mmap(arena.fd, arena.nbytes)
        import os

        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, 0)
        view = RingView(os.dup(arena.fd), arena.bucket_bytes, arena.slots)
        assert bytes(view.slot(0, 64)) == bytes(arena.slot(0, 64))
        view.close()
        with pytest.raises(PeerError, match="another size"):
            RingView(os.dup(arena.fd), arena.bucket_bytes, arena.slots + 1)
        with pytest.raises(RefitError, match="outside of the ring"):
            arena.slot(arena.slots, 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("checks", [True, False])
def test_a_push_is_one_transaction(tmp_path: Path, mode: str, checks: bool) -> None:
    engine = Engine(mode, flush=lambda: None)
    with Arena.like(model(1), window_bytes=4096) as arena, Server(engine.receiver, tmp_path / "engine"):
        off = {} if checks else {"finite": False, "fingerprints": False, "checksums": False}
        with WeightSync(arena, [LocalSink(tmp_path / "engine")], **off) as sync:
            for version in (1, 2):
                refill(arena.tensors, version)
                report = sync.push(version)
                assert engine.look() == version and not engine.mixes
                assert report.staging_bytes == 0 and report.nbytes == sum(t.nbytes for t in model(0).values())
                assert report.unchecked == (() if checks else ("finite", "fingerprints", "checksums"))
                assert report.buckets == arena.slots > 3
            assert sync.verify().equal
            before = {n: t.copy() for n, t in arena.tensors.items()}
            checked = sync.check()
            assert checked.ok and engine.look() == 2, checked
            assert all((before[n] == t).all() for n, t in arena.tensors.items())
            refill(arena.tensors, 3)
            assert sync.push(3).sinks[0].version == 3 and engine.look() == 3
        arena.tensors["layers.1.w"][3, 4] = 77
        with WeightSync(arena, [LocalSink(tmp_path / "engine")]) as sync:
            assert sync.verify().differing == {str(tmp_path / "engine"): ("layers.1.w",)}


def test_nothing_of_it_is_applied_where_a_check_fails(tmp_path: Path) -> None:
    engine = Engine("undo")
    with (
        Arena.like(model(1), window_bytes=1024) as arena,
        WeightSync(arena, [DirectSink(engine.receiver)]) as sync,
    ):
        sync.push(1)
        refill(arena.tensors, 2)
        arena.tensors["layers.2.norm"][5] = np.nan
        with pytest.raises(RefitError, match=r"`layers\.2\.norm` holds NaN"):
            sync.push(2)
        assert engine.look() == 1


class _Changes(DirectSink):
    """The trainer's next step begins while the push is under way."""

    def __init__(self, engine: Engine, change: Any) -> None:
        super().__init__(engine.receiver)
        self._change = change

    def send(self, question: Any, timeout: float) -> None:
        if type(question).__name__ == "Bucket" and question.index == 2:
            self._change()
        super().send(question, timeout)


def test_a_tensor_that_changes_during_the_push_is_noticed() -> None:
    engine = Engine("shadow")
    with Arena.like(model(1), window_bytes=1024) as arena:
        at = arena.plan.buckets[2].parts[0]
        flat = arena.tensors[arena.plan.tensors[at.tensor].name].reshape(-1)

        def change() -> None:
            flat[at.start // flat.itemsize] += 1

        for checksums, told in ((True, "bucket 2 was altered on its way"), (False, "not as they were sent")):
            sync = WeightSync(arena, [_Changes(engine, change)], checksums=checksums)
            with sync, pytest.raises(RefitError, match=told):
                sync.push(1)
        assert engine.look() == 0 and engine.receiver.state == "clean"


def test_a_module_lives_in_it_and_leaving_it_is_noticed() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    arena = Arena.like(module)
    served = {n: t.clone() for n, t in module.state_dict().items()}
    arena.adopt(module)
    from convtools.refit.applier import InPlaceApplier
    from convtools.refit.receiver import Receiver
    from convtools.refit.weights import TensorWeights

    sink = DirectSink(Receiver(InPlaceApplier(TensorWeights(served))))
    with WeightSync(arena, [sink]) as sync:
        step = torch.optim.SGD(module.parameters(), 0.5)
        module(torch.randn(4, 8)).square().sum().backward()
        step.step()
        sync.push(1)
        assert all(torch.equal(served[n], t) for n, t in module.state_dict().items())
        assert int(served["1.num_batches_tracked"]) == 1
        module[0].weight.data = module[0].weight.data.clone()
        with pytest.raises(RefitError, match=r"no longer lie in the arena\n.*`0\.weight`"):
            sync.push(2)
        arena.adopt(module)
        sync.push(2)
    with pytest.raises(UsageError, match=r"other tensors than the arena\n.*`extra`"):
        module.register_buffer("extra", torch.zeros(2))
        arena.adopt(module)
    arena.close()


def test_a_tied_tensor_is_the_same_memory() -> None:
    with Arena.like({"embed": np.ones(8, "f4"), "head": np.ones(8, "f4")}, tied={"head": "embed"}) as arena:
        arena.tensors["head"][3] = 5
        assert arena.tensors["embed"][3] == 5 and [t.name for t in arena.plan.tensors] == ["embed"]
    with pytest.raises(UsageError, match=r"not there\n.*`of`"):
        Arena.like({"head": np.ones(8, "f4")}, tied={"head": "of"})


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(st.sampled_from(sorted(DTYPE_NBYTES)), SHAPES), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(TENSORS, st.integers(1, 6))
def test_windows_hold_every_byte_once_in_one_run(listed: Any, blocks: int) -> None:
    tensors = [Tensor(str(i), dtype, shape) for i, (dtype, shape) in enumerate(listed)]
    plan = make_windows(tensors, 256 * blocks)
    at: dict[int, int] = {}
    for i, bucket in enumerate(plan.buckets):
        assert 0 < bucket.nbytes <= plan.bucket_bytes and bucket.parts[0].offset == 0
        for part in bucket.parts:
            start = i * plan.bucket_bytes + part.offset - part.start
            assert at.setdefault(part.tensor, start) == start and start % 256 == 0
            size = DTYPE_NBYTES[plan.tensors[part.tensor].dtype]
            assert part.nbytes % size == part.start % size == 0
    covered = [
        (p.tensor, b) for w in plan.buckets for p in w.parts for b in range(p.start, p.start + p.nbytes)
    ]
    assert covered == [(i, b) for i, t in enumerate(tensors) for b in range(t.nbytes)]
