"""Small models in every format, made once: what the tests of comparing start from."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

import convtools
from tests.convert.small import filled, write_small_hf
from tests.families.tiny_configs import described, inventory, near_one
from tests.tensors import Content

TP2PP2EP2 = {"tp": 2, "pp": 2, "ep": 2}
BITS = {"BF16": "<u2", "F16": "<u2", "F32": "<u4", "F64": "<u8"}
NEGATIVE_ZERO = {"BF16": 0x8000, "F16": 0x8000, "F32": 0x80000000}
NAN = {"BF16": 0x7FC1, "F16": 0x7E01, "F32": 0x7FC00001}


@dataclass(frozen=True)
class Case:
    """A tiny model of one family."""

    name: str
    architecture: str
    changes: tuple[tuple[str, Any], ...] = ()
    spelling: tuple[tuple[str, Any], ...] = ()
    dtype: str = "BF16"
    sizes: tuple[tuple[str, int], ...] = tuple(TP2PP2EP2.items())

    @property
    def config(self) -> dict[str, Any]:
        model = described(self.architecture, dict(self.changes), dict(self.spelling))
        return dict(model.config)

    def content(self) -> Content:
        return _content(self)


@cache
def _content(case: Case) -> Content:
    """Random finite numbers, a -0.0 and a NaN in every tensor but norms that are shifted."""
    model = described(case.architecture, dict(case.changes), dict(case.spelling))
    copies = {copy.name: copy.of for copy in model.copies()}
    made = filled({n: t for n, t in inventory(model, case.dtype).items() if n not in copies}, seed=7)
    table = model.table(model.spec.vocab)
    shifted = {p.b for p in table.mapping.pieces if table.params[p.a].shift}
    out: Content = {}
    for name, (dtype, shape, data) in made.items():
        raw = np.frombuffer(data, BITS[dtype]).copy()
        if name not in shifted and len(raw) > 4:
            raw[len(raw) // 3], raw[len(raw) // 2] = NEGATIVE_ZERO[dtype], NAN[dtype]
        out[name] = (dtype, shape, raw.tobytes())
    out = near_one(model, out) if shifted else out
    return out | {name: out[of] for name, of in copies.items()}


NEMOTRON = Case("nemotron", "NemotronHForCausalLM")
QWEN3_MOE = Case("qwen3_moe", "Qwen3MoeForCausalLM")
QWEN3_MOE_FUSED = Case("qwen3_moe fused", "Qwen3MoeForCausalLM", spelling=(("fused_experts", True),))
DEEPSEEK = Case("deepseek", "DeepseekV3ForCausalLM")
LLAMA_TIED = Case(
    "llama tied",
    "LlamaForCausalLM",
    (("tie_word_embeddings", True),),
    (("head", True),),
    sizes=(("tp", 2), ("pp", 2)),
)
QWEN3_NEXT = Case("qwen3_next", "Qwen3NextForCausalLM")
QWEN3_FP32 = Case("qwen3 fp32", "Qwen3ForCausalLM", dtype="F32", sizes=(("tp", 2), ("pp", 2)))
CASES = (NEMOTRON, QWEN3_MOE, DEEPSEEK, LLAMA_TIED, QWEN3_NEXT, QWEN3_FP32)


def write_hf(case: Case, root: Path) -> Path:
    return write_small_hf(root, case.config, case.content())


def write_megatron(case: Case, hf: Path, root: Path, to: str) -> Path:
    options = convtools.Options(
        to=to, fsync=False, workers=1, make_vocab_size_divisible_by=8, **dict(case.sizes)
    )
    convtools.convert(hf, root, options)
    return root


def fuse(content: Content) -> Content:
    """Qwen3-MoE's experts in 3-D tensors, put together by hand."""
    experts = 1 + max(int(n.split(".experts.")[1].split(".")[0]) for n in content if ".experts." in n)
    out: Content = {}
    for name, (dtype, shape, data) in content.items():
        if ".experts." not in name:
            out[name] = (dtype, shape, data)
            continue
        at = name.partition("experts.")[0] + "experts."
        if f"{at}down_proj" in out:
            continue
        gate, up, down = (
            [content[f"{at}{e}.{n}_proj.weight"] for e in range(experts)] for n in ("gate", "up", "down")
        )
        rows, width = gate[0][1]
        both = b"".join(g[2] + u[2] for g, u in zip(gate, up, strict=True))
        out[f"{at}gate_up_proj"] = (dtype, (experts, 2 * rows, width), both)
        out[f"{at}down_proj"] = (dtype, (experts, width, rows), b"".join(d[2] for d in down))
    return out


def live(content: Content) -> dict[str, Any]:
    """The same as torch tensors."""
    import torch

    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
    out = {}
    for name, (dtype, shape, data) in content.items():
        flat = (
            torch.frombuffer(bytearray(data), dtype=kinds[dtype])
            if data
            else torch.empty(0, dtype=kinds[dtype])
        )
        out[name] = flat.reshape(shape)
    return out


def array(content: Content, name: str) -> "np.ndarray[Any, Any]":
    """The raw bits of a tensor, to be changed."""
    dtype, shape, data = content[name]
    assert prod(shape) * np.dtype(BITS[dtype]).itemsize == len(data)
    return np.frombuffer(data, BITS[dtype]).reshape(shape).copy()


def put(content: Content, name: str, raw: "np.ndarray[Any, Any]", dtype: str | None = None) -> Content:
    """A copy of the content with one tensor changed."""
    return content | {
        name: (dtype or content[name][0], tuple(raw.shape), np.ascontiguousarray(raw).tobytes())
    }


@contextmanager
def flipped(path: Path, at: int, bit: int) -> Iterator[None]:
    """One bit of a file flipped, and back."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
    try:
        yield
    finally:
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(bytes([byte]))
