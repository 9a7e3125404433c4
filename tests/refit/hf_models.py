"""Tiny models of transformers, and the checkpoints that it writes of them."""

from pathlib import Path
from typing import Any

import torch

DENSE: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": DENSE,
    "Qwen3Moe": DENSE | EXPERTS,
    "Mixtral": DENSE | {"num_local_experts": 3},
    "GptOss": DENSE | {"num_local_experts": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "NemotronH": {
        "vocab_size": 24, "hidden_size": 16,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 10, "chunk_size": 8,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32,
        "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 6, "eos_token_id": None,
    },
}  # fmt: skip


def model_of(name: str, **changes: Any) -> Any:
    """In float32; every number is one of its own."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(
        **CONFIGS[name] | changes, architectures=[f"{name}ForCausalLM"],
        attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(-1, 1)
    return model


def saved(model: Any, root: Path, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """A checkpoint by transformers itself, parameters cast to `dtype`, buffers as they are; its tensors."""
    from copy import deepcopy

    from safetensors.torch import load_file

    copy = deepcopy(model)
    if dtype is not None:
        for parameter in copy.parameters():
            parameter.data = parameter.data.to(dtype)
    copy.save_pretrained(root)
    return load_file(root / "model.safetensors")
