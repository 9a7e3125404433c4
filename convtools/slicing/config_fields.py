"""Fields of configs that list something of layers: one entry a layer, numbers of layers, or keyed by them."""

from typing import Any

from convtools.slicing.rule import FEED_FORWARD, MIXER

INDEX_LISTS = {
    "cross_attention_layers": 0, "moe_layers": 0, "mlp_only_layers": 0, "full_attn_idxs": 0,
    "attn_layer_indices": 0, "hybrid_layer_ids": 0, "kda_layers": 1, "full_attn_layers": 1,
    "full_attention_layer_ids": 0, "fallback_layers": 0, "rope_scaling_layers": 0, "local_layer_ids": 0,
}  # fmt: skip
"""Fields that list layers by number, and the number of the first layer."""
INDEX_TEXTS = {"moe_layers_enum": 0}
"""The same as text: `3,4,5`."""
LAYER_KEYED = ("per_layer_config", "layer_overrides")
"""Objects with a layer's number as key."""

PER_LAYER_WORDS = {
    "layer_types": MIXER, "layers_block_type": MIXER, "mlp_layer_types": FEED_FORWARD,
    "moe_layer_freq": FEED_FORWARD, "no_rope_layers": MIXER, "attn_type_list": MIXER,
    "attention_layers": MIXER, "hybrid_layer_pattern": MIXER, "indexer_types": MIXER,
}  # fmt: skip
"""Fields with one entry a layer for what it is."""
PER_LAYER_VALUES = frozenset((
    "block_configs", "activation_sparsity_pattern", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "moe_topk", "num_shared_expert", "moe_intermediate_size",
    "swiglu_limits", "partial_rotary_factors", "rope_theta", "num_experts", "ffn_multipliers",
    "num_query_heads", "num_kv_heads", "compress_ratios", "attn_window_size",
))  # fmt: skip
"""Fields that may have one entry a layer, for a size or a setting of it."""

NOT_PER_LAYER = frozenset((
    "architectures", "eos_token_id", "bos_token_id", "pad_token_id", "suppress_tokens",
    "begin_suppress_tokens", "short_factor", "long_factor", "mrope_section",
    "keys_to_ignore_at_inference", "mtp_layers_block_type", "mtp_layer_types",
    "mtp_mlp_layer_types", "time_step_limit", "eos_token_ids", "num_nextn_layer_types",
    "attention_types", "im_start_token_id", "mup_multipliers", "ssm_multipliers", "mlp_multipliers",
    "block_types", "stop_token_ids",
))  # fmt: skip
"""Lists that are never one entry a layer, whatever their length."""
_WORDS = ("layer", "layers", "interval", "period", "every", "freq", "depth", "skipped")


def speaks_of_layers(key: str, value: Any) -> bool:
    """Whether an unknown field looks as if it counted layers."""
    return type(value) is int and any(word in key.lower().split("_") for word in _WORDS)
