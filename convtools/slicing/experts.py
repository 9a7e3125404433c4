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
GROUPS = ("n_group", "num_expert_group", "moe_router_num_groups")
GROUP_TOPK = ("topk_group", "moe_router_group_topk")
_TOP_TWO = frozenset((
    "axk1", "axk2", "bailing_hybrid", "beam", "deepseek_v3", "deepseek_v32", "dots1", "dots3_note_text",
    "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "glm5_next_text", "glm_moe_dsa", "hy_v4",
    "hy_v4_vl_text", "kimi_linear", "mimo_v2_flash", "mistral4", "mistral_large4_text", "nemotron_h",
    "solar_open",
))  # fmt: skip
"""`model_type`s whose router adds up the two best experts of each group, also where there is one group."""
_BEST_ONE = ("greedy", "group_limited_greedy")
"""`topk_method`s that look at the best expert of a group alone (DeepSeek-V2)."""
_EIGHT_GROUPS = frozenset(("axk1", "bailing_hybrid", "beam", "deepseek_v3", "deepseek_v32"))
"""`model_type`s that have 8 groups, of which 4 are chosen, where the config does not say."""
_TWO = {
    "phimoe": "the router takes a first and a second expert, whatever the config says",
    "jamba": "the model's code makes a dense layer of one with a single expert",
}
"""`model_type`s that need two experts for another reason."""

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
        for key in COUNTS:
            if isinstance(text.get(key), list):
                raise UsageError(
                    f"--experts: `{key}` gives each layer a number of its own",
                    expected="one number of routed experts for all layers",
                    fix="slice without --experts",
                )
        raise UsageError(
            "--experts: this model has no routed experts",
            expected=f"their number in config.json, as one of {', '.join(COUNTS)}",
            found="none of these",
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
    if not any(text.get(key) is not None for key in TOPK):
        changes.notes.append(
            f"the config does not say how many experts a token goes to: that must not be more than {keep}"
        )
    group = _groups(text, keep, changes)
    for key in GROUP_TOPK:
        if group and type(text.get(key)) is int and text[key] > text[group]:
            changes.set(text, key, text[group])
    groups = text[group] if group else 1
    chosen = next((text[key] for key in GROUP_TOPK if type(text.get(key)) is int), groups)
    room = chosen * keep // groups
    _clip(text, room, f"{chosen} of {groups} groups hold {room} experts", changes)


def _groups(text: dict[str, Any], keep: int, changes: Changes) -> str | None:
    """Clip the number of groups; returns the field that says it."""
    said = [key for key in GROUPS if type(text.get(key)) is int]
    if not said and text.get("model_type") in _EIGHT_GROUPS:
        if _most_groups(8, keep) == 8:
            return None
        for key, value in (("n_group", 8), ("topk_group", 4)):
            if text.get(key) is None:
                text[key] = value  # what the model's code takes for granted, to be clipped
        said = ["n_group"]
    for key in said:
        n = _most_groups(text[key], keep)
        if n != text[key] and text[key] > 1:
            parts = f"{n} groups of {keep // n}" if n > 1 else "one group"
            changes.notes.append(f"`{key}` is clipped: {keep} experts make {parts}")
            changes.set(text, key, n)
    return said[0] if said else None


def _most_groups(groups: int, keep: int) -> int:
    """The largest number of groups, up to `groups`, of one size that is at least two."""
    few = range(min(groups, keep // 2), 1, -1)
    return next((g for g in few if keep % g == 0), 1)


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


def fewest_experts(text: Mapping[str, Any]) -> tuple[int, str]:
    """The fewest experts that the model's router works with, and why."""
    model_type = text.get("model_type")
    if model_type in _TWO:
        return 2, _TWO[str(model_type)]
    grouped = any(type(text.get(key)) is int for key in GROUPS) and model_type != "deepseek_v2"
    if model_type in _TOP_TWO or (grouped and text.get("topk_method") not in _BEST_ONE):
        return 2, "the router takes the top 2 of each group"
    return 1, ""


def check_experts(keep: int, count: int, text: Mapping[str, Any]) -> None:
    """Raise UsageError unless `keep` is a number of experts that the model has, and can run with."""
    least, why = fewest_experts(text)
    if 1 <= keep < least:
        raise UsageError(f"--experts {keep} is too few", expected=f"at least {least}: {why}")
    if not 1 <= keep <= count:
        raise UsageError(f"--experts {keep}", expected=f"{least} to {count}: the model has {count}")
