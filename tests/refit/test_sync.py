"""`WeightSync` over real channels: what was pushed is served, and what must not be is refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convtools.errors import UsageError
from convtools.refit.channels.local_memory import Server
from convtools.refit.errors import RefitError
from convtools.refit.sinks.base import DirectSink
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from tests.refit.engines import MODES, Engine, model, refill


def test_one_push_to_engines_of_every_kind(tmp_path: Path) -> None:
    engines = [Engine(mode) for mode in MODES]
    source = model(3)
    with Server(engines[0].receiver, tmp_path / "e"):
        sinks = [
            LocalSink(tmp_path / "e", "shadow"),
            *(DirectSink(e.receiver, e.applier.mode) for e in engines[1:]),
        ]
        with WeightSync(source, sinks, bucket_bytes=4096) as sync:
            for version in (3, 4, 9):
                refill(source, version)
                report = sync.push(version)
                assert report.nbytes == sum(t.nbytes for t in source.values())
                assert report.staging_bytes == 8192 and report.buckets == len(sync.plan.buckets)
                assert [(s.state, s.version, s.mode) for s in report.sinks] == [
                    ("clean", version, mode) for mode in MODES
                ]
                assert [e.look() for e in engines] == [version] * 3
                assert sync.verify().equal
            assert [s.undo_bytes for s in report.sinks] == [report.nbytes, report.nbytes, 0]
    assert not any(e.mixes for e in engines)


def test_verify_names_what_differs() -> None:
    engine, source = Engine(), model(1)
    with WeightSync(source, [DirectSink(engine.receiver)], bucket_bytes=4096) as sync:
        sync.push(1)
        source["head"][3, 1] = 7
        engine.tensors["layers.1.w"][0, 0] = np.nextafter(np.float32(1), np.float32(2))
        assert sync.verify().differing == {"direct": ("layers.1.w", "head")}
        assert not sync.verify().equal


def test_the_self_test_passes_and_finds_engines_that_are_not_right() -> None:
    for mode in ("shadow", "undo"):
        engine, source = Engine(mode), model(1)
        with WeightSync(source, [DirectSink(engine.receiver)], bucket_bytes=4096) as sync:
            report = sync.check()
            assert report.ok and report.canaries == ("layers.0.w", "layers.0.norm", "head")
            assert engine.receiver.version == 0 and sync.verify().equal

    engine = Engine("shadow")
    write = engine.applier.write

    def stuck(tensor: Any, start: int, data: Any) -> Any:
        """An engine that says it wrote, and did not: of one tensor it serves its own copy."""
        return data if tensor.name == "head" else write(tensor, start, data)

    source = model(0)
    engine.applier.write = stuck
    with WeightSync(source, [DirectSink(engine.receiver)], bucket_bytes=4096) as sync:
        report = sync.check()
        assert not report.ok and any("`head` did not show" in fault for fault in report.faults)


def test_an_engine_that_cannot_go_back_is_not_given_canaries() -> None:
    engine = Engine("quarantine")
    with WeightSync(model(1), [DirectSink(engine.receiver)], bucket_bytes=4096) as sync:
        report = sync.check()
    assert not report.ok and set(report.skipped) == {"direct"} and engine.look() == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["layers.2.w", "layers.0.norm"])
def test_nan_and_infinity_are_refused_by_name(value: float, name: str) -> None:
    engine, source = Engine(), model(1)
    source[name].reshape(-1)[-1] = value
    with WeightSync(source, [DirectSink(engine.receiver)], bucket_bytes=4096) as sync:
        with pytest.raises(RefitError, match=f"`{name}` holds NaN or infinity"):
            sync.push(1)
        assert engine.look() == 0
    with WeightSync(source, [DirectSink(engine.receiver)], bucket_bytes=4096, finite=False) as sync:
        assert sync.push(1).unchecked == ("finite",)


def test_bf16_and_fp8_and_strided_tensors_of_torch() -> None:
    import torch

    source = {
        "bf16": torch.randn(65, 3).bfloat16(), "fp8": torch.randn(100).to(torch.float8_e4m3fn),
        "spread": torch.randn(40, 70).t(), "scalar": torch.tensor(3.5), "none": torch.zeros(0, 3),
        "half": torch.randn(9).half(), "wide": torch.randn(3, 5000).bfloat16()[:, 1:-1],
    }  # fmt: skip
    into = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in source.items()}
    from convtools.refit.applier import ShadowApplier
    from convtools.refit.receiver import Receiver
    from convtools.refit.weights import TensorWeights

    receiver = Receiver(ShadowApplier(TensorWeights(into)))
    with WeightSync(source, [DirectSink(receiver)], bucket_bytes=1024) as sync:
        sync.push(1)
        for name, tensor in source.items():
            assert (
                torch.equal(tensor.contiguous().view(torch.uint8), into[name].view(torch.uint8))
                if tensor.dim()
                else tensor == into[name]
            )
        source["bf16"][64, 2] = float("nan")
        with pytest.raises(RefitError, match="`bf16` holds NaN"):
            sync.push(2)
        with pytest.raises(UsageError, match="no contiguous writable memory"):
            TensorWeights({"spread": source["spread"]})


def test_tensors_that_hold_no_bytes_here() -> None:
    import torch

    class Sharded(torch.Tensor):
        placements = ()

    engine = DirectSink(Engine().receiver)
    for tensor, message in (
        (torch.zeros(3, device="meta"), "meta device"),
        (torch.zeros(3).as_subclass(Sharded), "is a DTensor"),
        ([1.0], "is no tensor"),
        (np.zeros(3, "O"), "no store holds"),
    ):
        with pytest.raises(UsageError, match=f"`w` .*{message}"):
            WeightSync({"w": tensor}, [engine])


def test_a_module_and_tied_weights() -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(10, 4)
            self.head = torch.nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

    from convtools.refit.applier import ShadowApplier
    from convtools.refit.receiver import Receiver
    from convtools.refit.weights import TensorWeights

    net, other = Net(), Net()
    engine = Receiver(ShadowApplier(TensorWeights(dict(other.state_dict()))))
    with WeightSync(
        net, [DirectSink(engine)], bucket_bytes=4096, tied={"head.weight": "embed.weight"}
    ) as sync:
        assert sync.push(1).tensors == 1
        assert torch.equal(net.embed.weight, other.head.weight)
        net.head.weight = torch.nn.Parameter(net.embed.weight.detach().clone())
        assert sync.push(2).version == 2
        with torch.no_grad():
            net.head.weight[0, 0] += 1
        with pytest.raises(
            RefitError, match=r"tied weights have diverged\n.*`head.weight` and `embed.weight`"
        ):
            sync.push(3)
        assert engine.version == 2


def test_a_trainer_whose_tensors_have_changed() -> None:
    engine, source = Engine(), model(1)
    with WeightSync(lambda: source, [DirectSink(engine.receiver)], bucket_bytes=4096) as sync:
        sync.push(1)
        source["head"] = np.full((97, 3), 2, "i4")
        with pytest.raises(RefitError, match=r"`head` is I32 \[97, 3\] now"):
            sync.push(2)
        source.pop("head")
        source["tail"] = np.zeros(3)
        with pytest.raises(RefitError, match="gone: `head`, new: `tail`"):
            sync.push(2)
        source = model(2)
        assert sync.push(2).version == 2 and engine.look() == 2


def test_a_pending_gather_is_waited_for_by_the_trainer() -> None:
    engine, pending = Engine(), [True]

    def before_read() -> None:
        if pending[0]:
            raise RefitError("parameters are still being gathered")

    with WeightSync(
        model(1), [DirectSink(engine.receiver)], bucket_bytes=4096, before_read=before_read
    ) as sync:
        with pytest.raises(RefitError, match="still being gathered"):
            sync.push(1)
        pending[0] = False
        assert sync.push(1).version == 1


def test_one_refusal_aborts_everywhere() -> None:
    engines = [Engine("shadow"), Engine("undo"), Engine("quarantine")]
    source = model(1)
    with WeightSync(
        source, [DirectSink(e.receiver, str(i)) for i, e in enumerate(engines)], bucket_bytes=4096
    ) as sync:
        sync.push(1)
        write = engines[1].applier.write
        engines[1].applier.write = lambda *a: (_ for _ in ()).throw(OSError(5, "Input/output error"))
        refill(source, 2)
        with pytest.raises(RefitError, match=r"`1` refused: OSError.*\n.*`2` poisoned at version 1"):
            sync.push(2)
        assert [e.look() for e in engines] == [1, 1, None]
        engines[1].applier.write = write
        sync.push(2)
        assert [e.look() for e in engines] == [2, 2, 2]


def test_a_second_trainer_is_noticed() -> None:
    engine, one, two = Engine(), model(1), model(2)
    with WeightSync(one, [DirectSink(engine.receiver, "e")], bucket_bytes=4096) as first:
        first.push(1)
        with WeightSync(two, [DirectSink(engine.receiver, "e")], bucket_bytes=4096) as second:
            second.push(2)
        assert engine.look() == 2
        with pytest.raises(RefitError, match="another trainer"):
            first.push(3)
        with pytest.raises(RefitError, match="another trainer"):
            first.push(3)
        refill(one, 3)
        assert first.push(3, force=True).version == 3 and engine.look() == 3


def test_what_is_asked_wrongly() -> None:
    engine = Engine()
    with pytest.raises(UsageError, match="needs a sink"):
        WeightSync(model(1), [])
    with pytest.raises(UsageError, match="one name"):
        WeightSync(model(1), [DirectSink(engine.receiver), DirectSink(engine.receiver)])
    with pytest.raises(UsageError, match="not there"):
        WeightSync(model(1), [DirectSink(engine.receiver)], tied={"a": "head"})
    with WeightSync(model(1), [DirectSink(engine.receiver)], bucket_bytes=4096) as sync:
        for version in (-1, 1.0, True, 1 << 62):
            with pytest.raises(UsageError, match="a step of the trainer"):
                sync.push(version)
    with (
        WeightSync({"other": np.zeros(3)}, [DirectSink(engine.receiver)], bucket_bytes=4096) as sync,
        pytest.raises(RefitError, match="the engine has other tensors"),
    ):
        sync.push(1)
