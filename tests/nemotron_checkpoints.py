"""Make Nemotron-H checkpoints of any size on the spot: random, row-numbered, or all holes.

The inventory is written out by hand from the published checkpoints, not taken from convtools'
tables, so that it checks them.
"""

import json
from pathlib import Path
from typing import Any

ULTRA_PATTERN = (
    "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*"
    "EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
)

TINY: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "ME*-",
    "num_hidden_layers": 4,
    "vocab_size": 23,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 28,
    "mamba_num_heads": 4,
    "mamba_head_dim": 3,
    "n_groups": 2,
    "ssm_state_size": 5,
    "conv_kernel": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "moe_latent_size": 8,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "layer_norm_epsilon": 1e-5,
    "time_step_limit": [0.0, float("inf")],
}

ULTRA: dict[str, Any] = TINY | {
    "hybrid_override_pattern": ULTRA_PATTERN,
    "num_hidden_layers": 108,
    "vocab_size": 131072,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 256,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "n_routed_experts": 512,
    "moe_intermediate_size": 5120,
    "moe_shared_expert_intermediate_size": 10240,
    "moe_latent_size": 2048,
    "num_experts_per_tok": 22,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
}

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def inventory(config: dict[str, Any], prefix: str = "backbone.") -> Tensors:
    """Name -> (dtype, shape) of every tensor of the model, as published checkpoints have them."""
    c, h = config, config["hidden_size"]
    out: Tensors = {f"{prefix}embeddings.weight": ("BF16", (c["vocab_size"], h))}
    for i, kind in enumerate(c["hybrid_override_pattern"]):
        out |= _layer(c, kind, f"{prefix}layers.{i}.")
    out[f"{prefix}norm_f.weight"] = ("BF16", (h,))
    if not c.get("tie_word_embeddings"):
        out["lm_head.weight"] = ("BF16", (c["vocab_size"], h))
    inner = c.get("mtp_hybrid_override_pattern") or ""
    depths = 1 if c.get("mtp_use_repeated_layer") else c.get("num_nextn_predict_layers", 0)
    for o in range(depths):
        at = o * len(inner)
        out |= {f"mtp.layers.{at}.{n}.weight": ("BF16", s) for n, s in
                (("eh_proj", (h, 2 * h)), ("enorm", (h,)), ("hnorm", (h,)))}  # fmt: skip
        for j, kind in enumerate(inner):
            out |= _layer(c, kind, f"mtp.layers.{at + j}.")
        out[f"mtp.layers.{at + len(inner) - 1}.final_layernorm.weight"] = ("BF16", (h,))
    return out


def _layer(c: dict[str, Any], kind: str, at: str) -> Tensors:
    h = c["hidden_size"]
    out: Tensors = {f"{at}norm.weight": ("BF16", (h,))}
    m = f"{at}mixer."
    if kind == "M":
        nh, d, gs = (
            c["mamba_num_heads"],
            c["mamba_num_heads"] * c["mamba_head_dim"],
            c["n_groups"] * c["ssm_state_size"],
        )
        out[f"{m}in_proj.weight"] = ("BF16", (2 * d + 2 * gs + nh, h))
        out[f"{m}conv1d.weight"] = ("BF16", (d + 2 * gs, 1, c["conv_kernel"]))
        out[f"{m}conv1d.bias"] = ("BF16", (d + 2 * gs,))
        out |= {f"{m}{n}": ("F32", (nh,)) for n in ("A_log", "D", "dt_bias")}
        out[f"{m}norm.weight"] = ("BF16", (d,))
        out[f"{m}out_proj.weight"] = ("BF16", (h, d))
    elif kind == "*":
        q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        out |= {f"{m}{n}_proj.weight": ("BF16", (rows, h)) for n, rows in (("q", q), ("k", kv), ("v", kv))}
        out[f"{m}o_proj.weight"] = ("BF16", (h, q))
    elif kind == "-":
        out[f"{m}up_proj.weight"] = ("BF16", (c["intermediate_size"], h))
        out[f"{m}down_proj.weight"] = ("BF16", (h, c["intermediate_size"]))
    else:
        e, f, w = c["n_routed_experts"], c["moe_intermediate_size"], c.get("moe_latent_size") or h
        out[f"{m}gate.weight"] = ("BF16", (e, h))
        out[f"{m}gate.e_score_correction_bias"] = ("F32", (e,))
        if c.get("moe_latent_size"):
            out[f"{m}fc1_latent_proj.weight"] = ("BF16", (w, h))
            out[f"{m}fc2_latent_proj.weight"] = ("BF16", (h, w))
        s = c.get("moe_shared_expert_intermediate_size")
        if s:
            out[f"{m}shared_experts.up_proj.weight"] = ("BF16", (s, h))
            out[f"{m}shared_experts.down_proj.weight"] = ("BF16", (h, s))
        for i in range(e):
            out[f"{m}experts.{i}.up_proj.weight"] = ("BF16", (f, w))
            out[f"{m}experts.{i}.down_proj.weight"] = ("BF16", (w, f))
    return out


_WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}


def nbytes(tensors: Tensors) -> int:
    """Bytes of all tensors."""
    total = 0
    for dtype, shape in tensors.values():
        n = _WIDTH[dtype]
        for size in shape:
            n *= size
        total += n
    return total


def write_hf(
    root: Path, config: dict[str, Any], tensors: Tensors | None = None, *, shard: int = 5_000_000_000,
    holes: bool = False, seed: int = 0,
) -> Path:  # fmt: skip
    """Write a checkpoint folder with random bytes (valid floats, no NaN), or with holes only."""
    import numpy as np

    tensors = inventory(config) if tensors is None else tensors
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(config, indent=2))
    files: list[list[str]] = [[]]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        n = nbytes({name: (dtype, shape)})
        if filled and filled + n > shard:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += n
    rng = np.random.default_rng(seed)
    pool = rng.integers(0, 0x3F80, 1 << 22, dtype="<u2")  # bit patterns of bf16 in [0, 1)
    weight_map: dict[str, str] = {}
    for k, names in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{k:05d}-of-{len(files):05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in names:
            n = nbytes({name: tensors[name]})
            header[name] = {
                "dtype": tensors[name][0],
                "shape": list(tensors[name][1]),
                "data_offsets": [at, at + n],
            }
            at += n
            weight_map[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(root / file, "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            if holes:
                f.truncate(8 + len(text) + at)
                continue
            for name in names:
                left = nbytes({name: tensors[name]})
                start = int(rng.integers(0, len(pool) // 2))
                while left:
                    part = pool[start : start + min(left // 2, len(pool) // 2)].tobytes()
                    f.write(part)
                    left -= len(part)
    if len(files) > 1:
        index = {"metadata": {"total_size": nbytes(tensors)}, "weight_map": weight_map}
        (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return root
