"""Tiny random checkpoints that SGLang serves: twice the same model with other weights."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    NemotronHConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)  # fmt: skip

VOCAB = 320
_COMMON = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 128, "max_position_embeddings": 512, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def config_of(kind: str) -> PretrainedConfig:
    """As transformers spells it."""
    match kind:
        case "llama":
            return LlamaConfig(num_hidden_layers=2, **_COMMON)
        case "qwen3moe":
            return Qwen3MoeConfig(
                num_hidden_layers=2, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2,
                decoder_sparse_step=1, norm_topk_prob=True, **_COMMON,
            )  # fmt: skip
        case "nemotron":
            return NemotronHConfig(
                hybrid_override_pattern="ME*E", ssm_state_size=32, mamba_num_heads=8, mamba_head_dim=16,
                n_groups=2, conv_kernel=4, expand=2, chunk_size=32, n_routed_experts=8, n_shared_experts=1,
                moe_intermediate_size=64, moe_shared_expert_intermediate_size=96, moe_latent_size=32,
                num_experts_per_tok=2, routed_scaling_factor=2.5, n_group=1, topk_group=1,
                norm_topk_prob=True, **_COMMON,
            )  # fmt: skip
    raise AssertionError(kind)


def make(root: Path, kind: str, seed: int) -> Path:
    """A checkpoint of `kind`; another seed is another set of weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(0.1, 2.0)
            elif name.endswith(("dt_bias", ".D")):
                parameter.uniform_(0.2, 1.0)
            elif parameter.ndim >= 2:
                parameter.normal_(0, 0.12)
            else:
                parameter.uniform_(0.5, 1.5)
            parameter.copy_(parameter.bfloat16())  # the router is kept in F32 here, and not by SGLang
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.uniform_(0, 0.1)
    to = root / f"{kind}-{seed}"
    model.save_pretrained(to)
    _tokenizer().save_pretrained(to)
    if kind == "nemotron":
        _as_nvidia_writes_it(to / "config.json")
    return to


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<extra_{i}>" for i in range(len(words), VOCAB)]
    made = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def _as_nvidia_writes_it(path: Path) -> None:
    """The names that SGLang reads: it refuses the layer types of transformers 5, and guesses n_groups."""
    config = json.loads(path.read_text())
    letters = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
    old = {"linear_attention": "mamba", "moe": "moe", "full_attention": "attention", "mlp": "mlp"}
    layers = config.pop("layers_block_type")
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in layers)
    config["num_hidden_layers"] = len(layers)
    config["mtp_layers_block_type"] = [old[kind] for kind in config["mtp_layers_block_type"]]
    config["mamba_n_groups"], config["mamba_d_conv"] = config["n_groups"], config["conv_kernel"]
    config["mamba_expand"], config["time_step_limit"] = config["expand"], [0.0, 1e9]
    path.write_text(json.dumps(config))
