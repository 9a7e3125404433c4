"""Fused experts that FSDP2 cut, any way it can: the engine gets what transformers writes of the model."""

from pathlib import Path
from typing import Any

import pytest
import torch

import convtools
from convtools.errors import AccountingError, UsageError
from convtools.refit.applier import ShadowApplier
from convtools.refit.channels.local_memory import Server
from convtools.refit.ranks.cut_tensor import CutTensor
from convtools.refit.ranks.source import RankedSource
from convtools.refit.receiver import Receiver
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from convtools.refit.weights import TensorWeights
from tests.refit.hf_models import model_of, saved
from tests.refit.ranks.worlds import run


def moe() -> Any:
    """Five experts, which two ranks cannot share evenly; a tied head."""
    return model_of("Qwen3Moe", tie_word_embeddings=True)


def sharded(dim: int, mesh_shape: tuple[int, ...]) -> Any:
    """Each layer by itself, its fused experts along `dim`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    model = moe()
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicas", "shards")[-len(mesh_shape) :])
    fused = {id(p) for p in model.parameters() if p.ndim == 3}

    def placed(parameter: torch.nn.Parameter) -> Shard | None:
        return Shard(dim) if id(parameter) in fused else None

    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, shard_placement_fn=placed)
    return model


def held(tensors: dict[str, Any]) -> tuple[set[str], int]:
    """Tensors of which this rank has nothing, and how many bytes of its own memory it would send."""
    cut = {n: t for n, t in tensors.items() if isinstance(t, CutTensor)}
    return {n for n, t in cut.items() if not t.held.numel()}, sum(t.region.numel for t in cut.values())


def push_twice(rank: int, engine: str, ckpt: str, dim: int, mesh_shape: tuple[int, ...]) -> Any:
    model = sharded(dim, mesh_shape)
    model(torch.arange(6)[None])  # what FSDP2 has gathered meanwhile is not what is pushed

    def pushed() -> dict[str, Any]:
        return convtools.hf_tensors(model, ckpt, dtype=torch.bfloat16)

    owned = {t.to_local().untyped_storage().data_ptr() for t in model.state_dict().values()}
    found = pushed()
    copied = [
        n for n, t in found.items() if t.held.numel() and t.held.untyped_storage().data_ptr() not in owned
    ]
    source = RankedSource(pushed, timeout=20)
    with WeightSync(source, [LocalSink(engine)] if rank == 0 else [], bucket_bytes=1024) as sync:
        reports = [sync.push(1), sync.push(2)]
        equal = sync.verify().equal
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        reports.append(sync.push(3))
    return [r.changed for r in reports[1:]], equal, copied, *held(found), len(found)


@pytest.mark.parametrize(
    ("dim", "mesh_shape"),
    [(0, (2,)), (1, (2,)), (2, (2,)), (0, (2, 2))],
    ids=["shard0", "shard1", "shard2", "hsdp"],
)
def test_the_engine_gets_the_checkpoint_of_the_whole_model(
    dim: int, mesh_shape: tuple[int, ...], tmp_path: Path
) -> None:
    model = moe()
    theirs = saved(model, tmp_path / "ckpt", torch.bfloat16)
    engine = {n: torch.zeros_like(t) for n, t in theirs.items()}
    with Server(Receiver(ShadowApplier(TensorWeights(engine))), tmp_path / "engine"):
        world = torch.Size(mesh_shape).numel()
        found = run(
            world,
            push_twice,
            str(tmp_path / "engine"),
            str(tmp_path / "ckpt"),
            dim,
            mesh_shape,
            where=tmp_path,
        )
    assert "lm_head.weight" not in theirs
    assert [n for n, t in theirs.items() if not torch.equal(engine[n], 2 * t)] == []
    assert [f[:3] for f in found] == [([0, len(theirs)], True, [])] * world
    assert [f[5] for f in found] == [len(theirs)] * world, "every rank names every tensor"
    each = sum(t.numel() for t in theirs.values()) * (world // mesh_shape[-1])
    assert sum(f[4] for f in found) == each, "ranks hold every element once a replica"
    experts = {e: {n for n in theirs if f".experts.{e}." in n} for e in range(5)}
    gates = {n for n in theirs if "gate_proj" in n}
    nothing = [{n for n in f[3] if ".experts." in n} for f in found]
    if dim == 0:  # as torch.chunk does it: 3 and 2
        first, second = (set().union(*(experts[e] for e in of)) for of in ((3, 4), (0, 1, 2)))
        assert nothing == [first, second] * (world // 2)
    elif dim == 1:  # gate lies above up
        assert nothing == [{n.replace("gate_proj", "up_proj") for n in gates}, gates]
    else:
        assert nothing == [set(), set()]


def refusals(rank: int, ckpt: str) -> Any:
    model, told = sharded(0, (2,)), []
    for state in (
        {n: t for n, t in model.state_dict().items() if "down_proj" not in n},
        model.state_dict() | {"extra": torch.ones(2)},
    ):
        try:
            convtools.hf_tensors(state, ckpt)
        except AccountingError as error:
            told.append(str(error.found))
    try:
        WeightSync(lambda: convtools.hf_tensors(model, ckpt), [])
    except UsageError as error:
        told.append(f"{error.what}: {error.fix}")
    return told


def test_what_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    saved(moe(), tmp_path / "ckpt")
    found = run(2, refusals, str(tmp_path / "ckpt"), where=tmp_path)
    for missing, extra, alone in found:
        assert missing.startswith("not in the model: `model.layers.0.mlp.experts.0.down_proj.weight`, ")
        assert extra == "`extra` has 2 elements that the checkpoint has not"
        assert alone.endswith(" is a rank's part: push it with a RankedSource on every rank")
