"""What one of two FSDP2 ranks finds of a training step, as JSON in a file; test_ranks.py starts both."""

import json
import sys
from typing import Any

from tests.training.tiny import hybrid

STEPS = 3


def losses(model: Any, tokens: Any) -> Any:
    import torch.nn.functional as F

    from convtools.training.hybrid import mtp_loss

    out = model(tokens=tokens)
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) + mtp_loss(
        out.mtp_logits, tokens
    )


def run(model: Any, optimizer: Any, tokens: Any) -> list[Any]:
    """Norms of three steps of a window of two batches."""
    from convtools.training.engine import Engine

    engine, norms = Engine(model, optimizer, accumulate=2, max_grad_norm=1.0), []
    for _ in range(STEPS):
        for half in tokens.chunk(2):
            engine.backward(losses(engine, half))
        norms.append(engine.step().grad_norm)
        engine.zero_grad()
    return norms


def optimizer_of(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.1)


def tokens_of(rank: int) -> Any:
    import torch

    return torch.randint(24, (4, 9), generator=torch.Generator().manual_seed(rank))


def alone() -> tuple[list[float], dict[str, Any]]:
    """The same on one process: each window holds both ranks' batches."""
    import torch

    model = hybrid()
    both = torch.cat([tokens_of(0)[:2], tokens_of(1)[:2], tokens_of(0)[2:], tokens_of(1)[2:]])
    return run(model, optimizer_of(model), both), dict(model.state_dict())


def replicated(rank: int, replicas: int) -> float:
    """The norm of a first step on a mesh of two dims: so many replicas, the rest are cuts (HSDP)."""
    from torch.distributed.device_mesh import init_device_mesh

    from convtools.training.engine import Engine
    from convtools.training.hybrid import shard

    mesh = init_device_mesh("cpu", (replicas, 2 // replicas), mesh_dim_names=("replicate", "shard"))
    model = shard(hybrid(), mesh)
    engine = Engine(model, optimizer_of(model), accumulate=2)
    for half in tokens_of(rank).chunk(2):
        engine.backward(losses(engine, half))
    return engine.get_global_grad_norm()


def memory(tensor: Any) -> int:
    return int(tensor.to_local().untyped_storage().data_ptr())


def rank_main(rank: int, meet: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from convtools.errors import UsageError
    from convtools.training.checkpoint_names import checkpoint_shapes, checkpoint_tensors
    from convtools.training.engine import Engine
    from convtools.training.errors import TrainingError
    from convtools.training.hybrid import shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    expected_norms, expected = alone()
    model = shard(hybrid(), mesh)
    shapes = checkpoint_shapes(model.config.to_dict())
    norms = run(model, optimizer_of(model), tokens_of(rank))

    with torch.no_grad():
        model(tokens_of(rank))  # leaves the root unsharded: what is read must be the shards all the same
    views = checkpoint_tensors(model.state_dict(), shapes)
    wanted = checkpoint_tensors(expected, shapes)
    plain = sorted(n for n, t in views.items() if not hasattr(t, "placements"))
    apart = max(
        float((getattr(t, "full_tensor", lambda t=t: t)() - wanted[n]).abs().max()) for n, t in views.items()
    )
    own = {memory(t) for t in model.state_dict().values() if hasattr(t, "to_local")}
    copied = [n for n, t in views.items() if n not in plain and memory(t) not in own]

    engine = Engine(model, optimizer_of(model))
    engine.backward(losses(engine, tokens_of(rank)) * (float("nan") if rank else 1.0))
    refused = ""
    try:
        engine.step()
    except TrainingError as error:  # on both ranks, for a NaN of one
        refused = error.what

    by_expert = ""
    whole = {n: t for n, t in model.state_dict().items()}
    fused = "model.layers.1.mixer.experts.up_proj"
    whole[fused] = distribute_tensor(whole[fused].full_tensor(), mesh, [Shard(0)])
    try:
        checkpoint_tensors(whole, shapes)
    except UsageError as error:
        by_expert = error.what
    mixed = ""
    model.extra = torch.nn.Linear(2, 2)
    try:
        Engine(model, optimizer_of(model))
    except UsageError as error:
        mixed = f"{error.what}: {error.found}"
    by_ranks = [replicated(rank, replicas) for replicas in (1, 2)]
    found = {
        "by_ranks": by_ranks, "norms": norms, "expected_norms": expected_norms, "apart": apart,
        "plain": plain, "copied": copied, "refused": refused, "by_expert": by_expert, "mixed": mixed,
    }  # fmt: skip
    with open(f"{meet.removeprefix('file://')}.{rank}", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), sys.argv[2])
