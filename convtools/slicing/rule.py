"""A way in which a config speaks of layers without listing them, and the shapes that such rules have.

Each rule tells what a layer is, and how to say the same of other layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from convtools.slicing.layers import COUNTS

Text = dict[str, Any]

MIXER, FEED_FORWARD = "mixer", "feed-forward"

_TAKES_LAYER_TYPES = frozenset((
    "afmoe", "bailing_hybrid", "cohere2", "exaone4", "gemma2", "gemma3", "gemma3_text",
    "gemma3n_text", "gpt_oss", "modernbert", "modernbert-decoder", "olmo3", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "smollm3",
))  # fmt: skip
"""`model_type`s whose config takes an explicit `layer_types` in place of a rule."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One way in which a config speaks of layers without listing them."""

    keys: tuple[str, ...]
    """Fields that it reads; the first one must be there."""
    half: str
    """Which half of a layer it tells of: MIXER or FEED_FORWARD."""
    applies: Callable[[Text], bool]
    meaning: Callable[[Text, int], str]
    """(config, layer) -> a word for what the layer is."""
    express: Callable[[Text, Sequence[str]], Text | None]
    """(config, what each new layer must be) -> fields to set, or None where that cannot be said."""


def restated(rule: Rule, text: Text, layers: Sequence[int]) -> Text | None:
    """Fields to set so that new layer i is what `layers[i]` was; {} where all stays; None: impossible."""
    wanted = [rule.meaning(text, i) for i in layers]
    fewer = text | {key: len(layers) for key in COUNTS if type(text.get(key)) is int}
    if all(rule.meaning(fewer, new) == word for new, word in enumerate(wanted)):
        return {}
    found = rule.express(fewer, wanted)
    if found is not None and any(rule.meaning(fewer | found, i) != w for i, w in enumerate(wanted)):
        return None
    return found


def number(text: Text, *keys: str) -> bool:
    """Whether all of these fields are numbers of layers."""
    return all(type(text.get(key)) is int and 0 <= text[key] < 1 << 20 for key in keys)


def positive(text: Text, key: str) -> bool:
    """Whether a field is a number above zero."""
    return number(text, key) and text[key] > 0


def listed(text: Text, key: str) -> bool:
    """Whether a field lists something, so that no rule is asked."""
    return isinstance(text.get(key), list) and bool(text[key])


def threshold(key: str, before: str, after: str, *, half: str, when: Callable[[Text], bool]) -> Rule:
    """Layers below the number are one thing, the others another."""

    def express(text: Text, wanted: Sequence[str]) -> Text | None:
        return {key: list(wanted).index(after) if after in wanted else len(wanted)}

    return Rule(
        (key,), half, lambda t: number(t, key) and when(t),
        lambda t, i: before if i < t[key] else after, express,
    )  # fmt: skip


def periodic(
    period: str,
    offset: str,
    at: str,
    between: str,
    *,
    half: str,
    when: Callable[[Text], bool] = lambda t: True,
) -> Rule:
    """Every so many layers one is different: where `i % period == offset`."""

    def meaning(text: Text, i: int) -> str:
        return at if i % text[period] == text[offset] else between

    def express(text: Text, wanted: Sequence[str]) -> Text | None:
        for p in (text[period], *range(1, len(wanted) + 2)):
            for o in range(min(p, len(wanted) + 1)):
                found: Text = {period: p, offset: o}
                if all(meaning(text | found, i) == word for i, word in enumerate(wanted)):
                    return found
        return None

    keys = (period, offset)
    return Rule(keys, half, lambda t: number(t, *keys) and t[period] > 0 and when(t), meaning, express)


_ATTENTION = {"full attention": "full_attention", "sliding attention": "sliding_attention",
              "linear attention": "linear_attention"}  # fmt: skip


def attention(key: str, meaning: Callable[[Text, int], str], *, when: Callable[[Text], bool]) -> Rule:
    """Which attention a layer has, where no `layer_types` says it: written out for a model that takes them.

    For one that does not, another period is tried.
    """

    def by_types(text: Text, i: int) -> str:
        return (
            str(text["layer_types"][i]).replace("_", " ") if listed(text, "layer_types") else meaning(text, i)
        )

    def express(text: Text, wanted: Sequence[str]) -> Text | None:
        if text.get("model_type") in _TAKES_LAYER_TYPES:
            return {"layer_types": [_ATTENTION[word] for word in wanted]}
        for p in range(1, len(wanted) + 2) if number(text, key) else ():
            if all(meaning(text | {key: p}, i) == word for i, word in enumerate(wanted)):
                return {key: p}
        return None

    return Rule((key,), MIXER, lambda t: not listed(t, "layer_types") and when(t), by_types, express)
