"""Two config.json: no part of the weights, and what one must know before calling two models the same."""

from collections.abc import Mapping
from typing import Any

from convtools.equality.canonical import Side
from convtools.errors import capped, tick

_OF_NO_MATTER = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "auto_map",
    "dtype", "name_or_path", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
"""What says nothing of the function that the weights have; a dtype, every tensor says itself."""
_GONE = object()


def two_models(a: Side, b: Side) -> str | None:
    """Why the two are no one architecture; None where they are, or one does not say."""
    one, other = (_architecture(side.config) for side in (a, b))
    if one is None or other is None or one == other:
        return None
    return f"two architectures, {tick(one)} in A and {tick(other)} in B"


def _architecture(config: Mapping[str, Any]) -> str | None:
    said = config.get("architectures")
    return said[0] if isinstance(said, list) and said and isinstance(said[0], str) else None


def settings_note(a: Side, b: Side) -> str | None:
    """That the two config.json differ, and in what; None where they do not, or a side has none of its own."""
    if a.root is None or b.root is None or not a.config or not b.config:
        return None
    keys = differing(a.config, b.config)
    if not keys:
        return None
    return f"config.json is not compared, and the two differ in {capped([tick(key) for key in keys], 8)}"


def differing(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The keys in which two configs differ, nested ones with dots.

    >>> differing({"n": 1, "rope": {"theta": 1}, "use_cache": True}, {"n": 1, "rope": {"theta": 2}})
    ['rope.theta']
    """
    found = []
    for key in sorted({*a, *b} - _OF_NO_MATTER):
        one, other = a.get(key, _GONE), b.get(key, _GONE)
        if isinstance(one, Mapping) and isinstance(other, Mapping) and prefix.count(".") < 8:
            found += differing(one, other, f"{prefix}{key}.")
        elif one is not other and (type(one), one) != (type(other), other):
            found.append(f"{prefix}{key}")
    return found
