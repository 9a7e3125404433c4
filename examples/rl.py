"""A policy gradient on the CPU: two FSDP2 ranks train a tiny hybrid model, an engine beside them generates.

    python examples/rl.py [--steps 8]          # starts its own ranks
    torchrun --nproc-per-node 2 examples/rl.py

The model has Mamba-2, latent MoE, attention and multi-token prediction. It is rewarded for tokens below
`GOOD`. Each step: the engine generates, the ranks take one step of REINFORCE with a baseline, `WeightSync`
pushes the new weights, and `verify` compares every tensor of the trainer with what the engine serves.
"""

import argparse
import json
import os
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VOCAB, GOOD = 32, 8
PROMPT, ANSWER, ROLLOUTS = 4, 16, 16
"""Tokens of a prompt, of an answer, and answers a rank and step."""
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "layers_block_type": ["linear_attention", "moe", "full_attention"],
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
    args = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(int(os.environ["RANK"]), args, int(os.environ["WORLD_SIZE"]), "env://")
        return 0
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as where:
        mp.spawn(run_rank, (args, args.ranks, f"file://{where}/meet"), nprocs=args.ranks)
    return 0


def run_rank(rank: int, args: argparse.Namespace, world: int, meet: str) -> None:
    """One rank, from the making of its group to the end of it."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    try:
        train(rank, world, args)
    finally:
        dist.destroy_process_group()


def train(rank: int, world: int, args: argparse.Namespace) -> None:
    """Model, engine and sync, then step after step."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from transformers import NemotronHConfig

    from convtools.training.checkpoint_names import checkpoint_shapes, checkpoint_tensors
    from convtools.training.engine import Engine
    from convtools.training.hybrid import Hybrid, shard

    torch.manual_seed(args.seed)  # every rank makes the same model, and keeps its part of it
    config = NemotronHConfig(**CONFIG, architectures=["NemotronHForCausalLM"], dtype="bfloat16",
                             attn_implementation="eager", experts_implementation="eager")  # fmt: skip
    model = Hybrid(config)
    shapes = checkpoint_shapes(config.to_dict())

    def served() -> dict[str, Any]:
        """What the engine serves: the fp32 masters, rounded to bf16; buffers (the router's bias) as they are."""
        masters = {name for name, _ in model.named_parameters()}
        state = model.state_dict()
        cast = {n: t.detach().to(torch.bfloat16) if n in masters else t for n, t in state.items()}
        return checkpoint_tensors(cast, shapes)

    with engine_on(lambda root: save(root, config, served()), rank) as (url, sinks):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, init_device_mesh("cpu", (world,)), mp_policy=policy)
        engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0),
                        max_grad_norm=1.0)  # fmt: skip
        loop(engine, served, url, sinks, rank, args)
