"""What each layer is: a mixer, a feed-forward, or both, told by the config's words and by the tensors.

Two layers are of one kind when the config says the same of them and they have the same tensors,
whatever their number of experts.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from convtools.errors import ConfigError, capped
from convtools.slicing.config_fields import PER_LAYER_WORDS
from convtools.slicing.config_rules import RULES, with_defaults
from convtools.slicing.layers import PATTERNS, Layers, pattern_letters
from convtools.slicing.rule import FEED_FORWARD, MIXER
from convtools.slicing.selection import Kind

EXPERT = re.compile(r"(^|\.)experts\.(\d{1,6})\.", re.ASCII)
"""A routed expert's number in a name."""

_MOE = re.compile(r"(^|\.)(shared_)?(experts|moe|block_sparse_moe|router)\.|(^|\.)experts$")
_FEED_FORWARD = re.compile(
    r"(^|\.)(mlp|feed_forward|ffn|moe|block_sparse_moe|experts|shared_experts?|shared_mlp)(\.|$)"
    r"|^mixer\.(gate|router|up_proj|down_proj|gate_proj|fc\d_latent_proj)\."
)
_MIXER = re.compile(
    r"(^|\.)(self_attn|self_attention|attn|attention|linear_attn|mamba|ssm|conv|temporal_block|cross_attn"
    r"|token_mixer|time_mixer|delta_net)(\.|$)|^mixer\."
)
_HALVES = {
    "mamba": (MIXER, "mamba"), "M": (MIXER, "mamba"),
    "attention": (MIXER, "attention"), "*": (MIXER, "attention"),
    "moe": (FEED_FORWARD, "MoE"), "E": (FEED_FORWARD, "MoE"),
    "mlp": (FEED_FORWARD, "dense"), "-": (FEED_FORWARD, "dense"),
    "sparse": (FEED_FORWARD, "MoE"), "dense": (FEED_FORWARD, "dense"),
}  # fmt: skip
"""Words and letters of configs: which half they tell of, and our word for it."""

_NUMBERED = {
    "attn_type_list": {0: "linear attention", 1: "full attention"},
    "hybrid_layer_pattern": {0: "full attention", 1: "sliding attention"},
}
"""Words for numbers."""

_SIGNS = (
    ("linear attention", ("linear_attn.", "delta_net.")),
    ("mamba", ("A_log", "x_proj", "dt_proj", "dt_bias")),
    ("recurrent", ("rg_lru",)),
    ("MLA", ("kv_a_proj", "kv_b_proj", "q_a_proj")),
    ("convolution", ("conv.",)),
    ("attention", ("attn.q_proj.", "attn.qkv_proj.", "attention.q")),
)
"""Words for mixers, and parts of names by which their tensors are known; the first that fits."""


def kinds(layers: Layers, text: dict[str, Any]) -> tuple[Kind, ...]:
    """The kind of every decoder layer. Raises ConfigError where config and tensors contradict (B59)."""
    out = []
    text = with_defaults(text)
    said = [dict(_said(text, i, layers.count)) for i in range(layers.count)]
    for i, names in enumerate(layers.decoder):
        inside = [EXPERT.sub(r"\1experts.#.", layers.within(name)) for name in names]
        halves = _split(inside)
        words = {half: said[i].get(half) or _by_names(half, halves[half]) for half in halves if halves[half]}
        missing = [half for half in said[i] if not halves.get(half) and _must(said[i][half])]
        experts = said[i].get(FEED_FORWARD, "")
        if not missing and halves[FEED_FORWARD] and experts in ("MoE", "dense"):
            missing = [FEED_FORWARD] if _by_names(FEED_FORWARD, halves[FEED_FORWARD]) != experts else []
        if missing:
            raise ConfigError(
                f"the config calls layer {i} `{said[i][missing[0]]}`, but its tensors are not "
                f"of that {missing[0]}",
                where="config.json",
                found=capped(f"`{name}`" for name in names),
                fix="the config and the weights belong to different models: fetch both again",
            )
        out.append((words, {half: frozenset(found) for half, found in halves.items()}))
    return _told_apart(out)


def _said(text: dict[str, Any], i: int, count: int) -> Iterable[tuple[str, str]]:
    """What the config says of layer i: (half, word); several words of one half are joined."""
    found: dict[str, list[str]] = {MIXER: [], FEED_FORWARD: []}
    for key in PATTERNS:
        letters = pattern_letters(text[key]) if isinstance(text.get(key), str) else ""
        if i < len(letters) and letters[i] in _HALVES:
            half, word = _HALVES[letters[i]]
            found[half].append(word)
    for key, half in PER_LAYER_WORDS.items():
        value = text.get(key)
        if isinstance(value, list) and i < len(value) and len(value) >= count:
            of, word = _word(key, value[i], half)
            if not (key == "layer_types" and of == MIXER and word == "attention" and found[MIXER]):
                found[of].append(word)
    for rule in RULES:
        if rule.applies(text):
            found[rule.half].append(rule.meaning(text, i))
    for half, parts in found.items():
        if parts := list(dict.fromkeys(p for p in parts if p)):
            yield half, " ".join(parts)


def _word(key: str, value: Any, half: str) -> tuple[str, str]:
    if key == "moe_layer_freq":
        return FEED_FORWARD, "MoE" if value else "dense"
    if key == "no_rope_layers":
        return MIXER, "" if value else "without rope"
    if key in _NUMBERED:
        return MIXER, _NUMBERED[key].get(value, str(value)) if type(value) is int else str(value)
    hybrid = key in ("layers_block_type", "layer_types") and str(value) in _HALVES
    if hybrid or key == "mlp_layer_types":
        return _HALVES.get(str(value), (half, str(value)))
    return half, str(value).replace("_", " ")


def _must(word: str) -> bool:
    """Whether a layer called so must have tensors of that half."""
    return word in ("mamba", "attention", "MoE", "dense")


def _split(inside: Iterable[str]) -> dict[str, list[str]]:
    """A layer's tensors by half; what is of neither (norms) goes with the mixer, if there is one."""
    found: dict[str, list[str]] = {MIXER: [], FEED_FORWARD: []}
    neither = []
    for name in inside:
        if _FEED_FORWARD.search(name):
            found[FEED_FORWARD].append(name)
        elif _MIXER.search(name):
            found[MIXER].append(name)
        else:
            neither.append(name)
    found[MIXER if found[MIXER] or not found[FEED_FORWARD] else FEED_FORWARD] += neither
    return found


def _by_names(half: str, names: Sequence[str]) -> str:
    """A word for half a layer, from the names of its tensors."""
    if half == FEED_FORWARD:
        return "MoE" if any(_MOE.search(name) for name in names) else "dense"
    held = [word for word, signs in _SIGNS if any(sign in name for name in names for sign in signs)]
    return "mamba and attention" if held == ["mamba", "attention"] else (held or ["attention"])[0]


def _told_apart(found: list[tuple[dict[str, str], dict[str, frozenset[str]]]]) -> tuple[Kind, ...]:
    """Kinds; of halves with one word and different tensors, all but the first kind get a number."""
    seen: dict[tuple[str, str], list[frozenset[str]]] = {}

    def label(half: str, words: dict[str, str], names: dict[str, frozenset[str]]) -> str:
        word = words.get(half)
        if not word:
            return ""
        variants = seen.setdefault((half, word), [])
        if names[half] not in variants:
            variants.append(names[half])
        number = variants.index(names[half])
        return word if not number else f"{word} ({number + 1})"

    return tuple(Kind(label(MIXER, w, n), label(FEED_FORWARD, w, n)) for w, n in found)
