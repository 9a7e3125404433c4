"""Tiny models, and what SGLang's ranks keep of them, written with torch's chunk, split and cat."""

from collections.abc import Callable
from typing import Any

import torch

Named = dict[str, torch.Tensor]
Engine = list[Named]
"""SGLang's parameters, by rank."""
LAYER = "model.layers.0."
HIDDEN, HEAD = 8, 4


def random(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> Named:
    made = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=made).to(dtype) for name, shape in shapes.items()}


def padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([tensor, torch.zeros(rows - len(tensor), *tensor.shape[1:], dtype=tensor.dtype)])


LLAMA = {
    "model.embed_tokens.weight": (131, HIDDEN), "lm_head.weight": (131, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    f"{LAYER}input_layernorm.weight": (HIDDEN,), f"{LAYER}post_attention_layernorm.weight": (HIDDEN,),
    f"{LAYER}self_attn.q_proj.weight": (4 * HEAD, HIDDEN),
    f"{LAYER}self_attn.k_proj.weight": (2 * HEAD, HIDDEN),
    f"{LAYER}self_attn.v_proj.weight": (2 * HEAD, HIDDEN),
    f"{LAYER}self_attn.o_proj.weight": (HIDDEN, 4 * HEAD),
    f"{LAYER}mlp.gate_proj.weight": (64, HIDDEN), f"{LAYER}mlp.up_proj.weight": (64, HIDDEN),
    f"{LAYER}mlp.down_proj.weight": (HIDDEN, 64),
}  # fmt: skip
LLAMA_CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama_engine(w: Named, tp: int) -> Engine:
    """With a vocabulary that is padded."""

    def rank(r: int) -> Named:
        a, m = f"{LAYER}self_attn.", f"{LAYER}mlp."
        rows: Callable[[str], torch.Tensor] = lambda n: w[f"{n}.weight"].chunk(tp)[r]  # noqa: E731
        return {
            "model.embed_tokens.weight": padded(w["model.embed_tokens.weight"], 192).chunk(tp)[r],
            f"{a}qkv_proj.weight": torch.cat([rows(f"{a}{k}_proj") for k in "qkv"]),
            f"{a}o_proj.weight": w[f"{a}o_proj.weight"].chunk(tp, 1)[r],
            f"{m}gate_up_proj.weight": torch.cat([rows(f"{m}gate_proj"), rows(f"{m}up_proj")]),
            f"{m}down_proj.weight": w[f"{m}down_proj.weight"].chunk(tp, 1)[r],
            **{n: w[n] for n in w if "norm" in n},
            "lm_head.weight": padded(w["lm_head.weight"], 192).chunk(tp)[r],
        }  # fmt: skip

    return [rank(r) for r in range(tp)]


def moe_engine(w: Named, tp: int) -> Engine:
    def rank(r: int) -> Named:
        e = f"{LAYER}mlp.experts."
        each = [[w[f"{e}{i}.{k}_proj.weight"] for k in ("gate", "up", "down")] for i in range(3)]
        ups = [torch.cat([gate.chunk(tp)[r], up.chunk(tp)[r]]) for gate, up, _ in each]
        return {
            f"{e}w13_weight": torch.stack(ups),
            f"{e}w2_weight": torch.stack([down.chunk(tp, 1)[r] for _, _, down in each]),
            f"{LAYER}mlp.gate.weight": w[f"{LAYER}mlp.gate.weight"],
            f"{LAYER}self_attn.k_norm.weight": w[f"{LAYER}self_attn.k_norm.weight"],
        }

    return [rank(r) for r in range(tp)]


MOE = {f"{LAYER}mlp.gate.weight": (3, HIDDEN), f"{LAYER}self_attn.k_norm.weight": (HEAD,)} | {
    f"{LAYER}mlp.experts.{e}.{k}_proj.weight": (HIDDEN, 64) if k == "down" else (64, HIDDEN)
    for e in range(3) for k in ("gate", "up", "down")
}  # fmt: skip
INNER, STATE, HEADS = 8, 2, 4


def mamba(groups: int) -> dict[str, tuple[int, ...]]:
    m, conv = "backbone.layers.0.mixer.", INNER + 2 * groups * STATE
    return {
        f"{m}in_proj.weight": (INNER + conv + HEADS, HIDDEN), f"{m}conv1d.weight": (conv, 1, 4),
        f"{m}conv1d.bias": (conv,), f"{m}A_log": (HEADS,), f"{m}D": (HEADS,), f"{m}dt_bias": (HEADS,),
        f"{m}norm.weight": (INNER,), f"{m}out_proj.weight": (HIDDEN, INNER),
        "backbone.layers.0.norm.weight": (HIDDEN,), "backbone.layers.1.mixer.gate.weight": (3, HIDDEN),
        "backbone.layers.1.mixer.gate.e_score_correction_bias": (3,),
        "backbone.layers.1.mixer.experts.0.up_proj.weight": (64, HIDDEN),
        "backbone.layers.1.mixer.experts.0.down_proj.weight": (HIDDEN, 64),
    }  # fmt: skip


def nemotron_engine(w: Named, tp: int, groups: int) -> Engine:
    gs = groups * STATE

    def sections(tensor: torch.Tensor, sizes: list[int], r: int) -> torch.Tensor:
        parts = tensor.split(sizes)
        return torch.cat([p.chunk(tp)[r] for p in parts])

    def rank(r: int) -> Named:
        b, m, e = "backbone.layers.0.mixer.", f"{LAYER}mixer.", "model.layers.1.mixer."
        conv = [INNER, gs, gs]
        out = {
            f"{m}A": -torch.exp(w[f"{b}A_log"].chunk(tp)[r].float()),
            f"{m}in_proj.weight": sections(w[f"{b}in_proj.weight"], [INNER, *conv, HEADS], r),
            f"{m}conv1d.weight": sections(w[f"{b}conv1d.weight"], conv, r),
            f"{m}conv1d.bias": sections(w[f"{b}conv1d.bias"], conv, r),
            f"{m}out_proj.weight": w[f"{b}out_proj.weight"].chunk(tp, 1)[r],
            f"{LAYER}norm.weight": w["backbone.layers.0.norm.weight"],
            f"{e}gate.weight": w[f"backbone.{e[6:]}gate.weight"],
            f"{e}gate.e_score_correction_bias": w[f"backbone.{e[6:]}gate.e_score_correction_bias"].float(),
            f"{e}experts.w13_weight": w[f"backbone.{e[6:]}experts.0.up_proj.weight"].chunk(tp)[r],
            f"{e}experts.w2_weight": w[f"backbone.{e[6:]}experts.0.down_proj.weight"].chunk(tp, 1)[r],
        }
        return out | {f"{m}{k}": w[f"{b}{k}"].chunk(tp)[r] for k in ("D", "dt_bias", "norm.weight")}

    return [rank(r) for r in range(tp)]


def case(kind: str, tp: int) -> tuple[Named, Engine, str, dict[str, Any]]:
    if kind == "llama":
        w = random(LLAMA)
        return w, llama_engine(w, tp), "LlamaForCausalLM", LLAMA_CONFIG
    if kind == "moe":
        w = random(MOE)
        return w, moe_engine(w, tp), "Qwen3MoeForCausalLM", {}
    groups = int(kind[-1])
    w = random(mamba(groups))
    return w, nemotron_engine(w, tp, groups), "NemotronHForCausalLM", {"n_groups": groups}


def together(w: Named) -> list[set[str]]:
    """Tensors that SGLang keeps in one parameter."""
    marks = [
        ("q_proj", "k_proj", "v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("experts", "gate_proj", "up_proj"),
    ]
    groups = [{n for n in w if any(m in n for m in of) and "experts" not in n} for of in marks[:2]]
    groups += [{n for n in w if "experts." in n and ("down_proj" in n) is down} for down in (True, False)]
    return [*groups, *({n} for n in w)]
