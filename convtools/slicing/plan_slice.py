"""A slice before any byte moves: which tensor comes from where, under which name, with which config."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from convtools.conversion.plan import SideFile, Target
from convtools.errors import AccountingError, UsageError
from convtools.layout.mapping import Mapping
from convtools.layout.piece import block
from convtools.layout.region import Region
from convtools.slicing.choose import ASKED, choose
from convtools.slicing.config_cut import Changes, check_expressible, cut_config
from convtools.slicing.experts import Part, check_experts, cut_expert_counts, expert_count, experts_kept
from convtools.slicing.kinds import kinds
from convtools.slicing.layers import Layers, find_layers, text_part
from convtools.slicing.module_names import renumber_modules
from convtools.slicing.options import SliceOptions
from convtools.slicing.origin import QUANT_FILE, Origin
from convtools.slicing.remarks import check_not_per_layer, gone_kinds, mtp_remarks
from convtools.slicing.selection import Chosen, Kind, parse_layers
from convtools.stores.base import DTYPE_NBYTES
from convtools.stores.hf_write import INDEX_NAME, lined_up, plan_hf
from convtools.stores.json_file import read_json
from convtools.stores.names import tick


class Kept(NamedTuple):
    """A tensor of the slice."""

    source: str
    """Its HF name in the source."""
    rows: int | None
    """The first so many rows of it; None: all."""


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """Everything that is decided before a byte moves."""

    layers: Layers
    kinds: tuple[Kind, ...]
    """Of the source's layers."""
    keep: tuple[int, ...]
    """Source layer of each new layer."""
    chosen: tuple[Chosen, ...]
    layer_nbytes: tuple[int, ...]
    """Bytes of each source layer, as it would be kept."""
    kept: dict[str, Kept]
    """By new name, in the order in which they are written."""
    dropped: dict[str, int]
    """Why tensors are left out -> how many."""
    config: dict[str, object]
    changes: Changes
    target: Target


def plan_slice(origin: Origin, options: SliceOptions) -> SlicePlan:
    """Choose layers, name every tensor, cut the config. Raises UsageError, ConfigError, AccountingError."""
    text = text_part(origin.config)
    layers = find_layers(origin.hf, text, options.layer_prefix)
    check_not_per_layer(text, layers, options.not_per_layer)
    parts = _expert_parts(origin, options)
    nbytes = tuple(sum(_nbytes(origin, n, parts) for n in names) for names in layers.decoder)
    found = kinds(layers, text)
    if options.layers is not None:
        chosen = tuple(Chosen((i,), ASKED) for i in parse_layers(options.layers, layers.count))
    else:
        chosen = choose(
            options.cover or "blocks", found, nbytes, lambda keep: check_expressible(text, layers.count, keep)
        )
    keep = tuple(i for run in chosen for i in run.layers)
    drop_mtp = options.mtp == "drop"
    if len(set(keep)) < len(keep) and origin.format in ("torch_dist", "torch"):
        raise UsageError("a layer is listed twice", fix="slice a Hugging Face checkpoint to repeat layers")
    kept = _kept(origin, layers, keep, parts, drop_mtp=drop_mtp)
    _check_names(kept)
    config, changes = cut_config(
        origin.config, layers, keep, drop_mtp=drop_mtp, not_per_layer=options.not_per_layer,
        modules=tuple(origin.hf),
    )  # fmt: skip
    if options.experts is not None:
        cut_expert_counts(text_part(config), options.experts, changes)
    changes.notes += [*mtp_remarks(text, layers, drop=drop_mtp), *gone_kinds(found, keep, changes.notes)]
    if options.allow_inexact and origin.conversion is None:
        changes.notes.append("--allow-inexact: nothing is rounded in a slice of a Hugging Face checkpoint")
    target = _target(origin, options, kept, config, layers, keep)
    dropped = _dropped(origin, layers, keep, parts, drop_mtp=drop_mtp)
    return SlicePlan(layers, found, keep, chosen, nbytes, kept, dropped, config, changes, target)


def _expert_parts(origin: Origin, options: SliceOptions) -> dict[str, Part]:
    """What is kept of every tensor, as --experts asks."""
    if options.experts is None:
        return {name: Part(None) for name in origin.hf}
    count = expert_count(text_part(origin.config))
    check_experts(options.experts, count, text_part(origin.config))
    return experts_kept(origin.hf, count, options.experts)


def _shape(origin: Origin, name: str, rows: int | None) -> tuple[int, ...]:
    shape = origin.hf[name]
    return shape if rows is None else (rows, *shape[1:])


def _nbytes(origin: Origin, name: str, parts: dict[str, Part]) -> int:
    if name not in parts:
        return 0
    shape = _shape(origin, name, parts[name].rows)
    return Region.whole(shape).numel * DTYPE_NBYTES[origin.dtypes[name]]


def _kept(
    origin: Origin, layers: Layers, keep: Sequence[int], parts: dict[str, Part], *, drop_mtp: bool
) -> dict[str, Kept]:
    """New name -> what it is, in the source's order, so that neighbours stay neighbours."""
    home = {name: i for i, names in enumerate(layers.decoder) for name in names}
    tail = {name: i for i, names in enumerate(layers.tail) for name in names}
    at: dict[int, list[int]] = {}
    for new, old in enumerate(keep):
        at.setdefault(old, []).append(new)
    mtp = set(layers.mtp)
    out: dict[str, Kept] = {}
    for name in origin.hf:
        if name not in parts or (drop_mtp and (name in mtp or name in tail)):
            continue
        kept = Kept(name, parts[name].rows)
        if name in home:
            made = [layers.renumbered(name, new) for new in at.get(home[name], [])]
        elif name in tail:
            made = [layers.renumbered(name, len(keep) + tail[name])]
        else:
            made = [name]
        for new_name in made:
            if new_name in out:  # `layers.0.` and `layers.00.` are one number
                raise AccountingError(
                    f"two tensors would have the name {tick(new_name)}",
                    found=f"{tick(out[new_name].source)}, {tick(name)}",
                    fix="rename one of them in the source",
                )
            out[new_name] = kept
    return out


def _check_names(kept: dict[str, Kept]) -> None:
    if not kept:
        raise AccountingError("nothing is left to write", fix="choose other layers")


def _dropped(
    origin: Origin, layers: Layers, keep: Sequence[int], parts: dict[str, Part], *, drop_mtp: bool
) -> dict[str, int]:
    """Every tensor of the source that is not kept, by reason: with the kept ones they are all there are."""
    kept = set(keep)
    mtp = {*layers.mtp, *(name for names in layers.tail for name in names)}
    gone = [n for i, names in enumerate(layers.decoder) if i not in kept for n in names]
    rest = set(gone)
    head = [n for n in origin.hf if drop_mtp and n in mtp]
    rest |= set(head)
    experts = [n for n in origin.hf if n not in parts and n not in rest]
    found = {"of other layers": len(gone), "of the MTP head": len(head), "of other experts": len(experts)}
    return {reason: n for reason, n in found.items() if n}


def _target(
    origin: Origin,
    options: SliceOptions,
    kept: dict[str, Kept],
    config: dict[str, object],
    layers: Layers,
    keep: Sequence[int],
) -> Target:
    shapes = {new: _shape(origin, *k) for new, k in kept.items()}
    dtypes = {new: origin.dtypes[k.source] for new, k in kept.items()}
    pieces = tuple(block(new, k.source, Region.whole(shapes[new])) for new, k in kept.items())
    sources = {k.source: origin.hf[k.source] for k in kept.values()}
    plan = plan_hf([(n, dtypes[n], shape) for n, shape in shapes.items()], options.shard_nbytes)
    side = [SideFile("config.json", config_bytes(origin, config))]
    for file in origin.side_files:
        if file.path == QUANT_FILE and not isinstance(file.content, bytes):
            raw, found = read_json(file.content, 50_000_000, constants=True)
            changed = renumber_modules(found, layers, keep, tuple(origin.hf), drop_mtp=options.mtp == "drop")
            side.append(
                SideFile(file.path, raw if changed == found else json.dumps(changed, indent=2).encode())
            )
        else:
            side.append(file)
    index = (SideFile(INDEX_NAME, plan.index),) if plan.index else ()
    lies_at = _lies_at(origin, kept)
    files = tuple(lined_up(file, lies_at) for file in plan.files)
    return Target("hf", files, Mapping(shapes, sources, pieces), dtypes, side_files=tuple(side), last=index)


def _lies_at(origin: Origin, kept: dict[str, Kept]) -> dict[str, int]:
    """Where in its file each tensor's bytes lie, if they lie in one piece."""
    if origin.to_hf is not None:
        return {}
    blobs = {new: origin.tensors[k.source].blobs for new, k in kept.items()}
    return {new: found[0].offset for new, found in blobs.items() if len(found) == 1}


def config_bytes(origin: Origin, config: dict[str, object]) -> bytes:
    """config.json of the slice: the very bytes of the source where nothing changed."""
    if config == origin.config:
        return origin.config_bytes
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
