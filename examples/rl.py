"""A policy gradient on the CPU: two FSDP2 ranks train a tiny hybrid model, an engine beside them generates.

    python examples/rl.py [--steps 8]          # starts its own ranks
    torchrun --nproc-per-node 2 examples/rl.py

The model has Mamba-2, latent MoE, attention and multi-token prediction. It is rewarded for tokens below
`GOOD`. Each step: the engine generates, the ranks take one step of REINFORCE with a baseline, `WeightSync`
pushes the new weights, and `verify` compares every tensor of the trainer with what the engine serves. The
trainer's own weights are float32; it computes with them, and pushes them, rounded to bfloat16.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from convtools.refit.sinks.base import Sink
    from convtools.refit.sync import WeightSync
    from convtools.training.engine import Engine

VOCAB, GOOD = 32, 8
PROMPT, ANSWER, ROLLOUTS = 4, 16, 16
"""Tokens of a prompt, of an answer, and answers a rank and step."""
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64,
    "layers_block_type": ["linear_attention", "moe", "full_attention"],
    "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_latent_size": 32, "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 40, "intermediate_size": 64,
    "num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention", "moe"], "eos_token_id": None,
}  # fmt: skip


def main() -> int:
    """Run as a rank where torchrun started us, else start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2, help="not under torchrun")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(namespace=argparse.Namespace(scratch=None))
    if "RANK" in os.environ:
        run_rank(int(os.environ["RANK"]), args, int(os.environ["WORLD_SIZE"]), "env://")
        return 0
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as where:  # of the one process that outlives what is killed
        args.scratch = tempfile.tempdir = os.environ["TMPDIR"] = where  # the engine's folder lies there too
        mp.spawn(run_rank, (args, args.ranks, f"file://{where}/meet"), nprocs=args.ranks)
    return 0


def run_rank(rank: int, args: argparse.Namespace, world: int, meet: str) -> None:
    """One rank, from the making of its group to the end of it."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    parent = os.getppid()
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    try:
        train(rank, world, args)
    finally:
        dist.destroy_process_group()
        if args.scratch and rank == 0 and os.getppid() != parent:  # it was killed: nobody else tidies up
            shutil.rmtree(args.scratch, ignore_errors=True)


def train(rank: int, world: int, args: argparse.Namespace) -> None:
    """Model, engine and sync, then step after step."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from transformers import NemotronHConfig, logging

    from convtools.training.checkpoint_names import checkpoint_shapes, checkpoint_tensors
    from convtools.training.engine import Engine
    from convtools.training.hybrid import Hybrid, shard

    logging.set_verbosity_error()  # it would say at length that there is no GPU
    torch.manual_seed(args.seed)  # every rank makes the same model, and keeps its part of it
    config = NemotronHConfig(**CONFIG, architectures=["NemotronHForCausalLM"], dtype="bfloat16",
                             attn_implementation="eager", experts_implementation="eager")  # fmt: skip
    model = Hybrid(config)
    shapes = checkpoint_shapes(config.to_dict())

    def served() -> dict[str, Any]:
        """What the engine is to serve: parameters rounded to bf16, buffers (the router's bias) as they are.

        `state_dict` gives the shards, also where FSDP2 has gathered parameters for a forward pass.
        """
        masters = {name for name, _ in model.named_parameters()}
        state = model.state_dict()
        cast = {n: t.detach().to(torch.bfloat16) if n in masters else t for n, t in state.items()}
        return checkpoint_tensors(cast, shapes)

    with engine_on(lambda root: save(root, config, served()), rank, args.scratch) as (url, sinks):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, init_device_mesh("cpu", (world,)), mp_policy=policy)
        engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0),
                        max_grad_norm=1.0)  # fmt: skip
        loop(engine, served, url, sinks, rank, args)


def loop(
    engine: "Engine", served: "Callable[[], dict[str, Any]]", url: str, sinks: "list[Sink]", rank: int,
    args: argparse.Namespace,
) -> None:  # fmt: skip
    """Generate, learn, push, verify."""
    from convtools.refit.ranks.source import RankedSource
    from convtools.refit.sync import WeightSync
    from convtools.training.hybrid import mtp_loss
    from convtools.training.reinforce import reinforce_loss, token_logprobs

    say = print if rank == 0 else (lambda *_, **__: None)
    with WeightSync(RankedSource(served), sinks, bucket_bytes=1 << 20) as sync:
        # Before anything was pushed: the names and views of the trainer's shards are those of the checkpoint.
        equal = held(sync, "the engine does not hold the checkpoint that the trainer began with")
        say(f"{equal} tensors, {sync.plan.nbytes:,} bytes: the engine's checkpoint is what the trainer holds")
        checked = sync.check()  # the engine serves these weights, as version 0, and goes on to
        if not checked.ok:
            raise SystemExit(f"the self-test found: {checked}")
        say(f"self-test: {len(checked.canaries)} canaries showed where they should, and nowhere else\n")
        say("step  reward  mtp loss  grad norm  logprobs apart  version served    GB/s  engine = trainer")
        for step in range(1, args.steps + 1):
            tokens, sampled = rollouts(url, step, rank, args.seed)
            rewards = (tokens[:, PROMPT:] < GOOD).float().mean(1)
            mean, std = over_ranks(rewards)

            said = engine(tokens=tokens)
            logprobs = token_logprobs(said.logits, tokens, PROMPT)
            ahead = mtp_loss(said.mtp_logits, tokens)
            engine.backward(reinforce_loss(logprobs, (rewards - mean) / (std + 1e-6)) + ahead)
            took = engine.step()
            engine.zero_grad()

            pushed = sync.push(version=step)
            equal = held(sync, f"the engine does not hold the weights of step {step}")
            apart = float((logprobs.detach() - sampled).abs().max())
            say(
                f"{step:4}  {mean:6.3f}  {ahead.item():8.3f}  {took.grad_norm:9.3f}  {apart:14.4f}  "
                f"{pushed.sinks[0].version:14}  {pushed.gigabytes_per_second:6.3f}  all {equal} tensors",
                flush=True,
            )


def rollouts(url: str, step: int, rank: int, seed: int) -> "tuple[Tensor, Tensor]":
    """Prompts and what the engine made of them [ROLLOUTS, PROMPT + ANSWER], its logprobs [ROLLOUTS, ANSWER].

    All of it must be of the weights of the step before.
    """
    import torch

    draws = torch.Generator().manual_seed(1000 * (1000 * seed + step) + rank)
    prompts = torch.randint(VOCAB, (ROLLOUTS, PROMPT), generator=draws)
    asked = {
        "input_ids": prompts.tolist(), "max_new_tokens": ANSWER, "temperature": 1.0,
        "seed": draws.initial_seed(),
    }  # fmt: skip
    with urllib.request.urlopen(f"{url}/generate", json.dumps(asked).encode(), timeout=120) as answer:
        said = json.load(answer)
    versions = {version for row in said["versions"] for version in row}
    if versions != {step - 1}:
        raise SystemExit(f"step {step}: the engine generated with versions {sorted(versions)}")
    return torch.cat([prompts, torch.tensor(said["ids"])], dim=1), torch.tensor(said["logprobs"])


def over_ranks(values: "Tensor") -> tuple[float, float]:
    """Mean and standard deviation over all ranks' values: the baseline, and the unit of an advantage."""
    import torch
    import torch.distributed as dist

    sums = torch.stack([torch.ones_like(values), values, values**2]).double().sum(1)
    dist.all_reduce(sums)
    mean = sums[1] / sums[0]
    return float(mean), float((sums[2] / sums[0] - mean**2).clamp(min=0).sqrt())


def held(sync: "WeightSync", otherwise: str) -> int:
    """How many tensors engine and trainer hold alike: all of them, or the end."""
    report = sync.verify()
    if not report.equal:
        raise SystemExit(f"{otherwise}: {report}")
    return report.tensors


def save(root: Path, config: Any, tensors: dict[str, Any]) -> None:
    """A checkpoint's folder, which convtools must be able to account for to the last tensor."""
    from safetensors.torch import save_file

    import convtools

    config.save_pretrained(root)
    save_file({n: t.contiguous() for n, t in tensors.items()}, root / "model.safetensors", {"format": "pt"})
    convtools.open_source(root)


@contextmanager
def engine_on(
    write: "Callable[[Path], None]", rank: int, scratch: str | None
) -> "Iterator[tuple[str, list[Sink]]]":
    """Rank 0 writes a checkpoint and runs an engine on it; every rank gets its URL, rank 0 its sinks."""
    import torch
    import torch.distributed as dist

    from convtools.engine.process import started
    from convtools.refit.sinks.url import connect

    text = torch.zeros(256, dtype=torch.uint8)
    if rank:
        dist.broadcast(text, 0)
        yield bytes(text.tolist()).rstrip(b"\0").decode(), []
        dist.barrier()
        return
    with tempfile.TemporaryDirectory(dir=scratch) as where:
        write(Path(where))
        with started(where) as engine:
            text[: len(engine.url)] = torch.tensor(list(engine.url.encode()), dtype=torch.uint8)
            dist.broadcast(text, 0)
            yield engine.url, connect(engine.url)
            dist.barrier()


if __name__ == "__main__":
    sys.exit(main())
