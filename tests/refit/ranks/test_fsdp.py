"""FSDP2 and HSDP modules on real gloo ranks: what their shards hold together is what the engine serves."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convtools.errors import ConvtoolsError
from convtools.refit.applier import ShadowApplier
from convtools.refit.channels.local_memory import Server
from convtools.refit.ranks.source import RankedSource
from convtools.refit.receiver import Receiver
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from convtools.refit.weights import TensorWeights
from tests.refit.ranks.worlds import collected, end, run, started

SHAPES = {"a.weight": (7, 5), "b.weight": (3, 4), "b.bias": (1,), "c.weight": (33, 17)}


class Model(torch.nn.Module):
    """Rows that two ranks cannot share evenly, and one that a rank has nothing of."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            module, leaf = name.split(".")
            if not hasattr(self, module):
                self.add_module(module, torch.nn.Module())
            numbers = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape) + len(name)
            self.get_submodule(module).register_parameter(leaf, torch.nn.Parameter(numbers))
        self.register_buffer("steps", torch.arange(3, dtype=torch.int64))


def whole() -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in Model().state_dict().items()}


def sharded(mesh_shape: tuple[int, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicas", "shards")[-len(mesh_shape) :])
    model = Model()
    fully_shard(model.c, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def sync_of(rank: int, directory: str, model: Any, timeout: float) -> tuple[RankedSource, WeightSync]:
    source = RankedSource(model, timeout=timeout)
    sinks = [LocalSink(directory, "engine")] if rank == 0 else []
    return source, WeightSync(source, sinks, bucket_bytes=1024, timeout=timeout)


def scale(model: Any, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def push_twice(rank: int, directory: str) -> Any:
    model = sharded((2,))
    source, sync = sync_of(rank, directory, model, 10)
    with sync:
        first = sync.push(1)
        same = sync.verify().equal
        scale(model, 2)
        second = sync.push(2)
        check = sync.check()
        messages = [source._legs.of(i) for i in range(len(sync.plan.buckets))]
    ours = sum(m.nbytes for found in messages for r, m in found.items() if r == rank)
    return first.version, same, second.changed, check.ok, ours, repr(second)


def test_fsdp_ranks_push_what_they_hold(tmp_path: Path) -> None:
    engine = {name: torch.zeros_like(t) for name, t in whole().items()}
    receiver = Receiver(ShadowApplier(TensorWeights(engine)))
    with Server(receiver, tmp_path / "engine"):
        found = run(2, push_twice, str(tmp_path / "engine"), where=tmp_path)
    wanted = {n: t if n == "steps" else t * 2 for n, t in whole().items()}
    assert {n: t.tolist() for n, t in engine.items()} == {n: t.tolist() for n, t in wanted.items()}
    assert [f[:4] for f in found] == [(1, True, 4, True)] * 2
    assert found[0][5] == found[1][5], "every rank has the very report of the lead"
    nbytes = sum(t.numel() * t.element_size() for t in wanted.values())
    assert max(f[4] for f in found) < 0.6 * nbytes, "nobody sends more than its own"


def refused(rank: int, directory: str) -> Any:
    """Replicas that differ, NaN and calls that differ: what each rank is told; the next push goes on."""
    model, told = sharded((2, 2)), []
    source, sync = sync_of(rank, directory, model, 10)
    sync.push(1)
    local = model.c.weight.to_local()

    def attempt(version: int) -> None:
        try:
            sync.push(version)
        except ConvtoolsError as error:
            told.append(f"{type(error).__name__}: {error}")

    with torch.no_grad():
        kept = local[-1, -1].clone()
        local[-1, -1] = 12345.0 if rank == 3 else kept
        attempt(2)
        local[-1, -1] = float("nan") if rank in (1, 3) else kept
        attempt(2)
        local[-1, -1] = kept
    attempt(3 if rank == 1 else 2)
    scale(model, 0.0)
    sent = sum(
        m.nbytes for i in range(len(sync.plan.buckets)) for r, m in source._legs.of(i).items() if r == rank
    )
    return told, sync.push(4).version, sent


def test_all_ranks_of_hsdp_learn_of_a_refusal(tmp_path: Path) -> None:
    engine = {name: torch.zeros_like(t) for name, t in whole().items()}
    receiver = Receiver(ShadowApplier(TensorWeights(engine)))
    with Server(receiver, tmp_path / "engine"):
        found = run(4, refused, str(tmp_path / "engine"), where=tmp_path)
    (replica, nan, call), version, _ = found[0]
    assert all(f[:2] == found[0][:2] for f in found), "the same error everywhere"
    assert re.match(
        r"RefitError: version 2 was not pushed: ranks hold different copies of one tensor\n"
        r".*`c.weight` on rank 1 and rank 3",
        replica,
    )
    assert re.search(r"`c.weight` holds NaN or infinity", nan) and "`engine` clean at version 1" in nan
    call = call.replace("version 2 was not pushed: ", "")
    assert re.match(r"UsageError: rank 1: the ranks do different things\n.*push\(2, .*rank 1 push\(3, ", call)
    assert (version, receiver.version) == (4, 4)
    assert not any(t.any() for n, t in engine.items() if n != "steps")
    assert [f[2] for f in found[2:]] == [0, 0], "replicas send nothing"


def broken(rank: int, directory: str, how: str) -> Any:
    """Push once, then again while the last rank dies or sleeps in the middle."""
    import torch.distributed as dist

    world = dist.get_world_size()
    source, sync = sync_of(rank, directory, sharded((world,)), 3)
    sync.push(1)
    serve, calls = source.serve, []

    def dies(index: int) -> None:
        calls.append(index)
        if len(calls) == 2:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(6)
        serve(index)

    if rank == world - 1:
        source.serve = dies
    out = []
    for version in (2, 3):
        began = time.monotonic()
        try:
            sync.push(version)
        except ConvtoolsError as error:
            out += [f"{type(error).__name__}: {error}", time.monotonic() - began]
    return out


@pytest.mark.parametrize(
    ("how", "text"), [("kill", "rank 2 has gone"), ("slow", "rank 2 did not answer in time")]
)
def test_a_rank_that_dies_or_hangs_fails_the_push_everywhere(how: str, text: str, tmp_path: Path) -> None:
    engine = {name: torch.zeros_like(t) for name, t in whole().items()}
    receiver = Receiver(ShadowApplier(TensorWeights(engine)))
    with Server(receiver, tmp_path / "engine"):
        processes, out = started(3, broken, str(tmp_path / "engine"), how, where=tmp_path)
        try:
            found = collected(out, 2 if how == "kill" else 3)
        finally:
            end(processes)
    assert not any(error for _, error in found.values()), found
    first, took, again, quickly = found[0][0]
    assert first.startswith(
        f"RefitError: version 2 was not pushed: {text}; the process group of this refit cannot"
    )
    assert "`engine` clean at version 1" in first
    assert took < 3 + 2 and quickly < 1
    assert "the process group of this refit cannot be used any more" in again
    assert found[1][0][0] == first and found[1][0][1] < 3 + 2, "the other ranks have the same error, as soon"
    assert (receiver.state, receiver.version) == ("clean", 1)
    assert {n: t.tolist() for n, t in engine.items()} == {n: t.tolist() for n, t in whole().items()}
