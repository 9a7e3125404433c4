"""`WeightSync` over real channels: what was pushed is served, and what must not be is refused by name."""

import hashlib
import json
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
                assert report.staging_bytes == 4 * 4096 and report.buckets == len(sync.plan.buckets)
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
            report = sync.check(0)
            assert report.ok and report.canaries == ("layers.0.w", "layers.0.norm", "head")
            assert engine.receiver.version == 0 and sync.verify().equal

    engine = Engine("shadow")
    write = engine.applier.write

    def stuck(tensor: Any, start: int, data: Any, copy: Any) -> Any:
        """An engine that writes elsewhere: of one tensor it serves what it had."""
        if tensor.name == "head":
            copy(np.empty_like(data), data)
            return data
        return write(tensor, start, data, copy)

    source = model(0)
    engine.applier.write = stuck
    with WeightSync(source, [DirectSink(engine.receiver)], bucket_bytes=4096) as sync:
        report = sync.check(0)
        assert not report.ok and any("`head` did not show" in fault for fault in report.faults)


def test_an_engine_that_cannot_go_back_is_healed_after_the_canaries() -> None:
    engine = Engine("quarantine")
    with WeightSync(model(0), [DirectSink(engine.receiver)], bucket_bytes=4096) as sync:
        assert sync.check().ok
        assert engine.look() == 0 and sync.verify().equal and not engine.mixes


class Packed:
    """An applier over another whose engine keeps its tensors in another form, made when all have come."""

    def __init__(self, engine: Engine, *, stale: str = "", grows: str = "") -> None:
        self._over, self._stale, self._grows = engine.applier, stale, grows
        self.own = self._made()
        self.loads = 0

    def _made(self) -> dict[str, bytes]:
        return {f"packed.{n}": t.tobytes()[::-1] for n, t in self._tensors().items()}

    def _tensors(self) -> dict[str, Any]:
        return {t: self._over._weights.buffer(t) for t in self._over._weights.tensors()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._over, name)

    def prepare(self) -> None:
        self.loads += 1
        made = self._made()
        for name, data in made.items():
            if name != self._stale:
                self.own[name] = data + (bytes([self.loads]) if name == self._grows else b"")

    def abort(self) -> bool:
        back = bool(self._over.abort())
        if back:
            self.own = self._made()
        return back

    def serves(self, tensor: Any) -> None:
        return None

    pending = serves

    def weaker(self, tensor: Any) -> str:
        return f"{tensor.name} is packed"

    def digests(self) -> dict[str, bytes]:
        return {name: hashlib.sha256(data).digest() for name, data in self.own.items()}

    def touches(self, tensor: Any) -> tuple[str, ...]:
        return (f"packed.{tensor.name}",)


@pytest.mark.parametrize("mode", ["quarantine", "undo"])
def test_the_self_test_of_an_engine_that_packs_its_tensors(mode: str) -> None:
    def checked(**wrong: str) -> Any:
        engine = Engine(mode)
        engine.receiver._applier = packed = Packed(engine, **wrong)  # type: ignore[assignment]
        sink = DirectSink(engine.receiver)
        with WeightSync(model(0), [sink], bucket_bytes=4096) as sync:
            with pytest.raises(RefitError, match=r"`direct` refused: .*cannot be read back") as caught:
                sync._links[0].refresh(sync.plan, sync._ring, 5, False)
                sync._links[0].told("serves", len(sync.plan.tensors), 5)
            assert "push once" in str(caught.value)
            with pytest.raises(UsageError, match="does not serve the source's weights"):
                sync.check()  # nothing can be read back yet
            sync.push(0)
            report = sync.check()
            assert sync.verify().weaker == {
                "direct": {t.name: f"{t.name} is packed" for t in sync.plan.tensors}
            }
            assert engine.look() == 0 and packed.loads >= 3
        return report

    report = checked()
    assert report.ok and report.digests == {"direct": 7} and len(report.weaker["direct"]) == 7
    report = checked(stale="packed.layers.0.norm")
    assert report.identity and report.faults == (
        "direct: `packed.layers.0.norm` did not change with `layers.0.norm`: it is stale",
    )
    report = checked(grows="packed.layers.1.w")
    assert not report.identity
    assert report.faults[0] == "direct: a second push of the same weights changed `packed.layers.1.w`"


def test_what_came_at_the_last_commit_says_nothing_of_a_mix() -> None:
    engine = Engine("quarantine")
    engine.receiver._applier = Packed(engine)  # type: ignore[assignment]
    source = model(1)
    with WeightSync(source, [DirectSink(engine.receiver)], bucket_bytes=4096) as sync:
        sync.push(1)
        assert sync.verify().equal
        source["head"].reshape(-1)[0] = 7
        source["layers.2.w"][0, 0] = np.nan
        with pytest.raises(RefitError, match="holds NaN"):
            sync.push(2)
        source["head"].reshape(-1)[0], source["layers.2.w"][0, 0] = 1, 1
        assert engine.look() is None and not sync.verify().equal
        sync.push(2)
        assert sync.verify().equal


def test_the_base_version_is_pushed_again_to_a_sink_that_holds_a_mix() -> None:
    engines, source, pushed = [Engine("quarantine"), Engine("shadow")], model(1), []

    def base(version: int) -> Any:
        pushed.append(version)
        return model(version)

    sinks = [DirectSink(e.receiver, str(i)) for i, e in enumerate(engines)]
    with WeightSync(source, sinks, bucket_bytes=4096, base=base) as sync:
        sync.push(1)
        refill(source, 2)
        source["head"].reshape(-1)[0] = 7
        source["layers.2.w"][0, 0] = np.nan
        with pytest.raises(
            RefitError, match=r"(?s)holds NaN.*`0` clean at version 1, `1` clean at version 1"
        ):
            sync.push(2)
        assert pushed == [1] and [e.look() for e in engines] == [1, 1]
        refill(source, 3)
        assert sync.push(3).changed == 7 and [e.look() for e in engines] == [3, 3]
        assert sync.push(3).changed == 0
    assert not any(e.mixes for e in engines)


def test_what_requests_in_flight_do_and_the_flush_are_the_trainers_choice() -> None:
    asked: list[str] = []
    for policy in ("drain", "abort", "keep"):
        for mode in ("shadow", "undo"):
            engine = Engine(mode, flush=lambda: asked.append("flush"), in_flight=asked.append)
            with WeightSync(
                model(1), [DirectSink(engine.receiver)], bucket_bytes=4096,
                in_flight=policy, flush=policy == "keep",
            ) as sync:  # fmt: skip
                report = sync.push(1)
            assert set(asked) == {policy} | ({"flush"} if policy == "keep" else set())
            assert report.sinks[0].flushed == (policy == "keep") == ("flush" not in report.unchecked)
            asked.clear()
    engine = Engine()
    with (
        WeightSync(model(1), [DirectSink(engine.receiver)], bucket_bytes=4096, in_flight="keep") as sync,
        pytest.raises(RefitError, match="cannot do that with requests in flight"),
    ):
        sync.push(1)
    assert engine.look() == 0


def test_sinks_join_and_leave() -> None:
    first, second = Engine(), Engine("quarantine")
    with WeightSync(model(1), [DirectSink(first.receiver, "a")], bucket_bytes=4096) as sync:
        sync.push(1)
        with pytest.raises(UsageError, match="one name"):
            sync.join(DirectSink(second.receiver, "a"))
        sync.join(DirectSink(second.receiver, "b"))
        sync.push(2)
        assert (first.receiver.version, second.receiver.version) == (2, 2)
        sync.leave("a")
        sync.push(3)
        assert (first.receiver.version, second.receiver.version) == (2, 3)
        with pytest.raises(UsageError, match="no such sink"):
            sync.leave("a")


def test_a_trace_tells_of_every_bucket_and_is_json_at_any_time(tmp_path: Path) -> None:
    engine, where, seen = Engine(), tmp_path / "trace.json", [0]
    with WeightSync(
        model(1), [DirectSink(engine.receiver, "e")], bucket_bytes=4096, trace=where,
        progress=lambda n: seen.__setitem__(0, seen[0] + n),
    ) as sync:  # fmt: skip
        report = sync.push(1)
    events = json.loads(where.read_text())
    spans = [e["name"] for e in events if e["ph"] == "X"]
    assert spans.count("pack") == spans.count("consume") == report.buckets
    assert {"open", "prepare", "commit", "push"} <= set(spans)
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"trainer", "e", "push", "refit"}
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X") and seen[0] == report.nbytes
    with pytest.raises(UsageError, match="no trace can be written"):
        WeightSync(model(1), [DirectSink(engine.receiver)], bucket_bytes=4096, trace=where)


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
        assert sync.push(1).unchecked == (
            "finite", "flush: direct has no caches to empty, or did not say",
        )  # fmt: skip


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
