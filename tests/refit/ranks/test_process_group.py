"""The torch.distributed channel: one broadcast for all engines, the same transaction as over a socket."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from convtools.errors import ConvtoolsError
from convtools.refit.applier import ShadowApplier
from convtools.refit.channels.process_group import serve_group
from convtools.refit.receiver import Receiver
from convtools.refit.sinks.process_group import GroupChannel
from convtools.refit.sync import WeightSync
from convtools.refit.weights import TensorWeights
from tests.refit.ranks.worlds import collected, end, run, started

SHAPES = {"a": (300, 7), "b": (5,), "c": (64, 33)}


def model(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(value)) for name, shape in SHAPES.items()}


def values(tensors: dict[str, torch.Tensor]) -> set[float]:
    return {float(v) for t in tensors.values() for v in (t.min(), t.max())}


def serve(fault: str = "") -> Any:
    """An engine rank."""
    engine = model(0)
    applier = ShadowApplier(TensorWeights(engine))
    write, count = applier.write, [0]

    def faulty(tensor: Any, start: int, data: Any, *rest: Any) -> Any:
        count[0] += float(data[:4].view("f4")[0]) == (1 if fault == "kill" else 2)
        if fault and count[0] == 5:
            count[0] += 1
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the engine's own")
        return write(tensor, start, data, *rest)

    applier.write = faulty  # type: ignore[method-assign]
    receiver = Receiver(applier)
    try:
        serve_group(receiver, timeout=5)
    except ConvtoolsError as error:
        return receiver.state, receiver.version, values(engine), str(error)
    return receiver.state, receiver.version, values(engine), ""


def two_engines(rank: int) -> Any:
    if rank:
        return serve("refuse" if rank == 2 else "")
    trained, said = model(1), []
    channel = GroupChannel(timeout=5)
    with WeightSync(trained, channel.sinks, bucket_bytes=1024, slots=3, timeout=5) as sync:
        first = sync.push(1)
        for tensor in trained.values():
            tensor.fill_(2)
        try:
            sync.push(2)  # the second engine fails in the middle
        except ConvtoolsError as error:
            said.append(str(error))
        said.append(sync.verify().differing)
        sync.push(3)
        good, check = sync.verify().equal, sync.check().ok
        sync.leave("engine rank 2")
        for tensor in trained.values():
            tensor.fill_(4)
        last = sync.push(4)
    channel.close()
    return first.buckets, said, good, check, [s.name for s in last.sinks]


def test_two_engines_by_broadcast(tmp_path: Path) -> None:
    (buckets, said, good, check, names), one, two = run(3, two_engines, where=tmp_path)
    assert buckets > 10 and good and check and names == ["engine rank 1"]
    assert "`engine rank 2` refused: ValueError: the engine's own" in said[0]
    assert "`engine rank 1` clean at version 1, `engine rank 2` clean at version 1" in said[0]
    assert set(said[1]) == {"engine rank 1", "engine rank 2"}
    assert one == ("clean", 4, {4.0}, "")
    assert two == ("clean", 3, {2.0}, "")


def dies(index: int, planned: Any) -> None:
    if index == 5:
        os.kill(os.getpid(), signal.SIGKILL)


def broken(rank: int, who: str) -> Any:
    if rank:
        return serve("kill" if who == "engine" and rank == 2 else "")
    trained = model(1)
    channel = GroupChannel(timeout=5)
    sync = WeightSync(trained, channel.sinks, bucket_bytes=1024, timeout=5)
    out = []
    for version in (1, 2):
        began = time.monotonic()
        if who == "trainer" and version == 2:
            sync._source.bucket = dies  # type: ignore[method-assign]
        try:
            sync.push(version)
        except ConvtoolsError as error:
            out.append((str(error), time.monotonic() - began))
    channel.close()
    return out


@pytest.mark.parametrize("who", ["engine", "trainer"])
def test_a_death_in_the_middle(who: str, tmp_path: Path) -> None:
    processes, out = started(3, broken, who, where=tmp_path)
    try:
        found = collected(out, 2)
    finally:
        end(processes)
    assert not any(error for _, error in found.values()), found
    state, version, held, error = found[1][0]
    lost = "the process group of this refit cannot be used any more"
    assert lost in error, "the engine's service ends with what happened"
    if who == "trainer":
        assert (state, version, held) == ("clean", 1, {1.0}) and found[2][0][:3] == ("clean", 1, {1.0})
        return
    assert (state, version, held) == ("clean", 0, {0.0})
    (first, took), (second, soon) = found[0][0]
    assert "version 1 was not pushed" in first and lost in first and took < 10
    assert lost in second and soon < 1
