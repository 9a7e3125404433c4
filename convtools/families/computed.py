"""What a config.json says a model computes, in Megatron's words: rope scaling, windows, activation, routing.

Weights that are copied exactly compute something else where Megatron is not told of these. What it has
no word for is refused towards Megatron, by name; between Hugging Face checkpoints it does not matter.
"""

from collections.abc import Iterator
from reprlib import repr  # a hostile value is long
from typing import TYPE_CHECKING, Any

from convtools.errors import ConfigError
from convtools.families.config import Config

if TYPE_CHECKING:
    from convtools.families.gpt import Spec

_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""Numbers of Llama 3's rope that Megatron's code fixes."""
_PLAIN = (None, "default", "mrope")
"""Kinds of rope that are the plain one where positions are those of a text."""
_EPSILON = {"MixtralForCausalLM": 1e-5, "Glm4MoeForCausalLM": 1e-5, "GptOssForCausalLM": 1e-5}
"""`rms_norm_eps` where the config is silent, as in transformers; of all others 1e-6 (Megatron's is 1e-5)."""


def refuse(problem: str, fix: str | None = None) -> ConfigError:
    """An error of a model that Megatron would compute otherwise than its config says."""
    return ConfigError(f"Megatron cannot compute this model: {problem}", where="config.json", fix=fix)


def architecture(config: Config) -> str:
    """The architecture that the family reads."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def epsilon(config: Config) -> Any:
    """`rms_norm_eps`, or what transformers takes where the config is silent."""
    given = config.get("rms_norm_eps")
    return _EPSILON.get(architecture(config), 1e-6) if given is None else given


def check_activation(config: Config) -> None:
    """Raise ConfigError for an activation other than that of `swiglu`."""
    act = config.get("hidden_act")
    if act not in (None, "silu", "swish"):
        raise refuse(f"`hidden_act` is {repr(act)}, and Megatron's --swiglu has silu")


def check_biases(spec: "Spec") -> None:
    """Raise ConfigError for biases that Megatron has only together with others, or not at all.

    `torch_dist` is read without complaint where it holds a bias that the model has not.
    """
    biases = (spec.qkv_bias, spec.proj_bias, spec.mlp_bias)
    if biases not in ((False,) * 3, (True, False, False), (True,) * 3):
        names = ("q, k and v", "o_proj", "the feed-forward")
        found = " and ".join(n for n, there in zip(names, biases, strict=True) if there)
        raise refuse(f"it has biases on {found} alone, where Megatron has them on q, k and v, or everywhere")


def scaling(config: Config) -> dict[str, Any] | None:
    """The rope's scaling; None where it is plain. Raises ConfigError where it cannot be told."""
    found = []
    for part in _ropes(config):
        kind = part.get("rope_type", part.get("type"))
        if part.get("llama_4_scaling_beta"):
            raise refuse("`llama_4_scaling_beta`: Megatron does not scale queries by their position")
        if kind not in _PLAIN and part not in found:
            found.append(part)
    if len(found) > 1:
        raise refuse("layers differ in their rope scaling, or it is given twice")
    return found[0] if found else None


def _ropes(config: Config) -> Iterator[dict[str, Any]]:
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name)
        if given is None:
            continue
        if not isinstance(given, dict):
            raise refuse(f"`{name}` is {repr(given)}, expected an object")
        yield given
        yield from (part for part in given.values() if isinstance(part, dict))  # one for each type of layer


def rope_args(config: Config) -> dict[str, Any]:
    """The scaling of a GPT's rope. Raises ConfigError for what Megatron has not."""
    rope = scaling(config)
    if rope is None:
        return {"position_embedding_type": "rope"}
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    if kind == "yarn":
        return {"position_embedding_type": "yarn"} | _yarn_args(config, rope)
    if kind == "llama3":
        if any(rope.get(name) != value for name, value in _LLAMA3.items()):
            raise refuse(f"its `llama3` rope is not that of Llama 3.x, which Megatron fixes: {_LLAMA3}")
        more = {"use_rope_scaling": True, "rope_scaling_factor": factor}
    elif kind == "linear":
        if not isinstance(factor, int | float) or not 1 <= factor < 1e6 or factor != int(factor):
            raise refuse(f"linear rope scaling by {repr(factor)}, expected a whole number")
        more = {"rotary_seq_len_interpolation_factor": int(factor)}
    else:
        raise refuse(
            f"rope scaling {repr(kind)}",
            fix="Megatron has linear, llama3 and yarn; the weights themselves do not depend on it",
        )
    return {"position_embedding_type": "rope"} | more


def check_yarn(rope: dict[str, Any]) -> None:
    """Raise ConfigError for what Megatron's YaRN has no word for."""
    if rope.get("attention_factor") is not None:
        raise refuse("`attention_factor` of YaRN: Megatron derives it from the other numbers")
    if rope.get("factor") is None:
        raise refuse("YaRN without its `factor`")


def _yarn_args(config: Config, rope: dict[str, Any]) -> dict[str, Any]:
    check_yarn(rope)
    both = rope.get("mscale") and rope.get("mscale_all_dim")  # transformers looks at neither alone
    length = rope.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    return {
        "yarn_rotary_scaling_factor": rope["factor"], "yarn_original_max_position_embeddings": length,
        "yarn_beta_fast": rope.get("beta_fast") or 32.0, "yarn_beta_slow": rope.get("beta_slow") or 1.0,
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
        "yarn_mscale": rope["mscale"] if both else None,
        "yarn_mscale_all_dim": rope["mscale_all_dim"] if both else None,
    }  # fmt: skip


def window_args(config: Config) -> dict[str, Any]:
    """Mistral's and Mixtral's sliding window as Megatron counts it. Raises ConfigError for Qwen's.

    Where Mistral's config is silent, transformers takes 4096.
    """
    name, size = architecture(config), config.get("sliding_window")
    if name.startswith("Qwen") and config.get("use_sliding_window") and size is not None:
        raise refuse("`use_sliding_window` is true, and which layers slide has changed between versions")
    if name not in ("MistralForCausalLM", "MixtralForCausalLM"):
        return {}
    if "sliding_window" not in config and config.get("model_type") == "mistral":
        size = 4096
    if size is None:
        return {}
    if type(size) is not int or not 0 < size < 2**40:
        raise refuse(f"`sliding_window` is {repr(size)}, expected a whole number")
    return {"window_size": [size - 1, 0], "window_attn_skip_freq": None}


def check_sigmoid_routing(config: Config) -> None:
    """Raise ConfigError for a routing that does not score by sigmoid."""
    if config.get("scoring_func") not in (None, "sigmoid"):
        raise refuse(f"`scoring_func` is {repr(config['scoring_func'])}, expected 'sigmoid'")


_SIGMOID = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "NemotronHForCausalLM")


def computed_otherwise(config: Config) -> tuple[str, ...]:
    """What Megatron computes almost as the config says, for the report; the weights are exact."""
    return tuple(_otherwise(config))


def _otherwise(config: Config) -> Iterator[str]:
    name, groups = architecture(config), config.get("n_group") or 1
    topk, kept = config.get("num_experts_per_tok"), config.get("topk_group")
    if (
        name == "DeepseekV2ForCausalLM"
        and config.get("topk_method") == "group_limited_greedy"
        and groups != 1
    ):
        yield (
            "DeepSeek-V2 chooses groups by their best expert, Megatron by the sum of their best"
            " num_experts_per_tok / topk_group: the weights are exact, the routing can differ"
        )
    if name not in _SIGMOID or topk is None:
        return
    norms = config.get("norm_topk_prob", True)
    if norms is not (topk != 1):
        yield (
            f"`norm_topk_prob` {repr(norms)} with {repr(topk)} experts a token: Megatron norms their weights"
            " unless it is one"
        )
    if groups != 1 and not (isinstance(topk, int) and type(kept) is int and kept > 0 and topk // kept == 2):
        yield (
            f"`n_group` {repr(groups)}: a group's score is the sum of its best 2 experts, in Megatron of its"
            f" best num_experts_per_tok / topk_group ({repr(topk)} / {repr(kept)}): the routing can differ"
        )


_WHOLE = (
    "max_position_embeddings", "seq_length", "moe_router_topk", "moe_router_num_groups",
    "moe_router_group_topk", "mamba_chunk_size", "original_max_position_embeddings",
    "yarn_original_max_position_embeddings",
)  # fmt: skip
_POSITIVE = (
    "norm_epsilon", "layernorm_epsilon", "rotary_base", "rotary_percent", "rotary_scaling_factor",
    "rope_scaling_factor", "yarn_rotary_scaling_factor", "moe_router_topk_scaling_factor",
    "beta_fast", "beta_slow", "yarn_beta_fast", "yarn_beta_slow",
)  # fmt: skip
_NUMBER = (
    "attention_dropout", "hidden_dropout", "init_method_std", "moe_aux_loss_coeff", "mscale",
    "mscale_all_dim", "yarn_mscale", "yarn_mscale_all_dim", "activation_func_clamp_value",
)  # fmt: skip


def checked(args: dict[str, Any]) -> dict[str, Any]:
    """The same args. Raises ConfigError for values that came from the config and cannot be what they say."""
    wrong = []
    for name, value in args.items():
        if value is None:
            continue
        if name in _WHOLE:
            good = type(value) is int and 0 < value < 2**63
        elif name in _POSITIVE:
            good = is_real(value) and value > 0
        elif name in _NUMBER:
            good = is_real(value) and value >= 0
        else:
            good = _simple(value)
        if not good:
            wrong.append(f"`{name}` would be {repr(value)}")
    if wrong:
        raise ConfigError(
            "config.json holds values that Megatron's args cannot have: " + "; ".join(wrong[:10]),
            where="config.json",
            fix="correct the config; a published checkpoint's own config.json has these fields",
        )
    return args


def is_real(value: Any) -> bool:
    """A number that is finite and of a size that numbers in a config have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**100


def _simple(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(not isinstance(x, list | tuple) and _simple(x) for x in value)
    if isinstance(value, str):
        return len(value) <= 100_000  # a hybrid model's pattern is the longest
    return isinstance(value, bool) or (isinstance(value, int | float) and abs(value) < 2**63)
