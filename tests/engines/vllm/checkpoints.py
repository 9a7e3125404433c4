"""Tiny models with random weights, as Hugging Face saves them; of each two, with other weights."""

import json
from pathlib import Path
from typing import Any

VOCAB = 320
_SMALL = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_DENSE = _SMALL | {"intermediate_size": 128, "num_hidden_layers": 2}
MODELS = ("llama", "qwen3", "qwen3moe", "nemotronh")


def config_of(name: str) -> Any:
    """The configuration of one of `MODELS`."""
    import transformers

    if name == "llama":
        return transformers.LlamaConfig(**_DENSE, tie_word_embeddings=False)
    if name == "qwen3":
        return transformers.Qwen3Config(**_DENSE, tie_word_embeddings=True)
    if name == "qwen3moe":
        return transformers.Qwen3MoeConfig(
            **_DENSE, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1,
            norm_topk_prob=True, tie_word_embeddings=False,
        )  # fmt: skip
    return transformers.NemotronHConfig(
        **_SMALL, hybrid_override_pattern="ME*-E", intermediate_size=128, ssm_state_size=32,
        mamba_num_heads=8, mamba_head_dim=16, n_groups=2, conv_kernel=4, expand=2, chunk_size=32,
        n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=96, moe_latent_size=32, num_experts_per_tok=2,
        routed_scaling_factor=2.5, n_group=1, topk_group=1, norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip


def save(name: str, seed: int, to: Path) -> Path:
    """Make a model and a tokenizer in folder `to`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.bfloat16)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "e_score_correction_bias" in key:
                tensor.uniform_(0, 0.1)
            elif key.endswith(("A_log", "dt_bias", "mixer.D")) or not key.endswith(
                ("weight", "bias", "_proj")
            ):
                continue
            elif tensor.ndim >= 2:
                tensor.normal_(0, 0.12)
            else:
                tensor.uniform_(0.5, 1.5)
    model.save_pretrained(to)
    _save_tokenizer(to)
    if name == "nemotronh":
        _as_nvidia_writes_it(to / "config.json")
    return to


def _save_tokenizer(to: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<extra_{n}>" for n in range(len(words), VOCAB)]
    made = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(to)


def _as_nvidia_writes_it(path: Path) -> None:
    """transformers 5 names the layers in words; the engines read the pattern of NVIDIA's own files."""
    config = json.loads(path.read_text())
    letters = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
    kinds = config.pop("layers_block_type")
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in kinds)
    config["num_hidden_layers"] = len(kinds)
    words = {"linear_attention": "mamba", "full_attention": "attention"}
    config["mtp_layers_block_type"] = [words.get(kind, kind) for kind in config["mtp_layers_block_type"]]
    config |= {"mamba_n_groups": config["n_groups"], "mamba_d_conv": config["conv_kernel"]}
    config |= {"mamba_expand": config["expand"], "time_step_limit": [0.0, 1e9]}
    path.write_text(json.dumps(config, indent=1))
