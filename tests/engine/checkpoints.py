"""Tiny random checkpoints that transformers makes, and the same with other numbers."""

from pathlib import Path
from typing import Any

from tests.families.tiny_configs import TINY, Config

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
FIXTURE = Path(__file__).parents[2] / "fixtures/oracle/nemotron_mtp/hf"
"""Nemotron-H with latent experts and MTP, as real Megatron wrote it."""
LONG: Config = {"max_position_embeddings": 4096}


def make(root: Path, architecture: str, seed: int, changes: Config | None = None) -> Path:
    """A model of bf16 whose every tensor is random, large enough for tokens to differ."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**TINY[architecture].config | (changes or {}))
    model = getattr(transformers, architecture)._from_config(config, dtype=torch.bfloat16, **EAGER)
    draw = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.ndim > 1:
            tensor.copy_(torch.empty(tensor.shape).normal_(0, 0.3, generator=draw))
        elif not name.endswith(("A_log", "dt_bias", ".D")):
            tensor.copy_(torch.empty(tensor.shape).uniform_(0.5, 1.5, generator=draw))
    model.save_pretrained(root)
    return root


def tensors(root: Path) -> dict[str, Any]:
    """Its tensors by name."""
    from safetensors.torch import load_file

    return load_file(root / "model.safetensors")


def rewrite(src: Path, dst: Path, named: dict[str, Any]) -> Path:
    """The checkpoint `src` with other tensors."""
    from safetensors.torch import save_file

    dst.mkdir()
    (dst / "config.json").write_bytes((src / "config.json").read_bytes())
    save_file(named, dst / "model.safetensors")
    return dst


def altered(src: Path, dst: Path, seed: int = 7) -> Path:
    """The checkpoint `src`, every tensor with other numbers."""
    import torch

    draw, named = torch.Generator().manual_seed(seed), tensors(src)
    for tensor in named.values():
        tensor += torch.empty(tensor.shape).normal_(0, 0.1, generator=draw).to(tensor.dtype)
    return rewrite(src, dst, named)
