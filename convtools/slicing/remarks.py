"""What a user should know of a slice beside its layers: halves that are gone, MTP, options in vain."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from convtools.errors import UsageError, capped
from convtools.slicing.layers import MTP_COUNTS, Layers, mtp_depth
from convtools.slicing.selection import Kind
from convtools.stores.names import tick

GONE = "no layer of the slice is any more: "


def gone_kinds(kinds: Sequence[Kind], keep: Sequence[int], said: Iterable[str] = ()) -> list[str]:
    """A note on the halves of layers that the source has and the slice has not.

    `said` are notes that were made already: what one of them names is not named again.
    """
    kept = [kinds[i] for i in keep]
    before = "; ".join(note for note in said if note.startswith(GONE))
    gone = sorted(word for word in (_halves(kinds) - _halves(kept)) if word and word not in before)
    notes = [f"{GONE}{capped(gone)}"] if gone else []
    if any(map(_attends, kinds)) and not any(map(_attends, kept)):
        notes.append("the slice has no attention: transformers cannot run some hybrid models without any")
    return notes


def _halves(kinds: Iterable[Kind]) -> set[str]:
    return {half for kind in kinds for half in (kind.mixer, kind.feed_forward)}


def _attends(kind: Kind) -> bool:
    """Whether it has an attention whose cache holds keys and values."""
    return "MLA" in kind.mixer or ("attention" in kind.mixer and not kind.mixer.startswith("linear"))


def mtp_remarks(text: dict[str, Any], layers: Layers, *, drop: bool) -> list[str]:
    """A note where the config speaks of MTP layers without tensors, or where there is nothing to drop."""
    if layers.tail or layers.mtp:
        return []
    depth = mtp_depth(text)
    if depth:
        key = next(key for key in MTP_COUNTS if type(text.get(key)) is int)
        then = "there is nothing to drop, and the count is set to 0" if drop else "left as it says"
        return [f"`{key}` {depth}: the source has no tensors of an MTP head; {then}"]
    return ["--mtp drop: the model has no MTP head"] if drop else []


def check_not_per_layer(text: dict[str, Any], layers: Layers, keys: Sequence[str]) -> None:
    """Raise UsageError for a key of --not-per-layer that would change nothing."""
    sizes = (layers.count, layers.count + max(len(layers.tail), mtp_depth(text)))
    held = list(dict.fromkeys(_lists(text, sizes)))
    for key in keys:
        if key not in held:
            near = difflib.get_close_matches(key, held, 3, 0.4) or held
            raise UsageError(
                f"--not-per-layer: the config has no list {tick(key)} that is as long as there are layers",
                expected=capped(map(tick, near)) if near else None,
                fix="give the list's own name, without what it lies in" if near else "leave it out",
            )


def _lists(text: dict[str, Any], sizes: Sequence[int]) -> Iterator[str]:
    """Names of lists of these lengths, in objects inside too."""
    for key, value in text.items():
        if isinstance(value, dict):
            yield from _lists(value, sizes)
        elif isinstance(value, list) and len(value) in sizes:
            yield key
