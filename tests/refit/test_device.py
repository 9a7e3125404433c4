"""Buckets on a device. What is not marked `gpu` runs the same code over torch tensors of the CPU."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from convtools.equality.fingerprint import Fingerprint, fingerprint_bytes
from convtools.refit.applier import ShadowApplier
from convtools.refit.bucket import Ring
from convtools.refit.device import looks
from convtools.refit.device.memory import as_tensor
from convtools.refit.device.weights import TorchWeights
from convtools.refit.errors import RefitError
from convtools.refit.guard import floats_of, is_finite
from convtools.refit.plan import Part
from convtools.refit.protocol import PartRow
from convtools.refit.receiver import Receiver
from convtools.refit.sinks.base import DirectSink
from convtools.refit.sinks.checkpoint import CheckpointSink
from convtools.refit.sync import WeightSync
from convtools.refit.weights import TensorWeights
from tests.refit.device_engine import on, receiver_of, versions
from tests.refit.engines import MODES, model

BUCKET = 4096
ON = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@ON
@pytest.mark.parametrize("mode", MODES)
def test_a_push_is_one_transaction(device: str, mode: str) -> None:
    tensors, source = on(device, 0), on(device, 1)
    receiver = receiver_of(tensors, mode)
    with WeightSync(source, [DirectSink(receiver)], bucket_bytes=BUCKET, device=device) as sync:
        assert len(sync.plan.buckets) >= 4
        for version in (1, 2):
            for tensor in source.values():
                tensor.fill_(version)
            report = sync.push(version)
            assert versions(tensors) == [version] and sync.verify().equal
            assert (report.staging_bytes, report.unchecked) == (
                4 * BUCKET, ("flush: direct has no caches to empty, or did not say",),
            )  # fmt: skip
        assert report.changed == len(source) and report.sinks[0].mode == mode
        assert sync.check().ok and versions(tensors) == [2]

        source["layers.1.w"][3, 3] = float("nan")
        with pytest.raises(RefitError, match=r"`layers.1.w` holds NaN or infinity"):
            sync.push(3)
        if mode == "quarantine":
            assert receiver.state == "poisoned"
        else:
            assert receiver.state == "clean" and versions(tensors) == [2]
        source["layers.1.w"].fill_(7)
        source["head"].fill_(8)
        sync.push(4)
        assert versions(tensors) == [2, 7, 8] and receiver.state == "clean"


@ON
@pytest.mark.parametrize("mode", ["shadow", "undo"])
def test_an_altered_bucket_is_not_applied(device: str, mode: str) -> None:
    class Turns(DirectSink):
        at = 1

        def send(self, question: Any, timeout: float) -> None:
            if type(question).__name__ == "Bucket" and question.index == self.at:
                self._ring.slot(question.slot, question.nbytes)[question.parts[-1].offset] ^= 1
            super().send(question, timeout)

    for options, told in (
        ({}, "bucket 1 was altered on its way"),
        ({"fingerprints": False}, "bucket 1 was altered on its way"),
        ({"checksums": False}, "tensors are not as they were sent"),
    ):
        tensors = on(device, 0)
        receiver = receiver_of(tensors, mode)
        sync = WeightSync(on(device, 1), [Turns(receiver)], bucket_bytes=BUCKET, device=device, **options)
        with sync, pytest.raises(RefitError, match=told):
            sync.push(1)
        assert versions(tensors) == [0] and receiver.state == "clean"


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@ON
def test_every_dtype_and_way_to_lie(device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    source = {
        str(dtype): torch.randn(33, 17, generator=generator).to(dtype).to(device)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
                      torch.complex64, torch.int64, torch.uint8, torch.bool)
    }  # fmt: skip
    source["strided"] = torch.randn(40, 50, generator=generator).to(device).T[3:, ::2]
    source["conjugate"] = torch.randn(5, dtype=torch.complex64, generator=generator).to(device).conj()
    source["scalar"] = torch.tensor(3.5, device=device)
    source["none"] = torch.empty(0, 4, device=device)
    source["host"] = torch.arange(700, dtype=torch.float32)
    tensors = {n: torch.zeros(t.shape, dtype=t.dtype, device=device) for n, t in source.items()}
    source["tied"] = source["scalar"]
    given: dict[str, Any] = source | {"array": np.arange(9, dtype="f4")[::2]}
    tensors["array"] = torch.zeros(5, device=device)
    receiver = Receiver(ShadowApplier(TorchWeights(tensors)))
    with WeightSync(
        given, [DirectSink(receiver)], bucket_bytes=BUCKET, device=device, tied={"tied": "scalar"}
    ) as sync:
        sync.push(1)
        assert sync.verify().equal
        for name, tensor in tensors.items():
            want = torch.from_numpy(given[name].copy()) if name == "array" else given[name].resolve_conj()
            assert bits(tensor) == bits(want)
        source["tied"] = torch.tensor(4.5, device=device)
        with pytest.raises(RefitError, match="tied weights have diverged"):
            WeightSync(given | {"tied": source["tied"]}, [DirectSink(receiver)], device=device,
                       tied={"tied": "scalar"}).push(2)  # fmt: skip


@ON
def test_either_side_may_lie_on_the_host(device: str, tmp_path: Path) -> None:
    tensors, plain = on(device, 0), model(0)
    receivers = receiver_of(tensors, "shadow"), Receiver(ShadowApplier(TensorWeights(plain)))
    with WeightSync(model(1), [DirectSink(receivers[0])], bucket_bytes=BUCKET) as sync:  # host -> device
        sync.push(1)
        assert versions(tensors) == [1] and sync.check().ok
    sinks = [DirectSink(r, str(i)) for i, r in enumerate(receivers)]
    with WeightSync(model(2), sinks, bucket_bytes=BUCKET, device=device) as sync:
        sync.push(2, force=True)
        assert versions(tensors) == [2] and {t.max() for t in plain.values()} == {2}
        assert sync.verify().equal

    from safetensors.numpy import load_file, save_file

    here = tmp_path / "here"
    here.mkdir()
    save_file(model(3), str(here / "model.safetensors"))
    (here / "config.json").write_text("{}")
    written = CheckpointSink(tmp_path / "there", {"config.json": b"{}"})
    with WeightSync(
        here, [*sinks, written], bucket_bytes=BUCKET, device=device
    ) as sync:  # gathered on the host
        report = sync.push(3)
        assert versions(tensors) == [3] and {t.max() for t in plain.values()} == {3}
        assert report.staging_bytes == 5 * BUCKET  # four on the device, one on the host
    found = load_file(str(next((tmp_path / "there").glob("*.safetensors"))))
    assert {n: t.tobytes() for n, t in found.items()} == {n: t.tobytes() for n, t in model(3).items()}


@ON
def test_looks_are_those_of_the_host(device: str) -> None:
    data = np.random.default_rng(2).integers(0, 256, 70_000, "u1")
    there = torch.from_numpy(data).to(device)
    for start, nbytes in ((0, 70_000), (8, 4096), (1024, 1), (4096, 0)):
        assert looks.value_of(there[:nbytes], start) == fingerprint_bytes(data[:nbytes], start)
    rows = [PartRow(0, 512, 300, 0), PartRow(3, 0, 64, 512)]
    parts = [Part(r.tensor, None, r.start, r.nbytes, r.offset) for r in rows]  # type: ignore[arg-type]
    values = [fingerprint_bytes(data[:300], 512), fingerprint_bytes(data[512:576])]
    assert looks.mark_of(there[:576], rows) == looks.mark(zip(parts, values, strict=True))
    # Pinned: both ends of a push may be of different versions.
    assert looks.mark([(rows[1], 7)]).hex() == "83f6fdff5657bd2d6fb079fe6a73137c"
    for dtype in ("F16", "BF16", "F32", "F64", "C64", "I32", "U8"):
        size = max(floats_of(dtype).size, 1)
        few = np.zeros(64, "u1")
        for bits in (floats_of(dtype).infinity, floats_of(dtype).infinity + 1, floats_of(dtype).infinity - 1):
            for sign in (0, 1 << (8 * size - 1)):
                few[2 * size : 3 * size] = np.frombuffer((max(bits, 0) | sign).to_bytes(size, "little"), "u1")
                want = is_finite(few, dtype)
                assert looks.all_finite(torch.from_numpy(few).to(device), floats_of(dtype)) == want
    value, to = Fingerprint(), np.zeros(300, "u1")
    looks.copy_and_look(to, there[:300], 16, value)
    assert (to == data[:300]).all() and value.value == fingerprint_bytes(data[:300], 16)


@settings(max_examples=30)
@given(st.integers(0, 599), st.integers(1, 255))
def test_every_byte_of_a_part_is_in_the_mark(at: int, bits: int) -> None:
    data = torch.arange(600, dtype=torch.int64).to(torch.uint8)
    rows = [PartRow(0, 0, 100, 0), PartRow(1, 0, 344, 256)]
    before = looks.mark_of(data, rows)
    data[at] ^= bits
    assert (looks.mark_of(data, rows) != before) == (at < 100 or at >= 256)
    data[at] ^= bits
    assert looks.mark_of(data, [PartRow(0, 8, 100, 0), rows[1]]) != before
    assert looks.mark_of(data, rows[::-1]) != before


def test_tensors_over_memory_that_torch_may_only_read() -> None:
    with Ring(BUCKET, 2) as ring, warnings.catch_warnings():
        warnings.simplefilter("error")
        ring.slot(0, 4)[:] = b"abcd"
        made = as_tensor(ring.slot(0, 4).toreadonly())
        assert made.tolist() == [97, 98, 99, 100]
        ring.slot(0, 1)[:] = b"z"
        assert made[0] == 122
        del made
