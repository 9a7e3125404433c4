"""A tiny Nemotron-H with a multi-token head: config and model."""

from typing import Any

CONFIG: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 32,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 10, "chunk_size": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_latent_size": 16, "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28, "intermediate_size": 36,
    "num_nextn_predict_layers": 2, "mtp_layers_block_type": ["full_attention", "moe"], "eos_token_id": None,
}  # fmt: skip


def hybrid(seed: int = 0, **changes: Any) -> Any:
    import torch
    from transformers import NemotronHConfig, logging

    from convtools.training.hybrid import Hybrid

    logging.set_verbosity_error()
    torch.manual_seed(seed)
    return Hybrid(
        NemotronHConfig(
            **CONFIG | changes, architectures=["NemotronHForCausalLM"], attn_implementation="eager",
            experts_implementation="eager",
        )
    )  # fmt: skip
