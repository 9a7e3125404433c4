"""Read small checkpoints whole, by means that share nothing with convtools: for comparing."""

import json
from pathlib import Path
from typing import Any

Content = dict[str, tuple[str, tuple[int, ...], bytes]]


def read_safetensors(path: Path) -> Content:
    """name -> (dtype, shape, bytes) of one file."""
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    header.pop("__metadata__", None)
    out: Content = {}
    for name, entry in header.items():
        a, b = entry["data_offsets"]
        out[name] = (entry["dtype"], tuple(entry["shape"]), data[8 + n + a : 8 + n + b])
    return out


def read_hf(root: Path) -> Content:
    """Every tensor of every safetensors file of a folder."""
    out: Content = {}
    for path in sorted(root.glob("*.safetensors")):
        for name, value in read_safetensors(path).items():
            assert name not in out, f"{name} lies in two files"
            out[name] = value
    return out


_NAME = {"torch.bfloat16": "BF16", "torch.float32": "F32", "torch.float16": "F16", "torch.float64": "F64"}


def of_torch(tensor: Any) -> tuple[str, tuple[int, ...], bytes]:
    """The same of a torch tensor."""
    import torch

    flat = tensor.detach().contiguous().view(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return _NAME[str(tensor.dtype)], tuple(tensor.shape), data


def read_rank(path: Path) -> tuple[dict[str, Any], Content, list[str]]:
    """(the whole dict, its tensors, names of extra states) of a `model_optim_rng.pt`, read by torch."""
    import torch

    value = torch.load(path, weights_only=False)
    model = value["model"]
    extra = [n for n in model if n.endswith("_extra_state")]
    return value, {n: of_torch(t) for n, t in model.items() if n not in extra}, extra


def differences(a: Content, b: Content) -> list[str]:
    """Names that differ, with what differs; empty where both hold the same."""
    out = [f"only left: {n}" for n in a.keys() - b.keys()] + [f"only right: {n}" for n in b.keys() - a.keys()]
    for name in a.keys() & b.keys():
        if a[name][:2] != b[name][:2]:
            out.append(f"{name}: {a[name][:2]} and {b[name][:2]}")
        elif a[name][2] != b[name][2]:
            out.append(f"{name}: bytes differ")
    return sorted(out)
