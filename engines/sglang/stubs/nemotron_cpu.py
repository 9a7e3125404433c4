"""Test only. What Nemotron-H needs to compute on a CPU: kernels, in plain torch, slow and exact.

SGLang's Mamba-2 layers call Triton kernels, its plain MoE knows no squared ReLU, and its router asks for a
matrix product with another result type, which torch has on GPUs only.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence

import mamba_cpu
import torch

Patch = Callable[[types.ModuleType], None]


def install() -> None:
    """Patch the two modules once they are imported, and `torch.mm` now."""
    sys.meta_path.insert(
        0,
        _AfterImport(
            {
                "sglang.srt.layers.attention.mamba.mamba": _patch_mamba,
                "sglang.srt.layers.moe.fused_moe_native": _patch_moe,
            }
        ),
    )
    _patch_mm()


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, patches: dict[str, Patch]) -> None:
        self._patches = patches

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = self._patches.pop(name, None)
        spec = importlib.util.find_spec(name) if patch is not None else None
        if patch is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _patch_mamba(module: types.ModuleType) -> None:
    for name in ("causal_conv1d_fn", "causal_conv1d_fn_triton"):
        setattr(module, name, mamba_cpu.causal_conv1d_fn)
    for name in ("causal_conv1d_update", "causal_conv1d_update_triton"):
        setattr(module, name, mamba_cpu.causal_conv1d_update)
    for name in ("mamba_chunk_scan_combined", "selective_state_update"):
        setattr(module, name, getattr(mamba_cpu, name))


def _patch_moe(module: types.ModuleType) -> None:
    known = module.moe_forward_native

    def moe_forward_native(layer, x, topk_output, config):  # type: ignore[no-untyped-def]
        if config.activation != "relu2":
            return known(layer, x, topk_output, config)
        weights, ids, _ = topk_output
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in ids.unique().tolist():
            token, place = (ids == expert).nonzero(as_tuple=True)
            hidden = torch.relu(x[token] @ layer.w13_weight[expert].t()).square()
            given = (hidden @ layer.w2_weight[expert].t()).float()
            out.index_add_(0, token, given * weights[token, place].float()[:, None])
        if not getattr(layer, "should_fuse_routed_scaling_factor_in_topk", False):
            out *= config.routed_scaling_factor or 1.0
        return out.to(x.dtype)

    module.moe_forward_native = moe_forward_native


def _patch_mm() -> None:
    known = torch.mm

    def mm(a, b, *args, out_dtype=None, **kwargs):  # type: ignore[no-untyped-def]
        if out_dtype is None:
            return known(a, b, *args, **kwargs)
        if a.device.type == "cpu":
            return known(a.to(out_dtype), b.to(out_dtype), *args, **kwargs)
        return known(a, b, *args, out_dtype=out_dtype, **kwargs)

    torch.mm = mm
