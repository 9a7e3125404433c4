"""One table of tiny models: what each architecture's config.json says, and what of it may vary.

Tests that hold for every family take their models from here, so a new architecture is one entry
(and `test_every_family.py` fails while it has none). Sizes differ from one another, since equal
ones hide transposes, and tp 2, pp 2 and ep 2 divide them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import Any

from hypothesis import strategies as st

from convtools.families.registry import Model, find_family
from convtools.families.table import FP32
from convtools.families.wrapping import Wrapping
from tests.nemotron_checkpoints import Tensors
from tests.tensors import Content

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Draws sizes that a parallel layout divides."""

    draw: st.DrawFn
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    def free(self, most: int = 7) -> int:
        """Any size."""
        return self.draw(st.integers(1, most))

    def by(self, *sizes: int, most: int = 3) -> int:
        """A multiple of all of `sizes`."""
        return lcm(*sizes) * self.free(most)

    def pick(self, *values: Any) -> Any:
        """One of `values`."""
        return self.draw(st.sampled_from(values))

    def flag(self) -> bool:
        """True or false."""
        return self.draw(st.booleans())

    def layers(self) -> int:
        """Up to 12 of them: two digits, so that sorting by text would show."""
        return self.pp * self.draw(st.integers(1, self.pick(3, 12) // self.pp))

    def experts(self) -> int:
        """Up to 12, as above."""
        return self.ep * self.draw(st.integers(1, self.pick(4, 12) // self.ep))


@dataclass(frozen=True, slots=True)
class Tiny:
    """A tiny model of one architecture."""

    config: Config
    """config.json, without `architectures`; also what transformers' config class is given."""
    vary: Callable[[Sizes], Config]
    """Random changes to it, every choice that changes which tensors there are, or their shapes."""
    variants: tuple[Config, ...] = ({},)
    """Changes of `config`, each a model of its own for the tests with transformers."""
    spellings: tuple[Config, ...] = ({},)
    """Arguments of the family's `Spelling`: other names under which checkpoints are found."""
    native: bool = True
    """Whether transformers has a class of this name."""
    fp32: tuple[str, ...] = ()
    """How names end of tensors that transformers keeps in fp32 in a model of another dtype."""


GPT: Config = {
    "num_hidden_layers": 4, "hidden_size": 22, "vocab_size": 37, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 26, "max_position_embeddings": 64,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}  # fmt: skip
TIED: Config = {"tie_word_embeddings": True}


def heads(s: Sizes) -> Config:
    """Query groups that tp divides, or that divide tp; then a rank may begin inside of a head."""
    groups = s.pick(*{1, s.tp, 2 * s.tp})
    head_dim = s.free() if groups % s.tp == 0 else s.by(s.tp)
    return {
        "num_key_value_heads": groups,
        "num_attention_heads": s.by(groups, s.tp),
        "head_dim": head_dim,
    }


def gpt(s: Sizes) -> Config:
    """What every GPT varies in."""
    return heads(s) | {
        "num_hidden_layers": s.layers(), "hidden_size": s.free(9), "vocab_size": s.free(40),
        "intermediate_size": s.by(s.tp), "tie_word_embeddings": s.flag(),
    }  # fmt: skip


def vary(*flags: str, **sizes: Callable[[Sizes], int]) -> Callable[[Sizes], Config]:
    """A GPT's changes, with flags that are true or false, and further sizes."""
    return lambda s: (
        gpt(s) | {name: s.flag() for name in flags} | {name: size(s) for name, size in sizes.items()}
    )


def expert_ffn(s: Sizes) -> int:
    """The width of a routed expert."""
    return s.by(s.etp)


TIED_HEAD: tuple[Config, ...] = ({}, {"head": True})
"""A GPT's spellings; `head` is for tied models, and left out of others."""
EXPERTS: tuple[Config, ...] = (*TIED_HEAD, {"fused_experts": True})
MTP: tuple[Config, ...] = (
    {}, {"mtp_embedding": True, "mtp_head": True}, {"mtp_head": True, "fused_experts": True},
    {"mtp": False},
)  # fmt: skip
"""Spellings of models with MTP layers: what copies they carry, and whether they are there at all."""


def sparse(s: Sizes) -> Config:
    """What Qwen's MoE models vary in: which layers have experts."""
    layers = s.layers()
    return gpt(s) | {
        "num_hidden_layers": layers, "num_experts": s.experts(), "moe_intermediate_size": s.by(s.etp),
        "shared_expert_intermediate_size": s.by(s.tp), "decoder_sparse_step": s.pick(1, 1, 2),
        "mlp_only_layers": s.pick([], [0], [layers - 1]),
    }  # fmt: skip


def glm(s: Sizes) -> Config:
    """Dense layers first, biases and norms or not, shared experts and MTP."""
    layers = s.layers()
    return gpt(s) | {
        "num_hidden_layers": layers, "first_k_dense_replace": s.draw(st.integers(0, layers)),
        "hidden_size": s.by(s.tp), "attention_bias": s.flag(), "use_qk_norm": s.flag(),
        "n_routed_experts": s.experts(), "moe_intermediate_size": s.by(s.tp, s.etp, most=2),
        "n_shared_experts": s.pick(0, 1, 2), "num_nextn_predict_layers": s.pick(0, 0, 1, 2),
    }  # fmt: skip


def deepseek(s: Sizes) -> Config:
    """Dense layers first, with or without a narrow query, shared experts and MTP."""
    layers = s.layers()
    return {
        "num_hidden_layers": layers, "first_k_dense_replace": s.draw(st.integers(0, layers)),
        "hidden_size": s.by(s.tp), "vocab_size": s.free(40), "num_attention_heads": s.by(s.tp),
        "intermediate_size": s.by(s.tp), "q_lora_rank": s.pick(None, s.free()), "kv_lora_rank": s.free(),
        "qk_nope_head_dim": s.free(), "qk_rope_head_dim": s.free(), "v_head_dim": s.free(),
        "n_routed_experts": s.experts(), "moe_intermediate_size": s.by(s.tp, s.etp, most=2),
        "n_shared_experts": s.pick(0, 1, 2), "num_nextn_predict_layers": s.pick(0, 0, 1, 2),
    }  # fmt: skip


def nemotron(s: Sizes) -> Config:
    """Any pattern, any MTP."""
    layers, letters, groups = s.layers(), "ME*-", s.by(s.tp, most=2)
    depth = s.pick(0, 0, 1, 2)
    mtp = s.draw(st.text(letters, min_size=1, max_size=2))
    return heads(s) | {
        "hybrid_override_pattern": s.draw(st.text(letters, min_size=layers, max_size=layers)),
        "layers_block_type": None, "num_hidden_layers": layers, "hidden_size": s.by(s.tp),
        "vocab_size": s.free(40), "intermediate_size": s.by(s.tp), "mamba_num_heads": s.by(groups, most=2),
        "mamba_head_dim": s.free(4), "n_groups": groups, "ssm_state_size": s.free(5),
        "conv_kernel": s.free(4), "use_conv_bias": s.flag(),
        "n_routed_experts": s.experts(), "moe_intermediate_size": s.by(s.etp),
        "moe_shared_expert_intermediate_size": s.pick(0, s.by(s.tp)), "moe_latent_size": s.pick(None, 3),
        "num_nextn_predict_layers": depth, "mtp_hybrid_override_pattern": mtp if depth else None,
        "tie_word_embeddings": s.flag(),
    }  # fmt: skip


def mamba2(s: Sizes) -> Config:
    """Groups that tp divides; the mixer is as wide as the model, or twice as wide."""
    groups, expand = s.by(s.tp, most=2), s.pick(1, 2)
    heads, head_dim = s.by(groups, most=2), expand * s.free(3)
    return {
        "num_hidden_layers": s.layers(), "hidden_size": heads * head_dim // expand, "vocab_size": s.free(40),
        "num_heads": heads, "head_dim": head_dim, "expand": expand, "n_groups": groups,
        "state_size": s.free(5), "conv_kernel": s.free(4), "tie_word_embeddings": s.flag(),
    }  # fmt: skip


def qwen_next(s: Sizes) -> Config:
    """Any order of GDN and attention."""
    layers, keys = s.layers(), s.by(s.tp, most=2)
    kinds = st.lists(
        st.sampled_from(["linear_attention", "full_attention"]), min_size=layers, max_size=layers
    )
    return heads(s) | {
        "num_hidden_layers": layers, "layer_types": s.draw(kinds), "hidden_size": s.by(s.tp),
        "vocab_size": s.free(40), "intermediate_size": s.by(s.tp), "linear_num_key_heads": keys,
        "linear_num_value_heads": s.by(keys, most=2), "linear_key_head_dim": s.free(4),
        "linear_value_head_dim": s.free(4), "linear_conv_kernel_dim": s.free(4),
        "tie_word_embeddings": s.flag(),
    }  # fmt: skip


def qwen_next_moe(s: Sizes) -> Config:
    """Some layers dense, with or without a shared expert."""
    return qwen_next(s) | {
        "num_experts": s.experts(), "moe_intermediate_size": s.by(s.tp, s.etp, most=2),
        "shared_expert_intermediate_size": s.pick(0, s.by(s.tp)), "decoder_sparse_step": s.pick(1, 1, 2),
        "mlp_only_layers": s.pick([], [0]),
    }  # fmt: skip


QWEN_NEXT: Config = {
    "num_hidden_layers": 4, "hidden_size": 22, "vocab_size": 37, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 26, "max_position_embeddings": 64,
    "rope_theta": 1e4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
    "linear_value_head_dim": 5, "linear_conv_kernel_dim": 3, "tie_word_embeddings": False,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
QWEN_NEXT_MOE: Config = QWEN_NEXT | {
    "num_experts": 6, "moe_intermediate_size": 14, "shared_expert_intermediate_size": 18,
    "num_experts_per_tok": 2, "norm_topk_prob": True,
}  # fmt: skip

_BLOCKS = ["mamba", "moe", "attention", "mlp", "mamba", "moe"]

TINY: dict[str, Tiny] = {
    "DeepseekV2ForCausalLM": Tiny(
        {
            "model_type": "deepseek_v2", "num_hidden_layers": 4, "hidden_size": 24, "vocab_size": 37,
            "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 26,
            "max_position_embeddings": 64, "first_k_dense_replace": 1, "q_lora_rank": 9, "kv_lora_rank": 12,
            "rope_theta": 1e4,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 5, "n_routed_experts": 6,
            "moe_intermediate_size": 14, "n_shared_experts": 3, "n_group": 2, "topk_group": 1,
            "num_experts_per_tok": 2, "tie_word_embeddings": False,
        },
        deepseek,
        variants=({}, {"q_lora_rank": None}),
        spellings=({}, {"fused_experts": True}),
        fp32=("mlp.gate.weight",),
    ),
    "DeepseekV3ForCausalLM": Tiny(
        {
            "model_type": "deepseek_v3", "num_hidden_layers": 4, "hidden_size": 22, "vocab_size": 37,
            "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 26,
            "max_position_embeddings": 64, "first_k_dense_replace": 1, "q_lora_rank": 9, "kv_lora_rank": 13,
            "rope_theta": 1e4,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 5, "n_routed_experts": 6,
            "moe_intermediate_size": 14, "n_shared_experts": 3, "n_group": 2, "topk_group": 1,
            "num_experts_per_tok": 2, "num_nextn_predict_layers": 0,
        },
        deepseek,
        variants=({}, {"q_lora_rank": None, "num_nextn_predict_layers": 1}),  # of which it saves nothing
        spellings=MTP,
        fp32=("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
    ),
    "Glm4MoeForCausalLM": Tiny(
        GPT
        | {
            "model_type": "glm4_moe", "first_k_dense_replace": 1, "n_routed_experts": 6,
            "n_shared_experts": 3, "moe_intermediate_size": 14, "num_experts_per_tok": 2,
            "attention_bias": True, "use_qk_norm": True, "num_nextn_predict_layers": 0,
        },
        glm,
        variants=({}, TIED | {"attention_bias": False, "use_qk_norm": False}),
        spellings=MTP,
        fp32=("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
    ),
    "GptOssForCausalLM": Tiny(
        GPT | {"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2},
        vary(num_local_experts=Sizes.experts, intermediate_size=expert_ffn),
        ({}, TIED),
        TIED_HEAD,
    ),
    "LlamaForCausalLM": Tiny(
        GPT | {"model_type": "llama", "hidden_size": 18},  # heads must divide it
        lambda s: gpt(s) | dict.fromkeys(("attention_bias", "mlp_bias"), s.flag()),  # Megatron: all or none
        variants=({"attention_bias": True, "mlp_bias": True}, TIED),
        spellings=TIED_HEAD,
    ),
    "Mamba2ForCausalLM": Tiny(
        {
            "model_type": "mamba2", "num_hidden_layers": 4, "hidden_size": 22, "vocab_size": 37,
            "num_heads": 4, "head_dim": 11, "expand": 2, "n_groups": 2, "state_size": 7, "conv_kernel": 3,
            "tie_word_embeddings": False,
        },
        mamba2,
        variants=({}, TIED),
        spellings=({}, {"head": True}),
    ),
    "MistralForCausalLM": Tiny(GPT | {"model_type": "mistral"}, vary(), ({}, TIED), TIED_HEAD),
    "MixtralForCausalLM": Tiny(
        GPT | {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2},
        vary(num_local_experts=Sizes.experts, intermediate_size=expert_ffn),
        ({}, TIED),
        EXPERTS,
    ),
    "NemotronHForCausalLM": Tiny(
        {
            "model_type": "nemotron_h", "layers_block_type": _BLOCKS, "hidden_size": 22, "vocab_size": 37,
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 26,
            "mamba_num_heads": 4, "mamba_head_dim": 5, "n_groups": 2, "ssm_state_size": 7, "conv_kernel": 3,
            "n_routed_experts": 6, "moe_intermediate_size": 14, "moe_shared_expert_intermediate_size": 18,
            "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "max_position_embeddings": 64,
            "rope_theta": 1e4,
            "tie_word_embeddings": False,
        },
        nemotron,
        variants=({}, {"moe_latent_size": 15}),
        spellings=({}, {"prefix": "model."}, {"stacked_experts": True}, {"head": True}),
        fp32=("mixer.gate.weight", "mixer.gate.e_score_correction_bias"),
    ),
    "Qwen2ForCausalLM": Tiny(GPT | {"model_type": "qwen2"}, vary(), ({}, TIED), TIED_HEAD),
    "Qwen2MoeForCausalLM": Tiny(
        GPT
        | {
            "model_type": "qwen2_moe", "num_experts": 6, "moe_intermediate_size": 14,
            "shared_expert_intermediate_size": 18, "num_experts_per_tok": 2,
        },
        sparse,
        ({}, TIED | {"mlp_only_layers": [2]}),
        EXPERTS,
    ),
    "Qwen3ForCausalLM": Tiny(
        GPT | {"model_type": "qwen3"},
        vary(),
        ({}, TIED),
        TIED_HEAD,
    ),
    "Qwen3MoeForCausalLM": Tiny(
        GPT
        | {
            "model_type": "qwen3_moe", "num_experts": 6, "moe_intermediate_size": 14,
            "num_experts_per_tok": 2,
        },
        sparse,
        ({}, TIED | {"decoder_sparse_step": 2}),
        EXPERTS,
    ),
    "Qwen3NextForCausalLM": Tiny(
        QWEN_NEXT_MOE | {"model_type": "qwen3_next"},
        qwen_next_moe,
        ({}, {"mlp_only_layers": [1, 3]}),
        ({}, {"mtp": True}, {"fused_experts": True}, {"head": True}),
    ),
    "Qwen3_5ForCausalLM": Tiny(
        QWEN_NEXT | {"model_type": "qwen3_5_text"},
        qwen_next,
        ({}, TIED),
        ({}, {"mtp": True}, {"head": True}),
    ),
    "Qwen3_5MoeForCausalLM": Tiny(
        QWEN_NEXT_MOE | {"model_type": "qwen3_5_moe_text"},
        qwen_next_moe,
        ({}, TIED),
        ({}, {"fused_experts": True, "mtp": True}, {"mtp": True, "fused_mtp_experts": True}, {"head": True}),
    ),
}  # fmt: skip


def described(architecture: str, changes: Config, spelling: Config, prefix: str = "") -> Model:
    """The model of a config with changes, in a larger one where there is a prefix.

    What a spelling says of a tied head is dropped where it is not tied.
    """
    config = {"architectures": [architecture]} | TINY[architecture].config | changes
    family = find_family(config)
    spec = family.parse(config)
    known = {k: v for k, v in spelling.items() if not (k == "head" and not spec.tied)}
    spelled = family.Spelling(**known)  # type: ignore[attr-defined]
    return Model(family, config, spec, spelled, Wrapping(prefix))


def near_one(model: Model, content: Content) -> Content:
    """The same, with numbers from 0.5 to 2 in norms that one side centres: 1 comes off and on exactly."""
    import numpy as np

    table, out = model.table(model.spec.vocab), dict(content)
    for name in {p.b for p in table.mapping.pieces if table.params[p.a].shift}:
        dtype, shape, data = content[name]
        halves = np.frombuffer(data, "<u2").copy()
        step = {"BF16": 1, "F32": 2}[dtype]
        halves[step - 1 :: step] = 0x3F00 | halves[step - 1 :: step] & 0xFF
        out[name] = (dtype, shape, halves.tobytes())
    return out


def inventory(model: Model, dtype: str = "BF16") -> Tensors:
    """Every Hugging Face tensor, in order, copies last; names and shapes are compared with transformers'."""
    table = model.table(model.spec.vocab)
    kinds = {piece.b: table.params[piece.a].precision for piece in table.mapping.pieces}
    out: Tensors = {name: ("F32" if kinds[name] == FP32 else dtype, s) for name, s in table.hf.items()}
    return out | {copy.name: out[copy.of] for copy in model.copies()}
