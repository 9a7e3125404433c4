"""What a config says of its layers by rule instead of by list: thresholds, periods, lists of numbers.

A slice keeps what its layers were: where a rule cannot say that any more, the slice is refused.
"""

from collections.abc import Iterable, Sequence

from convtools.slicing.rule import (
    FEED_FORWARD,
    MIXER,
    Rule,
    Text,
    attention,
    listed,
    number,
    periodic,
    positive,
    threshold,
)

_EVERY_SECOND: Text = {"sliding_window_pattern": 2, "sliding_window": 4096}
_DEFAULTS: dict[str, Text] = {
    "afmoe": {"global_attn_every_n_layers": 4},
    "cohere2": {"sliding_window_pattern": 4, "sliding_window": 4096},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
    "gemma2": _EVERY_SECOND,
    "gemma3_text": {"sliding_window_pattern": 6, "sliding_window": 4096},
    "gemma3n_text": {"sliding_window_pattern": 5, "sliding_window": 512},
    "gpt_oss": _EVERY_SECOND,
    "llama4_text": {"no_rope_layer_interval": 4, "interleave_moe_layer_step": 1},
    "olmo3": {"sliding_window_pattern": 4, "sliding_window": 4096},
    "qwen3_next": {"full_attention_interval": 4},
    "qwen3_5_text": {"full_attention_interval": 4},
    "qwen3_5_moe_text": {"full_attention_interval": 4},
    "recurrent_gemma": {"block_types": ["recurrent", "recurrent", "attention"]},
    "smollm3": {"no_rope_layer_interval": 4},
}
"""`model_type` -> what its code takes for granted where a published config does not say it."""


def with_defaults(text: Text) -> Text:
    """A config, with what its model's code takes for granted."""
    said = {key: value for key, value in text.items() if value is not None}
    return _DEFAULTS.get(str(text.get("model_type")), {}) | said


def _deepseek_moe(text: Text, i: int) -> str:
    every = text["moe_layer_freq"] if positive(text, "moe_layer_freq") else 1
    return "MoE" if i >= text["first_k_dense_replace"] and i % every == 0 else "dense"


def _deepseek_express(text: Text, wanted: Sequence[str]) -> Text | None:
    first = list(wanted).index("MoE") if "MoE" in wanted else len(wanted)
    found: Text = {"first_k_dense_replace": first}
    if positive(text, "moe_layer_freq") and "dense" not in wanted[first:]:
        found["moe_layer_freq"] = 1
    return found


def _qwen_moe(text: Text, i: int) -> str:
    sparse = (i + 1) % text.get("decoder_sparse_step", 1) == 0
    dense = text.get("mlp_only_layers")
    return "MoE" if sparse and not (isinstance(dense, list) and i in dense) else "dense"


def _qwen_express(text: Text, wanted: Sequence[str]) -> Text | None:
    dense = [i for i, word in enumerate(wanted) if word == "dense"]
    kept = text | {"mlp_only_layers": dense}
    if all(_qwen_moe(kept, i) == word for i, word in enumerate(wanted)):
        return {"mlp_only_layers": dense}
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _llama4_moe(text: Text, i: int) -> str:
    step = text["interleave_moe_layer_step"]
    every = text.get("moe_layers")
    return "MoE" if (i in every if isinstance(every, list) else (i + 1) % step == 0) else "dense"


def _ernie_moe(text: Text, i: int) -> str:
    first, last, every = (text[key] for key in _ERNIE)
    return "MoE" if first <= i and (last < 0 or i <= last) and (i + 1) % every == 0 else "dense"


def _ernie_express(text: Text, wanted: Sequence[str]) -> Text | None:
    moe = [i for i, word in enumerate(wanted) if word == "MoE"]
    ends = (moe[0], moe[-1]) if moe else (len(wanted), len(wanted))
    for every in (text[_ERNIE[2]], *range(1, len(wanted) + 1)):
        found = dict(zip(_ERNIE, (*ends, every), strict=True))
        if all(_ernie_moe(text | found, i) == word for i, word in enumerate(wanted)):
            return found
    return None


_ERNIE = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")


def _rope(text: Text, i: int) -> str:
    if listed(text, "no_rope_layers"):
        return "" if i < len(text["no_rope_layers"]) and text["no_rope_layers"][i] else "without rope"
    return "without rope" if (i + 1) % text["no_rope_layer_interval"] == 0 else ""


def _every(key: str, other: str = "sliding attention", *, first: bool = False) -> Rule:
    """Every so many layers full attention; counted from the first layer, or from the end of the first run."""

    def meaning(text: Text, i: int) -> str:
        if isinstance(text[key], str):  # letters that repeat
            return "full attention" if text[key][i % len(text[key])] == "G" else other
        return other if (i if first else i + 1) % text[key] else "full attention"

    def when(text: Text) -> bool:
        if "sliding_window_pattern" in key and text.get("sliding_window") is None:
            return False
        if key == "global_attn_every_n_layers" and first is not ("modernbert" in str(text.get("model_type"))):
            return False
        return positive(text, key) or (isinstance(text.get(key), str) and bool(text[key]))

    return attention(key, meaning, when=when)


def _bailing(text: Text, i: int) -> str:
    """The last of every group; and, in the authors' own code, those behind the last whole group."""
    size, count = text["layer_group_size"], text.get("num_hidden_layers")
    behind = type(count) is int and text.get("model_type") != "bailing_hybrid" and i >= count // size * size
    return "full attention" if behind or (i + 1) % size == 0 else "linear attention"


RULES: tuple[Rule, ...] = (
    # DeepSeek, Kimi, GLM: dense at first, then MoE (every so many layers)
    Rule(
        ("first_k_dense_replace", "moe_layer_freq"), FEED_FORWARD,
        lambda t: number(t, "first_k_dense_replace") and not listed(t, "mlp_layer_types")
        and not listed(t, "moe_layer_freq"),
        _deepseek_moe, _deepseek_express,
    ),
    # Qwen: every so many layers MoE, but for those listed
    Rule(
        ("decoder_sparse_step", "mlp_only_layers"), FEED_FORWARD,
        lambda t: positive(t, "decoder_sparse_step") and bool(t.get("num_experts")),
        _qwen_moe, _qwen_express,
    ),
    Rule(
        ("interleave_moe_layer_step", "moe_layers"), FEED_FORWARD,
        lambda t: positive(t, "interleave_moe_layer_step"), _llama4_moe,
        lambda t, wanted: {"moe_layers": [i for i, w in enumerate(wanted) if w == "MoE"]},
    ),
    Rule(
        _ERNIE, FEED_FORWARD,
        lambda t: number(t, _ERNIE[0]) and type(t.get(_ERNIE[1])) is int and positive(t, _ERNIE[2]),
        _ernie_moe, _ernie_express,
    ),
    threshold(
        "num_dense_layers", "dense", "MoE", half=FEED_FORWARD, when=lambda t: not listed(t, "mlp_layer_types")
    ),
    threshold("moe_layer_num_skipped", "dense", "MoE", half=FEED_FORWARD, when=lambda t: True),
    periodic(  # Jamba
        "expert_layer_period", "expert_layer_offset", "MoE", "dense", half=FEED_FORWARD,
        when=lambda t: type(t.get("num_experts")) is not int or t["num_experts"] > 1,
    ),
    periodic("attn_layer_period", "attn_layer_offset", "attention", "mamba", half=MIXER),
    attention(
        "max_window_layers",
        lambda t, i: "full attention" if i < t["max_window_layers"] else "sliding attention",
        when=lambda t: bool(t.get("use_sliding_window")) and number(t, "max_window_layers"),
    ),
    _every("sliding_window_pattern"),
    _every("_sliding_window_pattern"),
    _every("global_attn_every_n_layers"),
    _every("global_attn_every_n_layers", first=True),
    _every("full_attention_interval", "linear attention"),
    attention("layer_group_size", _bailing, when=lambda t: positive(t, "layer_group_size")),
    Rule(  # RecurrentGemma: words that repeat
        ("block_types",), MIXER, lambda t: listed(t, "block_types"),
        lambda t, i: str(t["block_types"][i % len(t["block_types"])]),
        lambda t, wanted: {"block_types": list(wanted)},
    ),
    Rule(
        ("no_rope_layer_interval", "no_rope_layers"), MIXER,
        lambda t: positive(t, "no_rope_layer_interval") and not listed(t, "no_rope_layers"),
        _rope, lambda t, wanted: {"no_rope_layers": [int(not w) for w in wanted]},
    ),
)  # fmt: skip
"""Every rule that is known; the words they use make up the kinds of layers."""


def known_keys() -> Iterable[str]:
    """Every field that some rule reads."""
    for rule in RULES:
        yield from rule.keys
