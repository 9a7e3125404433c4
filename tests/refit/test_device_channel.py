"""Buckets on a device through a socket: what is refused, and memory that an engine does not let go of."""

import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from convtools.errors import UsageError
from convtools.refit.arena import Arena
from convtools.refit.channels.local_memory import Server
from convtools.refit.device import ring as ring_module
from convtools.refit.device.memory import HostMemory, memory_of
from convtools.refit.device.ring import DeviceRing
from convtools.refit.device.weights import TorchWeights
from convtools.refit.errors import FrameError, RefitError
from convtools.refit.plan import Tensor, make_plan
from convtools.refit.protocol import decode_question, encode
from convtools.refit.serving import served
from convtools.refit.sinks.base import DirectSink, agree
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from tests.refit.device_engine import on, receiver_of, versions
from tests.refit.engines import Engine, model

BUCKET = 4096


def test_what_describes_the_memory_is_of_fixed_width() -> None:
    plan, ring = make_plan([Tensor("a", "F32", (3,))], BUCKET), DeviceRing(BUCKET, 2, HostMemory())
    row = ring.export()
    question = agree(plan, ring, row)
    assert decode_question(encode(question)) == question and row.nbytes == 2 * BUCKET
    for wrong in (
        {"handle": bytes(63)}, {"handle": bytes(65)}, {"device": bytes(17)}, {"process": b""},
        {"nbytes": 0}, {"nbytes": (1 << 40) + 1}, {"kind": "hip"}, {"handle": "x" * 64},
    ):  # fmt: skip
        bad = msgspec.structs.replace(question, device=msgspec.structs.replace(row, **wrong))
        with pytest.raises(FrameError, match="not of the schema"):
            decode_question(encode(bad))
    ring.close()


def test_through_a_socket_and_what_is_refused(tmp_path: Path) -> None:
    tensors = on("cpu", 0)
    receiver = receiver_of(tensors, "shadow")
    there = HostMemory()
    with Server(receiver, tmp_path / "e", device=there):
        sink = LocalSink(tmp_path / "e")
        for memory, told in (
            (HostMemory(b"another device 1"), "the buckets lie on another device"),
            (Kind(), "the buckets lie on another kind of device"),
            (Large(), "the ring is of another size"),
            (NoDescriptor(), "no descriptor came with the plan"),
            (Unsealed(), "is not sealed"),
        ):
            sync = WeightSync(on("cpu", 1), [sink], bucket_bytes=BUCKET, device=memory)
            with sync, pytest.raises(RefitError, match=told):
                sync.push(1)
            assert versions(tensors) == [0] and receiver.state == "clean"
            assert (memory.counts.allocated, memory.counts.freed) == (1, 1)
        assert there.counts == dataclasses.replace(there.counts, opened=0, closed=0)
        there.others_only = True
        sync = WeightSync(on("cpu", 1), [sink], bucket_bytes=BUCKET, device="cpu")
        with sync, pytest.raises(RefitError, match="in the engine's own process"):
            sync.push(1)
        there.others_only = False
        with WeightSync(on("cpu", 1), [sink], bucket_bytes=BUCKET, device="cpu") as sync:
            sync.push(1)
        assert versions(tensors) == [1] and (there.counts.opened, there.counts.closed) == (1, 1)
        with WeightSync(on("cpu", 2), [sink], bucket_bytes=BUCKET) as sync:  # it takes the other kind too
            sync.push(2)
        rows = tuple(TorchWeights(tensors).tensors().values())
        assert served(sink, rows, 5).version == 2 and versions(tensors) == [2]

    with Server(Engine().receiver, tmp_path / "f"):
        sync = WeightSync(on("cpu", 1), [LocalSink(tmp_path / "f")], bucket_bytes=BUCKET, device="cpu")
        with sync, pytest.raises(RefitError, match="this engine takes no buckets on a device"):
            sync.push(1)


class Kind(HostMemory):
    kind = "cuda"


class Large(HostMemory):
    """Its ring says that it is larger than it is."""

    def allocate(self, nbytes: int) -> Any:
        return super().allocate(nbytes - 256)


class NoDescriptor(HostMemory):
    def export(self, block: Any) -> tuple[bytes, int]:
        return super().export(block)[0], -1


class Unsealed(HostMemory):
    def export(self, block: Any) -> tuple[bytes, int]:
        handle, fd = super().export(block)
        self.fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, os.fstat(fd).st_size)
        return handle, self.fd

    def free(self, block: Any) -> None:
        os.close(self.fd)
        super().free(block)


def test_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such device"):
        memory_of("gpu")
    with pytest.raises(UsageError, match="no buckets on such a device"):
        memory_of("meta")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="no CUDA device here"):
            WeightSync(on("cpu", 1), [LocalSink(tmp_path)], device="cuda:0")
    with pytest.raises(UsageError, match="takes no buckets on a device"):
        sink = DirectSink(Engine().receiver)
        sink.devices = False  # type: ignore[misc]
        WeightSync(on("cpu", 1), [sink], bucket_bytes=BUCKET, device="cpu")
    with Arena.like(model(1)) as arena, pytest.raises(UsageError, match="an arena is memory of the host"):
        WeightSync(arena, [DirectSink(Engine().receiver)], device="cpu")
    two = {"a": torch.zeros(4), "b": torch.zeros(4, device="meta")}
    for bad in ({"a": np.zeros(3)}, {"a": torch.zeros(4, 4).T}, two):
        with pytest.raises(UsageError):
            TorchWeights(bad)
    ring = DeviceRing(BUCKET, 2, HostMemory())
    with pytest.raises(RefitError, match="outside of the ring"):
        ring.slot(2, 1)
    ring.close()
    ring.close()
    with pytest.raises(RefitError, match="given back"):
        ring.slot(0, 1)
    with pytest.raises(UsageError, match="no ring of 1 buckets"):
        DeviceRing(BUCKET, 1, HostMemory())


def test_memory_that_an_engine_keeps_is_not_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(ring_module, "_never_freed", [])
    receiver, memory = receiver_of(on("cpu", 0), "shadow"), HostMemory()
    there = HostMemory()
    close = there.close
    let_go = threading.Event()
    there.close = lambda block: (let_go.wait(20), close(block))[1]  # type: ignore[method-assign]
    with Server(receiver, tmp_path / "e", device=there):
        sync = WeightSync(on("cpu", 1), [LocalSink(tmp_path / "e")], bucket_bytes=BUCKET, device=memory)
        sync.push(1)
        with pytest.warns(RuntimeWarning, match="1 engines did not let go of staging memory"):
            sync.close()
        assert (memory.counts.allocated, memory.counts.freed) == (1, 0)
        let_go.set()
