"""Keep the first N routed experts: router rows, biases, expert tensors and the config's counts together."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from convtools.errors import AccountingError, ConfigError, UsageError, capped
from convtools.slicing.config_cut import Changes
from convtools.slicing.kinds import EXPERT

COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")
"""Config fields that say how many routed experts a layer has."""
TOPK = ("num_experts_per_tok", "num_experts_per_token",
        "moe_topk", "top_k_experts", "moe_top_k", "experts_per_token",
        "moe_k", "num_selected_experts")  # fmt: skip
"""Config fields that say how many experts a token goes to."""
GROUPS, GROUP_TOPK = ("n_group", "moe_router_num_groups"), ("topk_group", "moe_router_group_topk")

_ROUTER = re.compile(
    r"(^|\.)(gate|router|router_proj|wg)(\.(weight|bias|e_score_correction_bias|expert_bias|linear\.weight"
    r"|linear\.bias|layer\.weight|wg\.weight|classifier\.weight|proj\.weight|per_expert_scale))?$"
    r"|(^|\.)(router_bias|e_score_correction_bias|expert_bias|expert_biases|per_expert_scale"
    r"|moe_statics\.e_score_correction_bias)$"
)
"""A router's tensors within the MoE module: a row for each expert."""
_OTHER = re.compile(r"(^|\.)(shared?_?(experts?|mlp|expert_gate)|\w*latent_proj|\w*norm|router\.scale)(\.|$)")
"""What else lies in MoE modules, whatever its sizes."""
_ALONE = ("moe", "block_sparse_moe")
"""Modules whose fused experts lie directly in them."""


class Part(NamedTuple):
    """What is kept of a tensor."""

    rows: int | None
    """The first so many along dim 0; None: all."""


def experts_kept(shapes: Mapping[str, tuple[int, ...]], count: int, keep: int) -> dict[str, Part]:
    """(shapes of the tensors, the model's number of experts, how many to keep) -> what is kept of each.

    A tensor that is left out is an expert's that goes. Raises AccountingError for a tensor inside an MoE
    module that is as long as there are experts and is not known, for an MoE module without a router, and
    where there are no experts.
    """
    homes = {_home(name) for name in shapes} - {""}
    out: dict[str, Part] = {}
    strange: list[str] = []
    routers: set[str] = set()
    filled: set[str] = set()
    for name, shape in shapes.items():
        home = next((h for h in _above(name) if h in homes), None)
        inside = name[len(home) :] if home is not None else ""
        match = EXPERT.search(name)
        if home is None or not shape or _OTHER.search(inside):
            out[name] = Part(None)
        elif match:
            filled.add(home)
            if int(match[2]) < keep:
                out[name] = Part(None)
            elif int(match[2]) >= count:
                strange.append(f"`{name}` (the config has {count} experts)")
        elif (router := _ROUTER.search(inside)) or _fused(inside, shape, count):
            (routers if router else filled).add(home)
            if shape[0] != count:
                strange.append(f"`{name}` {list(shape)}: expected {count} first")
            out[name] = Part(keep)
        else:
            if count in shape:
                strange.append(f"`{name}` {list(shape)}: is one of its sizes the number of experts?")
            out[name] = Part(None)
    strange += [f"`{home}*`: experts without a known router" for home in sorted(filled - routers)]
    if not filled:
        strange.append("no tensor is a routed expert's, by its name")
    if strange:
        raise AccountingError(
            f"--experts: it is unclear how to cut these tensors: {capped(strange)}",
            fix="slice without --experts, or convert with a family that knows this model",
        )
    return out


def _home(name: str) -> str:
    """The module that holds router and experts: what stands before `experts.`, or a module called `moe`."""
    parts = name.split(".")
    if "experts" in parts[1:]:
        return ".".join(parts[: parts.index("experts")]) + "."
    at = next((i for i, part in enumerate(parts[:-1]) if part in _ALONE), None)
    return "" if at is None else ".".join(parts[: at + 1]) + "."


def _above(name: str) -> list[str]:
    """Modules that a tensor lies in, the innermost first."""
    return [name[: i + 1] for i in range(len(name) - 1, 0, -1) if name[i] == "."]


def _fused(inside: str, shape: tuple[int, ...], count: int) -> bool:
    """Whether a tensor holds all experts, along dim 0."""
    if inside.startswith("experts."):
        return True
    return len(shape) == 3 and shape[0] == count and not inside.startswith(("gate.", "router."))


def expert_count(text: Mapping[str, Any]) -> int:
    """The number of routed experts of a config. Raises ConfigError, UsageError."""
    said = {key: text[key] for key in COUNTS if type(text.get(key)) is int}
    if not said:
        lists = [key for key in COUNTS if isinstance(text.get(key), list)]
        raise UsageError(
            "--experts: the config says of no number of routed experts",
            expected=f"one of {', '.join(COUNTS)}",
            found=f"a list in `{lists[0]}`" if lists else "none of them",
        )
    if len(set(said.values())) > 1:
        raise ConfigError(
            "the config contradicts itself about its number of experts",
            found=", ".join(f"{k}: {v}" for k, v in said.items()),
        )
    return int(next(iter(said.values())))


def cut_expert_counts(text: dict[str, Any], keep: int, changes: Changes) -> None:
    """Set the counts of a config, and clip what must not be larger; each change is noted."""
    for key in COUNTS:
        if type(text.get(key)) is int:
            changes.set(text, key, keep)
    _clip(text, keep, f"a token goes to all {keep} experts", changes)
    group = next((key for key in GROUPS if type(text.get(key)) is int), None)
    if group and text[group] > 1:
        n = next(
            g for g in range(min(text[group], keep), 0, -1) if keep % g == 0 and (g == 1 or keep // g > 1)
        )
        if n != text[group]:
            changes.notes.append(f"`{group}` is clipped: {keep} experts make {n} groups of at least two")
        changes.set(text, group, n)
    for key in GROUP_TOPK:
        if group and type(text.get(key)) is int and text[key] > text[group]:
            changes.set(text, key, text[group])
    groups = text[group] if group else 1
    chosen = next((text[key] for key in GROUP_TOPK if type(text.get(key)) is int), groups)
    room = chosen * keep // groups
    _clip(text, room, f"{chosen} of {groups} groups hold {room} experts", changes)


def _clip(text: dict[str, Any], most: int, why: str, changes: Changes) -> None:
    """A token goes to at most `most` experts, in every layer."""
    for key in TOPK:
        said = text.get(key)
        if isinstance(said, list) and all(type(n) is int for n in said):
            clipped: Any = [min(n, most) for n in said]
        else:
            clipped = min(said, most) if type(said) is int else said
        if clipped != said:
            changes.set(text, key, clipped)
            changes.notes.append(f"`{key}` is clipped: {why}")


def check_experts(keep: int, count: int) -> None:
    """Raise UsageError unless `keep` is a number of experts that the model has."""
    if not 1 <= keep <= count:
        raise UsageError(f"--experts {keep}", expected=f"1 to {count}: the model has {count}")
