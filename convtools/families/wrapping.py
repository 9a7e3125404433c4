"""A language model inside a larger one: where its config is, and how its tensors' names are prefixed.

Handled here once. Families see the language model's own config and its own names (`model.layers.0.`,
`lm_head.weight`) and no other; a `Wrapping` says how the file spells them.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from convtools.errors import AccountingError, ConfigError, capped, tick
from convtools.families.config import Config

SECTIONS = ("text_config", "llm_config", "language_config")
"""Sections of config.json that may hold the language model's config."""

HEAD = "lm_head.weight"

_PREFIXES: dict[str, tuple[str, str]] = {
    "": ("", ""),
    "model.language_model.": ("model.language_model.", "model."),
    "language_model.": ("language_model.", ""),
}
"""Prefix of the world's -> (it stands in the file, where this stands in the language model's own names).

Under `model.language_model.` (Qwen-VL) the head and the MTP layers stay outside, at the top."""

_TOPS = ("model.", "backbone.")
_ENTRIES = ("layers.", "embed_tokens.", "embeddings.", "embedding.")
"""Names by which a decoder is recognised, under one of `_TOPS`."""

_LANGUAGE = (
    "lm_head.", "mtp.", "backbone.", "language_model.",
    "model.language_model.", "model.norm.", "model.norm_f.", *(f"model.{entry}" for entry in _ENTRIES),
)  # fmt: skip
"""Where no vision or audio tower lives: a tensor here that the model does not have is a fault."""


@dataclass(frozen=True, slots=True)
class Wrapping:
    """The language model's own names <-> the file's names."""

    prefix: str = ""
    """`` , `model.language_model.` or `language_model.`."""
    untied: bool = False
    """config.json ties the head at its top and not in the section, and the file holds a head."""

    def __post_init__(self) -> None:
        if not isinstance(self.prefix, str) or self.prefix not in _PREFIXES or type(self.untied) is not bool:
            raise ValueError(f"no language model's names begin with {self.prefix!r:.60}")

    def outer(self, name: str) -> str:
        """The name in the file of the language model's tensor `name`.

        >>> Wrapping("model.language_model.").outer("model.norm.weight")
        'model.language_model.norm.weight'
        >>> Wrapping("language_model.").outer("lm_head.weight")
        'language_model.lm_head.weight'
        """
        there, here = _PREFIXES[self.prefix]
        return there + name[len(here) :] if name.startswith(here) else name

    def inner(self, name: str) -> str | None:
        """The language model's own name of a tensor in the file; None where it cannot be one of its own."""
        there, here = _PREFIXES[self.prefix]
        if name.startswith(there):
            return here + name[len(there) :]
        return None if not here or name.startswith(here) else name

    def outside(self, name: str) -> bool:
        """Whether a tensor of the file belongs to a tower or projector, by its name."""
        return not name.startswith(_LANGUAGE if self.prefix else ("model.", *_LANGUAGE))


def find_prefix(names: Iterable[str], *, nested: bool) -> str:
    """The prefix under which these names hold a decoder.

    A flat config whose names show none is left to its family. Raises AccountingError.
    """
    names = list(names)
    first = {p: next((n for n in names if n.startswith(_anchors(p))), None) for p in _PREFIXES}
    found = {prefix: name for prefix, name in first.items() if name is not None}
    if len(found) == 1:
        return next(iter(found))
    if not found and not nested:
        return ""
    wanted = [Wrapping(p).outer("model.layers.") for p in _PREFIXES]
    raise AccountingError(
        "the language model's prefix is unclear",
        expected=f"names under one of {capped(map(tick, wanted))}, and under no other",
        found=capped(map(tick, found.values() or names), 4) or "no tensors",
        fix="convert the checkpoint as it was published, with one language model in it",
    )


def _anchors(prefix: str) -> tuple[str, ...]:
    """How a decoder's names begin under a prefix."""
    starts = (Wrapping(prefix).outer(top + entry) for top in _TOPS for entry in _ENTRIES)
    return tuple(start for start in starts if start.startswith(prefix))


def find_section(config: Config) -> str | None:
    """The section that holds the language model's config. Raises ConfigError where two differ."""
    found = [name for name in SECTIONS if isinstance(config.get(name), dict) and config[name]]
    if any(config[name] != config[found[0]] for name in found):
        raise ConfigError(
            "config.json describes several language models",
            where="config.json",
            expected=f"one of {capped(map(tick, SECTIONS))}",
            found=f"{capped(map(tick, found))}, which differ",
            fix="take out the one that does not belong to the weights",
        )
    return found[0] if found else None


def own_config(config: Config, section: str, architecture: str) -> dict[str, Any]:
    """The language model's config, with what the top of config.json decides: the tie and the dtype.

    Nothing else is taken from the top: a size there may be a tower's.
    """
    own = dict(config[section]) | {"architectures": [architecture]}
    if config.get("tie_word_embeddings") is not None:
        own["tie_word_embeddings"] = config["tie_word_embeddings"]
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype:
        own.pop("torch_dtype", None)
        own["dtype"] = dtype
    return own


def find_wrapping(config: Config, section: str | None, names: Iterable[str]) -> Wrapping:
    """How this file spells the names of its language model. Raises AccountingError."""
    names = set(names)
    wrapping = Wrapping(find_prefix(sorted(names), nested=section is not None))
    if section is None or config.get("tie_word_embeddings") is not True:
        return wrapping
    # transformers does not tie two weights that are both there; the section says that these are two
    untied = config[section].get("tie_word_embeddings") is False and wrapping.outer(HEAD) in names
    return Wrapping(wrapping.prefix, untied)


def group_outside(names: Iterable[str], limit: int = 8) -> list[str]:
    """One line for each group of tensors outside the language model: how many, and under which name."""
    counts = Counter(map(_group, names))
    lines = [f"{n} tensor{'s' if n > 1 else ''} {group}" for group, n in list(counts.items())[:limit]]
    more = sum(list(counts.values())[limit:])
    return [*lines, f"{more} more under {len(counts) - limit} other names"] if more else lines


def _group(name: str) -> str:
    parts = name.split(".")
    depth = 2 if parts[0] == "model" else 1
    return f"under {tick('.'.join(parts[:depth]) + '.')}" if len(parts) > depth else tick(name)
