"""Which tensors belong to which layer, read from names and the config alone: also for unknown models.

A tensor's first number is its layer. The decoder is the one stack of layers that is as long as the
config says; an MTP head is a stack of its own (`mtp.`), or stands behind the decoder's last layer.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from convtools.errors import AccountingError, ConfigError, UsageError, capped

COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
"""Config fields that say how many layers the decoder has."""
PATTERNS = ("hybrid_override_pattern", "hybrid_layer_pattern")
"""Config fields with one letter a layer; `|` may mark pipeline stages, `/` begins MTP."""
TYPES = ("layer_types", "layers_block_type")
"""Config fields with one word a layer for what it is."""
MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers")
"""Config fields that say how many MTP layers there are."""
NESTED = ("text_config", "llm_config", "language_config")
"""Where a multimodal config keeps that of its language model."""

_STACK = re.compile(r"((?:[^.\d][^.]*\.)*?)(\d{1,6})\.(.+)", re.ASCII)
_STACK_WORDS = ("layers", "h", "blocks", "block", "layer")
_ASIDE = re.compile(r"(vision|visual|image|audio|speech|encoder|tower|projector|vit|merger|sam)", re.I)
_ENCODER = re.compile(r"encoder", re.I)
_MTP = re.compile(r"(?:^|\.)(?:mtp|mtp_layers|nextn)\.")


class Unclear(AccountingError):
    """More than one stack of tensors could be the decoder's layers, or none."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The tensors of a model by layer."""

    prefix: str
    """What stands before the layer's number: `model.layers.`."""
    decoder: tuple[tuple[str, ...], ...]
    """Names of each decoder layer's tensors."""
    tail: tuple[tuple[str, ...], ...]
    """The same of MTP layers that are numbered on behind the decoder."""
    mtp: tuple[str, ...]
    """Names of all other MTP tensors."""
    rest: tuple[str, ...]
    """Everything else: embedding, head, final norm, towers."""

    @property
    def count(self) -> int:
        """Number of decoder layers."""
        return len(self.decoder)

    def within(self, name: str) -> str:
        """A decoder or tail tensor's name within its layer."""
        return name[len(self.prefix) :].partition(".")[2]

    def renumbered(self, name: str, layer: int) -> str:
        """The name of the same tensor in layer `layer`."""
        return f"{self.prefix}{layer}.{self.within(name)}"


def other_stack(name: str) -> bool:
    """Whether a name, or the beginning of one, is of an MTP head or of a tower, and not of the decoder.

    >>> other_stack("mtp.layers."), other_stack("model.layers.")
    (True, False)
    """
    return bool(_MTP.search(name) or _ASIDE.search(name))


def text_path(config: dict[str, Any]) -> tuple[str, ...]:
    """Where in the config the language model's part lies: `()` or `("text_config",)`.

    >>> text_path({"text_config": {"num_hidden_layers": 4}, "vision_config": {"num_hidden_layers": 9}})
    ('text_config',)
    """
    for key in NESTED:
        inner = config.get(key)
        if isinstance(inner, dict) and _says_layers(inner):
            return (key,)
    return ()


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config (the object itself, not a copy)."""
    for key in text_path(config):
        config = config[key]
    return config


def _says_layers(config: dict[str, Any]) -> bool:
    return any(config.get(key) is not None for key in (*COUNTS, *PATTERNS, *TYPES))


def pattern_letters(pattern: str) -> str:
    """The decoder's letters of a pattern, without stage marks and MTP.

    >>> pattern_letters("ME|*E/*E")
    'ME*E'
    """
    return pattern.partition("/")[0].replace("|", "")


def layer_count(text: dict[str, Any]) -> int | None:
    """Number of decoder layers that a config says; None where it does not.

    Raises ConfigError where its fields contradict each other (B60).
    """
    if text.get("is_encoder_decoder"):
        raise ConfigError(
            "an encoder-decoder model has two stacks of layers: not sliced", where="config.json"
        )
    said: dict[str, int] = {}
    for key in COUNTS:
        if type(text.get(key)) is int:
            said[key] = text[key]
    for key in PATTERNS:
        if isinstance(text.get(key), str) and text[key]:
            said[key] = len(pattern_letters(text[key]))
    if isinstance(text.get("layers_block_type"), list) and text["layers_block_type"]:
        said["layers_block_type"] = len(text["layers_block_type"])
    if not said:
        return None
    if len(set(said.values())) > 1:
        raise ConfigError(
            "the config contradicts itself about its number of layers",
            where="config.json",
            found=", ".join(f"{key}: {n}" for key, n in said.items()),
            fix="correct the config: these fields must agree",
        )
    return next(iter(said.values()))


def mtp_depth(text: dict[str, Any]) -> int:
    """How many MTP layers a config says there are."""
    return next((text[key] for key in MTP_COUNTS if type(text.get(key)) is int), 0)


def find_layers(names: Iterable[str], text: dict[str, Any], prefix: str | None = None) -> Layers:
    """Sort tensors by layer. `prefix` chooses the stack where that is unclear.

    Raises AccountingError where no stack, or more than one, fits the config, or a layer has no tensors.
    """
    stacks: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    names = list(names)
    for name in names:
        match = _STACK.fullmatch(name)
        if match:
            stacks[match[1]][int(match[2])].append(name)
    count = layer_count(text)
    chosen = _choose(stacks, count, prefix)
    found = stacks[chosen]
    n = count if count is not None else max(found) + 1
    _check_whole(chosen, found, n, mtp_depth(text))
    decoder = tuple(tuple(found[i]) for i in range(n))
    tail = tuple(tuple(found[i]) for i in range(n, max(found) + 1))
    placed = {name for layer in (*decoder, *tail) for name in layer}
    mtp = tuple(name for name in names if name not in placed and _MTP.search(name))
    rest = tuple(name for name in names if name not in placed and not _MTP.search(name))
    return Layers(chosen, decoder, tail, mtp, rest)


def _choose(stacks: dict[str, dict[int, list[str]]], count: int | None, prefix: str | None) -> str:
    if prefix is not None:
        prefix = prefix.rstrip(".") + "."
        if prefix not in stacks:
            raise UsageError(
                f"no tensor's name begins with `{prefix}<number>.`", found=capped(sorted(stacks))
            )
        return prefix
    words = [stem for stem in stacks if stem.rstrip(".").rpartition(".")[2] in _STACK_WORDS]
    named = [stem for stem in words if not other_stack(stem)]
    if not named:  # a model that is an encoder (BERT)
        named = [stem for stem in words if not other_stack(_ENCODER.sub("", stem))]
    fitting = [stem for stem in named if count is None or max(stacks[stem]) + 1 >= count]
    if len(fitting) == 1 or (len(named) == 1 and not fitting):  # too short: it will be said which are missing
        return (fitting or named)[0]
    said = "a stack of layers" if count is None else f"one stack of {count} layers, as the config says"
    sizes = [
        f"`{stem}` with {max(held) + 1}"
        + (" (of a tower or of MTP, by its name)" if other_stack(stem) else "")
        for stem, held in sorted(stacks.items())
    ]
    raise Unclear(
        "it is unclear which tensors are the decoder's layers",
        expected=said,
        found=capped([f"`{s}`" for s in fitting] if fitting else sizes) or "no name with a number",
        fix="name the stack: --layer-prefix model.layers",
    )


def _check_whole(prefix: str, found: dict[int, list[str]], count: int, mtp: int) -> None:
    """Each layer has tensors, and behind the last one there are none but the MTP layers' (B68)."""
    empty = list(islice((i for i in range(count) if i not in found), 20))  # a config may say any number
    if empty:
        raise AccountingError(
            f"layers without any tensor: {capped(empty)}",
            expected=f"tensors under `{prefix}0.` to `{prefix}{count - 1}.`, as the config says",
            fix="fetch the checkpoint again, or correct the config",
        )
    beyond = sorted(i for i in found if i >= count)
    if beyond and beyond != list(range(count, count + min(len(beyond), mtp))):
        raise AccountingError(
            f"tensors of layers that the config does not have: {capped(beyond)}",
            expected=f"layers 0 to {count - 1}" + (f", then {mtp} of MTP" if mtp else ""),
            found=f"`{found[beyond[0]][0]}`",
            fix="correct the config's number of layers, or of MTP layers",
        )
