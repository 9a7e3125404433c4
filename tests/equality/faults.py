"""Single faults as they have been seen in real converters and syncs, each on the tensors of a small model."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.equality.equal_pairs import NAN, NEGATIVE_ZERO, array, put
from tests.tensors import Content

LAYER = re.compile(r"(.*?layers\.)(\d+)\.(.+)")
EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(.+)")


@dataclass(frozen=True)
class Fault:
    """What was done, and to which tensors."""

    content: Content
    names: frozenset[str]
    """The tensors that must be named, and no other."""
    says: tuple[str, ...] = ()
    """Words of which the cause holds one, where the cause must be found."""


Made = Fault | None
Maker = Callable[[Content, random.Random, dict[str, Any]], Made]
FAULTS: dict[str, Maker] = {}


def fault(maker: Maker) -> Maker:
    FAULTS[maker.__name__] = maker
    return maker


def _pick(content: Content, rng: random.Random, *endings: str, least: int = 1) -> str | None:
    names = [n for n, (_, _, data) in content.items() if n.endswith(endings or "") and len(data) > least]
    return rng.choice(names) if names else None


def _swapped_rows(content: Content, name: str, x: slice, y: slice, axis: int = 0) -> Content:
    raw = array(content, name)
    rows = np.moveaxis(raw, axis, 0)
    rows[x], rows[y] = rows[y].copy(), rows[x].copy()
    return put(content, name, raw)


@fault
def flip_one_bit(content: Content, rng: random.Random, _: dict[str, Any]) -> Made:
    name = _pick(content, rng)
    assert name
    raw = array(content, name)
    flat = raw.reshape(-1)
    flat[rng.randrange(len(flat))] ^= flat.dtype.type(1 << rng.randrange(8 * flat.itemsize))
    return Fault(put(content, name, raw), frozenset([name]), ("one bit", "zeros", "NaN"))


@fault
def swap_two_experts(content: Content, rng: random.Random, _: dict[str, Any]) -> Made:
    fused = [n for n in content if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    if fused:
        name = rng.choice(fused)
        e, f = rng.sample(range(content[name][1][0]), 2)
        return Fault(
            _swapped_rows(content, name, slice(e, e + 1), slice(f, f + 1)), _per_expert(name, (e, f))
        )
    found = [m for n in content if (m := EXPERT.match(n))]
    if not found:
        return None
    at = rng.choice(found)[1]
    e, f = rng.sample(sorted({int(m[2]) for m in found if m[1] == at}), 2)
    tails = [m[3] for m in found if m[1] == at and int(m[2]) == e]
    out = dict(content)
    for tail in tails:
        out[f"{at}{e}.{tail}"], out[f"{at}{f}.{tail}"] = (
            content[f"{at}{f}.{tail}"],
            content[f"{at}{e}.{tail}"],
        )
    names = frozenset(f"{at}{x}.{tail}" for x in (e, f) for tail in tails)
    return Fault(out, names, ("experts are permuted",))


def _per_expert(name: str, experts: tuple[int, ...]) -> frozenset[str]:
    """The published names of a fused tensor's experts."""
    stem, _, kind = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    return frozenset(f"{stem}.{e}.{part}.weight" for e in experts for part in parts)


@fault
def swap_gate_and_up(content: Content, rng: random.Random, _: dict[str, Any]) -> Made:
    name = _pick(content, rng, "gate_proj.weight")
    if name is None:
        return None
    other = name.replace("gate_proj", "up_proj")
    out = content | {name: content[other], other: content[name]}
    return Fault(out, frozenset([name, other]), ("gate and up are swapped",))


@fault
def swap_z_and_x(content: Content, rng: random.Random, config: dict[str, Any]) -> Made:
    name = _pick(content, rng, "mixer.in_proj.weight")
    if name is None:
        return None
    n = config["mamba_num_heads"] * config["mamba_head_dim"]
    out = _swapped_rows(content, name, slice(0, n), slice(n, 2 * n))
    return Fault(out, frozenset([name]), ("z and x are swapped",))


@fault
def shift_qkv_groups(content: Content, rng: random.Random, config: dict[str, Any]) -> Made:
    name = _pick(content, rng, "q_proj.weight", "k_proj.weight", "v_proj.weight")
    if name is None:
        return None
    group = config["head_dim"] if "q_proj" not in name else config["head_dim"] * 3
    raw = np.roll(array(content, name), group, axis=0)
    if np.array_equal(raw, array(content, name)):
        return None
    return Fault(put(content, name, raw), frozenset([name]), ("shifted", "swapped", "permuted"))


@fault
def permute_heads(content: Content, rng: random.Random, config: dict[str, Any]) -> Made:
    name = _pick(content, rng, "q_proj.weight")
    if name is None:
        return None
    raw = array(content, name)
    order = list(range(raw.shape[0] // config["head_dim"]))
    rng.shuffle(order)
    if order == sorted(order):
        return None
    heads = raw.reshape(len(order), -1)[order].reshape(raw.shape)
    said = ("heads are", "shifted", "re-interleaved", "swapped")
    return Fault(put(content, name, heads), frozenset([name]), said)


@fault
def cast_through_bf16(content: Content, rng: random.Random, _: dict[str, Any]) -> Made:
    names = [n for n, (dtype, _, data) in content.items() if dtype == "F32" and data]
    name = rng.choice(names) if names else None
    if name is None:
        return None
    raw = array(content, name)
    rounded = (raw + 0x7FFF + (raw >> 16 & 1)) & np.uint32(0xFFFF0000)
    nan = (raw & 0x7FFFFFFF) > 0x7F800000
    rounded[nan] = raw[nan] & np.uint32(0xFFFF0000)
    if np.array_equal(rounded, raw):
        return None
    return Fault(put(content, name, rounded), frozenset([name]), ("cast through bf16",))


@fault
def drop_a_tensor(content: Content, rng: random.Random, config: dict[str, Any]) -> Made:
    names = [n for n in content if not (n == "lm_head.weight" and config.get("tie_word_embeddings"))]
    name = rng.choice(names)
    out = {n: t for n, t in content.items() if n != name}
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return Fault(out, _per_expert(name, tuple(range(content[name][1][0]))))
    return Fault(out, frozenset([name]))


@fault
def duplicate_a_tensor(content: Content, rng: random.Random, _: dict[str, Any]) -> Made:
    name = rng.choice(list(content))
    return Fault(content | {f"{name}_copy": content[name]}, frozenset([f"{name}_copy"]))


@fault
def keep_a_stale_layer(content: Content, rng: random.Random, _: dict[str, Any]) -> Made:
    name = _pick(content, rng)
    found = LAYER.match(name or "")
    if found is None:
        return None
    others = [
        n for n, (_, shape, _) in content.items()
        if (m := LAYER.match(n)) and m[3] == found[3] and m[2] != found[2] and shape == content[name or ""][1]
    ]  # fmt: skip
    other = rng.choice(others) if others else None
    if name is None or other is None or content[other] == content[name]:
        return None
    return Fault(content | {name: content[other]}, frozenset([name]), ("layer",))


@fault
def lose_the_sign_of_zero(content: Content, rng: random.Random, _: dict[str, Any]) -> Made:
    name = _pick(content, rng)
    assert name
    raw = array(content, name)
    where = np.argwhere(raw == NEGATIVE_ZERO[content[name][0]])
    if not len(where):
        return None
    raw[tuple(where[rng.randrange(len(where))])] = 0
    return Fault(put(content, name, raw), frozenset([name]), ("signs of zeros",))


@fault
def change_a_nan(content: Content, rng: random.Random, _: dict[str, Any]) -> Made:
    name = _pick(content, rng)
    assert name
    raw = array(content, name)
    where = np.argwhere(raw == NAN[content[name][0]])
    if not len(where):
        return None
    raw[tuple(where[rng.randrange(len(where))])] ^= 2
    return Fault(put(content, name, raw), frozenset([name]), ("payloads of NaN",))


@fault
def transpose(content: Content, rng: random.Random, _: dict[str, Any]) -> Made:
    name = _pick(content, rng)
    raw = array(content, name or "")
    if raw.ndim != 2 or min(raw.shape) < 2:
        return None
    changed = np.ascontiguousarray(raw.T).reshape(raw.shape)
    if np.array_equal(changed, raw):
        return None
    return Fault(put(content, name or "", changed), frozenset([name or ""]), ("transposed",))


@fault
def leave_unfilled(content: Content, rng: random.Random, _: dict[str, Any]) -> Made:
    name = _pick(content, rng)
    raw = array(content, name or "")
    if not raw.any():
        return None
    return Fault(put(content, name or "", np.zeros_like(raw)), frozenset([name or ""]), ("all zeros",))


@fault
def shuffle_rows(content: Content, rng: random.Random, _: dict[str, Any]) -> Made:
    name = _pick(content, rng, ".weight", least=64)
    raw = array(content, name or "")
    order = list(range(len(raw)))
    rng.shuffle(order)
    if np.array_equal(raw[order], raw):
        return None
    said = ("permuted", "swapped", "shifted", "re-interleaved", "another order")
    return Fault(put(content, name or "", raw[order]), frozenset([name or ""]), said)


@fault
def swap_two_elements(content: Content, rng: random.Random, _: dict[str, Any]) -> Made:
    name = _pick(content, rng, least=8)
    raw = array(content, name or "")
    flat = raw.reshape(-1)
    i, j = rng.sample(range(len(flat)), 2)
    if flat[i] == flat[j]:
        return None
    flat[i], flat[j] = flat[j], flat[i]
    return Fault(put(content, name or "", raw), frozenset([name or ""]))


@fault
def change_the_dtype(content: Content, rng: random.Random, _: dict[str, Any]) -> Made:
    name = _pick(content, rng)
    assert name
    dtype, shape, data = content[name]
    other = {"BF16": "F16", "F32": "F64", "F16": "BF16"}[dtype]
    return Fault(content | {name: (other, shape, data * (2 if dtype == "F32" else 1))}, frozenset([name]))


@fault
def lose_a_row(content: Content, rng: random.Random, _: dict[str, Any]) -> Made:
    name = _pick(content, rng, ".weight", least=64)
    raw = array(content, name or "")
    if name is None or len(raw) < 2 or ".experts." in name:
        return None
    return Fault(put(content, name, raw[:-1]), frozenset([name]))
