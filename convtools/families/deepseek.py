"""DeepSeek-V3, R1, Kimi-K2: MLA, dense layers first, then MoE with shared experts, MTP past the last layer.

Hugging Face stores MTP depth i as layer `num_hidden_layers + i`, with copies of embedding and head.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from convtools.families.blocks.embedding import embedding, head
from convtools.families.blocks.mla import mla
from convtools.families.blocks.mlp import gated_mlp
from convtools.families.blocks.moe import gated_experts, router
from convtools.families.config import Config, Fields
from convtools.families.gpt import rope_theta
from convtools.families.table import LAST, Block, Copy, Row, copied, norm, placed, rows as row_cut

NAME = "deepseek"
PROOF = {
    "DeepseekV3ForCausalLM": "files of real Megatron and Megatron-Bridge",
}
"""What its tables were checked against, by architecture."""
ARCHITECTURES = tuple(PROOF)


@dataclass(frozen=True, slots=True)
class Spec:
    """What the config says."""

    num_layers: int
    dense_layers: int
    hidden: int
    vocab: int
    tied: bool
    heads: int
    q_rank: int
    kv_rank: int
    qk_nope: int
    qk_rope: int
    v_head_dim: int
    ffn: int
    experts: int
    expert_ffn: int
    shared_ffn: int
    mtp_depth: int

    @property
    def text(self) -> str:
        """Attention `*`, then a dense `-` or expert `E` feed-forward, a layer; one part an MTP depth."""
        return "/".join(
            [
                "*-" * self.dense_layers + "*E" * (self.num_layers - self.dense_layers),
                *["*E"] * self.mtp_depth,
            ]
        )


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a checkpoint names what the config leaves open."""

    prefix: str = "model."
    mtp_copies: bool = False
    """MTP layers that carry `embed_tokens` and `shared_head.head`, copies of the model's own."""

    def __post_init__(self) -> None:
        if self.prefix != "model." or type(self.mtp_copies) is not bool:
            raise ValueError(f"no names of this family begin with {self.prefix!r}")


def parse(config: Config) -> Spec:
    """config.json -> Spec. Raises ConfigError."""
    f = Fields(config)
    if f.flag("attention_bias", default=False):
        f.refuse("`attention_bias` is true: Megatron's latent attention has no such bias")
    if f.size("moe_layer_freq", default=1) != 1:
        f.refuse("`moe_layer_freq` is not 1: no published model has that")
    layers = f.size("num_hidden_layers", most=10_000)
    expert_ffn = f.size("moe_intermediate_size")
    spec = Spec(
        num_layers=layers,
        dense_layers=min(layers, f.size("first_k_dense_replace", least=0)),
        hidden=f.size("hidden_size"),
        vocab=f.size("vocab_size"),
        tied=f.flag("tie_word_embeddings", default=False),
        heads=f.size("num_attention_heads"),
        q_rank=f.size("q_lora_rank", default=0, least=0),
        kv_rank=f.size("kv_lora_rank"),
        qk_nope=f.size("qk_nope_head_dim"),
        qk_rope=f.size("qk_rope_head_dim"),
        v_head_dim=f.size("v_head_dim"),
        ffn=f.size("intermediate_size"),
        experts=f.size("n_routed_experts", "num_local_experts", most=65_536),
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn * f.size("n_shared_experts", default=0, least=0, most=1_000),
        mtp_depth=f.size("num_nextn_predict_layers", default=0, least=0, most=64),
    )
    if spec.tied:
        f.refuse("`tie_word_embeddings` is true: no published model has that")
    f.done()
    return spec


def spelling(spec: Spec, hf_names: Iterable[str]) -> Spelling:
    """How these names are spelled."""
    return Spelling(mtp_copies=f"model.layers.{spec.num_layers}.embed_tokens.weight" in set(hf_names))


def mcore_spelling(spec: Spec, mcore_names: Iterable[str]) -> Spelling:
    """The published spelling, without the copies that Megatron does not hold."""
    return Spelling()


def rows(spec: Spec, spelling: Spelling, padded_vocab: int) -> Iterator[Row]:
    """The whole model, a row a Megatron parameter."""
    top, h = spelling.prefix, spec.hidden
    vocab, padded = spec.vocab, padded_vocab
    yield embedding(f"{top}embed_tokens.weight", vocab=vocab, padded=padded, hidden=h)
    dense, moe = _layer(spec, moe=False), _layer(spec, moe=True)
    for i in range(spec.num_layers):
        for module, block in dense if i < spec.dense_layers else moe:
            yield from placed(block, f"decoder.layers.{i}.", f"{top}layers.{i}.{module}", i)
    yield from placed([norm("decoder.final_layernorm.weight", f"{top}norm.weight", h)], "", "", LAST)
    yield head("lm_head.weight", vocab=vocab, padded=padded, hidden=h)
    for o in range(spec.mtp_depth):
        mcore, hf = f"mtp.layers.{o}.", f"{top}layers.{spec.num_layers + o}."
        entry = [
            norm("enorm.weight", "enorm.weight", h),
            norm("hnorm.weight", "hnorm.weight", h),
            copied("eh_proj.weight", "eh_proj.weight", (h, 2 * h), row_cut(("hidden_size", h)), te=True),
            norm("final_layernorm.weight", "shared_head.norm.weight", h),
        ]
        yield from placed(entry, mcore, hf, LAST)
        for module, block in moe:
            yield from placed(block, f"{mcore}transformer_layer.", f"{hf}{module}", LAST)


def copies(spec: Spec, spelling: Spelling) -> tuple[Copy, ...]:
    """Hugging Face tensors that repeat another."""
    if not spelling.mtp_copies:
        return ()
    at = [f"{spelling.prefix}layers.{spec.num_layers + o}." for o in range(spec.mtp_depth)]
    why = "an MTP layer's copy"
    return tuple(
        copy
        for layer in at
        for copy in (
            Copy(f"{layer}embed_tokens.weight", f"{spelling.prefix}embed_tokens.weight", why),
            Copy(f"{layer}shared_head.head.weight", "lm_head.weight", why),
        )
    )


def _layer(spec: Spec, *, moe: bool) -> list[tuple[str, Block]]:
    """(Hugging Face module, its block) of one layer."""
    h = spec.hidden
    attn = mla(
        heads=spec.heads, hidden=h, q_rank=spec.q_rank, kv_rank=spec.kv_rank,
        qk_nope=spec.qk_nope, qk_rope=spec.qk_rope, v_head_dim=spec.v_head_dim,
    )  # fmt: skip
    norms = [norm("input_layernorm.weight", "input_layernorm.weight", h)]
    if not moe:
        fc1_norm = norm(
            "mlp.linear_fc1.layer_norm_weight",
            "post_attention_layernorm.weight",
            h,
            "pre_mlp_layernorm.weight",
        )
        return [("", [*norms, fc1_norm]), ("self_attn.", attn), ("mlp.", gated_mlp(hidden=h, ffn=spec.ffn))]
    norms += [norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", h)]
    experts = router(experts=spec.experts, hidden=h)
    experts += gated_experts(experts=spec.experts, width=h, ffn=spec.expert_ffn)
    parts = [("", norms), ("self_attn.", attn), ("mlp.", experts)]
    if spec.shared_ffn:
        shared = gated_mlp(
            hidden=h, ffn=spec.shared_ffn, mcore="mlp.shared_experts", label="shared experts' width"
        )
        parts.append(("mlp.shared_experts.", shared))
    return parts


def megatron_args(config: Config, spec: Spec, spelling: Spelling) -> dict[str, Any]:
    """The part of Megatron's `args` that config.json decides."""
    sparse = spec.num_layers - spec.dense_layers
    return {
        "num_layers": spec.num_layers, "hidden_size": spec.hidden, "ffn_hidden_size": spec.ffn,
        "num_attention_heads": spec.heads, "vocab_size": spec.vocab, "multi_latent_attention": True,
        "q_lora_rank": spec.q_rank or None, "kv_lora_rank": spec.kv_rank, "qk_head_dim": spec.qk_nope,
        "qk_pos_emb_head_dim": spec.qk_rope, "v_head_dim": spec.v_head_dim, "kv_channels": spec.v_head_dim,
        "qk_layernorm": True, "swiglu": True, "normalization": "RMSNorm",
        "norm_epsilon": config.get("rms_norm_eps"), "layernorm_epsilon": config.get("rms_norm_eps"),
        "position_embedding_type": "rope", "rotary_base": rope_theta(config),
        "max_position_embeddings": config.get("max_position_embeddings"),
        "seq_length": config.get("max_position_embeddings"),
        "num_experts": spec.experts, "moe_ffn_hidden_size": spec.expert_ffn,
        "moe_layer_freq": [0] * spec.dense_layers + [1] * sparse,
        "moe_shared_expert_intermediate_size": spec.shared_ffn or None,
        "moe_router_topk": config.get("num_experts_per_tok"), "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_num_groups": config.get("n_group"),
        "moe_router_group_topk": config.get("topk_group"),
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor"),
        "mtp_num_layers": spec.mtp_depth or None, "untie_embeddings_and_output_weights": True,
        "add_bias_linear": False, "add_qkv_bias": False, "is_hybrid_model": False, "moe_grouped_gemm": True,
        "transformer_impl": "transformer_engine",
    }  # fmt: skip


def hf_config(args: Config, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], list[str]]:
    """Not derived: args do not hold all of the YaRN rope and of the routing that config.json spells out."""
    return {}, ["rope_scaling and routing"] if args.get("multi_latent_attention") else [
        "another architecture"
    ]
