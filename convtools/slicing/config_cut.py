"""The config of a slice: all of it that is per layer is cut with the weights, and nothing else changes."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from convtools.errors import ConfigError, capped
from convtools.slicing.config_bonds import check_whole, kv_sharing, remarks
from convtools.slicing.config_fields import (
    INDEX_LISTS,
    INDEX_TEXTS,
    LAYER_KEYED,
    NOT_PER_LAYER,
    PER_LAYER_VALUES,
    PER_LAYER_WORDS,
    speaks_of_layers,
)
from convtools.slicing.config_rules import RULES, known_keys, with_defaults
from convtools.slicing.layers import (
    COUNTS,
    MTP_COUNTS,
    PATTERNS,
    Layers,
    mtp_depth,
    pattern_letters,
    text_part,
)
from convtools.slicing.module_names import renumber_modules
from convtools.slicing.remarks import GONE
from convtools.slicing.rule import restated

_ASIDE = ("vision", "visual", "audio", "image", "speech")
_KEPT_AS_IT_IS = frozenset((*COUNTS, *MTP_COUNTS, *INDEX_LISTS, "num_kv_shared_layers", "layer_norm_eps"))


@dataclass(frozen=True, slots=True)
class Cut:
    """Which layers are kept, of how many, and what stands behind the last one."""

    count: int
    """Layers of the source."""
    keep: tuple[int, ...]
    mtp: int
    """MTP layers that the source says it has."""
    drop_mtp: bool
    not_per_layer: frozenset[str]


@dataclass
class Changes:
    """What was changed in a config, field by field, and what was not understood."""

    made: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def set(self, text: dict[str, Any], key: str, value: Any, where: str = "") -> None:
        """Set a field, and note it where it changes."""
        if key in text and text[key] == value and type(text[key]) is type(value):
            return
        before, text[key] = text.get(key), value
        self.made.append(f"{where}{key}: {_short(before)} -> {_short(value, 200)}")


def _short(value: Any, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def cut_config(
    config: dict[str, Any],
    layers: Layers,
    keep: Sequence[int],
    *,
    drop_mtp: bool = False,
    not_per_layer: Sequence[str] = (),
    modules: Sequence[str] = (),
) -> tuple[dict[str, Any], Changes]:
    """(source's config, its layers, source layer of each new one) -> (the slice's config, what changed).

    `modules` are the source's tensor names, for the per-layer names in `quantization_config`.
    Raises ConfigError where the config cannot say what the kept layers were.
    """
    out, changes = copy.deepcopy(config), Changes()
    text = text_part(out)
    source = copy.deepcopy(text)
    depth = max(len(layers.tail), mtp_depth(text))
    cut = Cut(layers.count, tuple(keep), depth, drop_mtp, NOT_PER_LAYER | set(not_per_layer))
    check_expressible(source, cut.count, keep)
    _rules(text, source, cut, changes)
    sharing = kv_sharing(source, cut.count, keep)
    if sharing is not None:
        changes.set(text, "num_kv_shared_layers", sharing)
    for key in COUNTS:
        if type(source.get(key)) is int:
            changes.set(text, key, len(keep))
    for key in PATTERNS:
        if isinstance(source.get(key), str) and source[key]:
            changes.set(text, key, _pattern(source[key], keep, drop_mtp))
    _lists(text, source, "", cut, changes)
    if drop_mtp:
        for key in MTP_COUNTS:
            if type(source.get(key)) is int:
                changes.set(text, key, 0)
    if text is not out:
        _mirror(out, source, text, changes)
    for holder in (out, text) if text is not out else (out,):
        if isinstance(holder.get("quantization_config"), dict):
            changed = renumber_modules(
                holder["quantization_config"], layers, keep, modules, drop_mtp=drop_mtp
            )
            changes.set(holder, "quantization_config", changed)
    changes.notes += remarks(source)
    _unknown(source, changes)
    return out, changes


def _mirror(out: dict[str, Any], source: dict[str, Any], text: dict[str, Any], changes: Changes) -> None:
    """Some multimodal configs repeat fields of their text part: what was the same there stays the same."""
    for key, value in source.items():
        if key in out and out[key] == value and text[key] != value and key != "quantization_config":
            changes.set(out, key, text[key])


def check_expressible(text: dict[str, Any], count: int, keep: Sequence[int]) -> None:
    """Raise ConfigError where a config cannot say what these layers are, in this order."""
    check_whole(text, keep, count)
    kv_sharing(text, count, keep)
    said = with_defaults(text)
    for rule in RULES:
        if rule.applies(said) and restated(rule, said, keep) is None:
            about = ", ".join(f"`{k}` {_short(said[k])}" for k in rule.keys if said.get(k) is not None)
            wanted = [rule.meaning(said, i) for i in keep]
            raise ConfigError(
                f"the config cannot say what these layers are: {about} is a rule that they do not follow",
                where="config.json",
                expected=f"layers that a rule of this kind can describe, in this order: {capped(wanted, 16)}",
                fix="choose other layers (--layers), or another order",
            )


def _rules(text: dict[str, Any], source: dict[str, Any], cut: Cut, changes: Changes) -> None:
    said = with_defaults(source)
    for rule in RULES:
        found = restated(rule, said, cut.keep) if rule.applies(said) else None
        for key, value in (found or {}).items():
            changes.set(text, key, value)
        if found:
            gone = {rule.meaning(said, i) for i in range(cut.count)} - {
                rule.meaning(said, i) for i in cut.keep
            }
            if gone := {word for word in gone if word}:
                changes.notes.append(f"{GONE}{capped(sorted(gone))}")


def _pattern(pattern: str, keep: Sequence[int], drop_mtp: bool) -> str:
    """The kept letters; stage marks go, for the stages they marked are gone; an MTP part stays."""
    letters = pattern_letters(pattern)
    _, slash, mtp = pattern.partition("/")
    return "".join(letters[i] for i in keep) + ("" if drop_mtp else slash + mtp)


def _lists(text: dict[str, Any], source: dict[str, Any], where: str, cut: Cut, changes: Changes) -> None:
    """Cut every list with one entry a layer, and renumber every list of layers."""
    for key, value in source.items():
        if key == "quantization_config" or any(word in key for word in _ASIDE) or text.get(key) != value:
            continue  # of another part of the model; or a rule has set it
        if isinstance(value, dict):
            if key in LAYER_KEYED:
                changes.set(text, key, _keyed(value, cut.keep), where)
            else:
                _lists(text[key], value, f"{where}{key}.", cut, changes)
        elif key in INDEX_LISTS and _numbers(value):
            changes.set(text, key, _renumbered(value, cut.keep, INDEX_LISTS[key]), where)
        elif key in INDEX_TEXTS and isinstance(value, str):
            changes.set(text, key, _renumbered_text(key, value, cut.keep, INDEX_TEXTS[key]), where)
        elif isinstance(value, list) and value and key not in cut.not_per_layer and key not in INDEX_LISTS:
            _list(text, key, value, where, cut, changes)


def _list(text: dict[str, Any], key: str, value: list[Any], where: str, cut: Cut, changes: Changes) -> None:
    layers, behind = value[: cut.count], value[cut.count :]
    if len(layers) == cut.count and len(behind) in (0, cut.mtp):
        extra = [] if cut.drop_mtp else behind
        changes.set(text, key, [layers[i] for i in cut.keep] + extra, where)
        if key not in PER_LAYER_WORDS and key not in PER_LAYER_VALUES:
            changes.notes.append(
                f"`{where}{key}` is as long as there are layers: taken as one entry a layer, and cut "
                f"(not so? --not-per-layer {key})"
            )
        if behind:
            did = "kept so" if extra else "cut off with it"
            changes.notes.append(f"`{where}{key}` goes on behind the last layer, for MTP: {did}")
    elif key in PER_LAYER_WORDS:
        raise ConfigError(
            f"`{where}{key}` has {len(value)} entries",
            where="config.json",
            expected=f"{cut.count}, one a layer"
            + (f", or {cut.count + cut.mtp} with MTP" if cut.mtp else ""),
            fix="correct the config: nobody can tell which layer an entry belongs to",
        )


def _keyed(value: dict[str, Any], keep: Sequence[int]) -> dict[str, Any]:
    """An object with layers' numbers as keys, which may begin with zeros (and other keys, which stay)."""
    out = {key: inner for key, inner in value.items() if not key.isdecimal()}
    by_layer = {int(key): (len(key), inner) for key, inner in value.items() if key.isdecimal()}
    for new, old in enumerate(keep):
        if old in by_layer:
            width, inner = by_layer[old]
            out[str(new).zfill(width)] = inner
    return out


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int for i in value)


def _renumbered(value: Sequence[int], keep: Sequence[int], base: int) -> list[int]:
    return [new + base for new, old in enumerate(keep) if old + base in value]


def _renumbered_text(key: str, value: str, keep: Sequence[int], base: int) -> str:
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not all(part.isdecimal() and len(part) < 7 for part in parts):
        raise ConfigError(f"`{key}` is {_short(value)}", where="config.json", expected="numbers of layers")
    return ",".join(map(str, _renumbered([int(part) for part in parts], keep, base)))


def _unknown(source: dict[str, Any], changes: Changes) -> None:
    known = {*known_keys(), *_KEPT_AS_IT_IS}
    strange = [f"`{k}` {v}" for k, v in source.items() if k not in known and speaks_of_layers(k, v)]
    if strange:
        changes.notes.append(f"left as they are, not understood: {capped(strange)}")
