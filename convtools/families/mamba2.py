"""Mamba-2 alone (`Mamba2ForCausalLM`): Megatron's hybrid model with a pattern of nothing but `M`.

Config and names as transformers writes them; files of the original `mamba_ssm` are refused.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from reprlib import repr  # a hostile value is long
from typing import Any

from convtools.errors import AccountingError
from convtools.families.blocks.embedding import beside_tied_head, embedding, head
from convtools.families.blocks.mamba import mamba
from convtools.families.config import Config, Fields
from convtools.families.table import LAST, Copy, Row, norm, placed

NAME = "mamba2"
PROOF = {"Mamba2ForCausalLM": "parts of Nemotron-H, rows by hand, and round trips"}
"""What its tables were checked against, by architecture."""
ARCHITECTURES = tuple(PROOF)

_EMBEDDING = "backbone.embeddings.weight"
_EPSILON = 1e-5
"""Of the gated norm within the mixer; Megatron's code fixes it."""
_UNBOUNDED = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""The only `time_step_limit` that Megatron knows, as config.json spells it."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What the config says."""

    num_layers: int
    hidden: int
    vocab: int
    tied: bool
    heads: int
    head_dim: int
    groups: int
    state: int
    conv_kernel: int

    @property
    def text(self) -> str:
        """The pattern as Megatron writes it."""
        return "M" * self.num_layers


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a checkpoint names what the config leaves open."""

    head: bool = False
    """A tied model's file that holds `lm_head.weight` all the same."""

    def __post_init__(self) -> None:
        if type(self.head) is not bool:
            raise ValueError("head is true or false")


def parse(config: Config) -> Spec:
    """config.json -> Spec. Raises ConfigError, also for what Megatron's mixer cannot express."""
    f = Fields(config)
    if "d_model" in config:
        f.refuse("`d_model` is mamba_ssm's own spelling: convert to transformers' format first")
        f.done()
    if f.flag("use_bias", default=False):
        f.refuse("`use_bias` is true: Megatron's Mamba mixer has no bias on in_proj and out_proj")
    if not f.flag("use_conv_bias", default=True):
        f.refuse("`use_conv_bias` is false: Megatron's Mamba mixer always has that bias")
    if (act := f.get("hidden_act", default="silu")) not in ("silu", "swish"):
        f.refuse(f"`hidden_act` is {repr(act)}: Megatron's Mamba mixer knows silu only")
    if (limit := f.get("time_step_limit", default=_UNBOUNDED[0])) not in _UNBOUNDED:
        f.refuse(f"`time_step_limit` is {repr(limit)}: Megatron's Mamba mixer does not limit time steps")
    if (epsilon := f.get("layer_norm_epsilon", default=_EPSILON)) != _EPSILON:
        f.refuse(f"`layer_norm_epsilon` is {repr(epsilon)}: Megatron's Mamba mixer fixes {_EPSILON}")
    spec = Spec(
        num_layers=f.size("num_hidden_layers", most=10_000),
        hidden=f.size("hidden_size"),
        vocab=f.size("vocab_size"),
        tied=f.flag("tie_word_embeddings", default=False),
        heads=f.size("num_heads"),
        head_dim=f.size("head_dim"),
        groups=f.size("n_groups"),
        state=f.size("state_size"),
        conv_kernel=f.size("conv_kernel", default=4),
    )
    if spec.heads % spec.groups:
        f.refuse(f"num_heads={spec.heads} is not a multiple of n_groups={spec.groups}")
    expand = f.size("expand", default=2)
    if not f.problems and expand * spec.hidden != spec.heads * spec.head_dim:
        f.refuse(
            f"contradiction: expand * hidden_size is {expand * spec.hidden},"
            f" num_heads * head_dim is {spec.heads * spec.head_dim}"
        )
    f.done()
    return spec


def spelling(spec: Spec, hf_names: Iterable[str]) -> Spelling:
    """How these names are spelled. Raises AccountingError for mamba_ssm's own."""
    names = set(hf_names)
    if "backbone.embedding.weight" in names and _EMBEDDING not in names:
        raise AccountingError(
            "these are mamba_ssm's own names",
            expected=f"`{_EMBEDDING}`",
            found="`backbone.embedding.weight`",
            fix="load and save the model with transformers first",
        )
    return Spelling(spec.tied and "lm_head.weight" in names)


def mcore_spelling(spec: Spec, mcore_names: Iterable[str]) -> Spelling:
    """The published spelling."""
    return Spelling()


def rows(spec: Spec, spelling: Spelling, padded_vocab: int) -> Iterator[Row]:
    """The whole model, a row a Megatron parameter."""
    vocab = {"vocab": spec.vocab, "padded": padded_vocab, "hidden": spec.hidden}
    pre_norm = norm("mixer.in_proj.layer_norm_weight", "norm.weight", spec.hidden, "norm.weight")
    mixer = mamba(
        heads=spec.heads, head_dim=spec.head_dim, groups=spec.groups, state=spec.state,
        conv_kernel=spec.conv_kernel, hidden=spec.hidden,
    )  # fmt: skip
    yield embedding(_EMBEDDING, **vocab)
    for i in range(spec.num_layers):
        mcore, hf = f"decoder.layers.{i}.", f"backbone.layers.{i}."
        yield from placed([pre_norm], mcore, hf, i)
        yield from placed(mixer, mcore, f"{hf}mixer.", i)
    final = norm(
        "decoder.final_norm.weight", "backbone.norm_f.weight", spec.hidden, "decoder.final_layernorm.weight"
    )
    if spec.tied:
        final = beside_tied_head(final)
    yield from placed([final], "", "", LAST)
    if not spec.tied:
        yield head("lm_head.weight", **vocab, extra_state=True)


def copies(spec: Spec, spelling: Spelling) -> tuple[Copy, ...]:
    """Hugging Face tensors that repeat another."""
    if not spelling.head:
        return ()
    return (Copy("lm_head.weight", _EMBEDDING, "the head is tied to the embedding"),)


_SAME = (
    ("hidden_size", "hidden_size"),
    ("vocab_size", "vocab_size"),
    ("num_heads", "mamba_num_heads"),
    ("head_dim", "mamba_head_dim"),
    ("n_groups", "mamba_num_groups"),
    ("state_size", "mamba_state_dim"),
    ("layer_norm_epsilon", "norm_epsilon"),
    ("residual_in_fp32", "fp32_residual_connection"),
    ("initializer_range", "init_method_std"),
    ("chunk_size", "mamba_chunk_size"),
)
"""(config.json, Megatron's args): the same value under two names."""


def megatron_args(config: Config, spec: Spec, spelling: Spelling) -> dict[str, Any]:
    """The part of Megatron's `args` that config.json decides."""
    return {mcore: config.get(hf) for hf, mcore in _SAME} | {
        "num_layers": spec.num_layers, "layernorm_epsilon": _EPSILON, "norm_epsilon": _EPSILON,
        "is_hybrid_model": True, "hybrid_layer_pattern": spec.text, "hybrid_override_pattern": None,
        # No layer has attention, but Megatron's config wants heads that tp divides.
        "num_attention_heads": spec.heads, "kv_channels": spec.head_dim, "group_query_attention": False,
        "normalization": "RMSNorm", "apply_layernorm_1p": False, "add_bias_linear": False,
        "position_embedding_type": "none", "use_rotary_position_embeddings": False,
        "transformer_impl": "transformer_engine", "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": not spec.tied,
    }  # fmt: skip


def hf_config(args: Config, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], list[str]]:
    """(config.json derived from Megatron's args and tensors' shapes, what could not be derived)."""
    text = args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern") or ""
    pattern = str(text).replace("|", "")
    if set(pattern) != {"M"} or args.get("mtp_num_layers"):
        return {}, ["another architecture, by its args"]
    untied, epsilon = args.get("untie_embeddings_and_output_weights"), args.get("norm_epsilon")
    config = {hf: args.get(mcore) for hf, mcore in _SAME} | {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "num_hidden_layers": len(pattern),
        "layer_norm_epsilon": args.get("layernorm_epsilon") if epsilon is None else epsilon,
        "tie_word_embeddings": bool(args.get("share_embeddings_and_output_weights"))
        if untied is None
        else not untied,
        "hidden_act": "silu", "use_bias": False, "use_conv_bias": True,
        "residual_in_fp32": bool(args.get("fp32_residual_connection")),
        "conv_kernel": next((s[-1] for n, s in sorted(shapes.items()) if _is_conv(n)), None),
        "torch_dtype": "bfloat16" if args.get("bf16") else "float16" if args.get("fp16") else "float32",
    }  # fmt: skip
    for optional in ("initializer_range", "chunk_size"):
        if config[optional] is None:
            del config[optional]
    config["expand"] = _expand(*(args.get(n) for n in ("mamba_num_heads", "mamba_head_dim", "hidden_size")))
    missing = [name for name, value in config.items() if value is None]
    if config["layer_norm_epsilon"] not in (None, _EPSILON):
        missing.append(f"norm_epsilon={config['layer_norm_epsilon']!r}, expected {_EPSILON}")
    if args.get("normalization") not in (None, "RMSNorm"):
        missing.append(f"normalization={args['normalization']!r}, expected 'RMSNorm'")
    if args.get("apply_layernorm_1p") or args.get("layernorm_zero_centered_gamma"):
        missing.append("apply_layernorm_1p, expected norms that are not centred on zero")
    if args.get("num_layers") not in (None, len(pattern)):
        missing.append(f"num_layers={args['num_layers']!r}, but the pattern has {len(pattern)}")
    return config, missing


def _expand(heads: Any, head_dim: Any, hidden: Any) -> int | None:
    """The width of the mixer, in hidden sizes; None where it is no whole number of them."""
    if not all(isinstance(n, int) and n > 0 for n in (heads, head_dim, hidden)):
        return None
    whole, rest = divmod(heads * head_dim, hidden)
    return None if rest else int(whole)


def _is_conv(name: str) -> bool:
    return name.endswith((".conv1d.weight.x", ".conv1d.weight", ".conv1d_weight"))
