"""For tests only: a worker extension that lets vLLM's Nemotron-H compute on a CPU.

vLLM 0.32 has these kernels for GPUs only. They are replaced by plain torch; the model's classes, its
loading and its reload are vLLM's own.
"""

from typing import Any

import mamba_kernels
import torch
import vllm.model_executor.layers.fused_moe.config as moe_config
import vllm.model_executor.layers.mamba.mamba_mixer2 as mixer
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts

from convtools.refit.vllm.extension import RefitExtension

mixer.causal_conv1d_fn = mamba_kernels.causal_conv1d_fn
mixer.causal_conv1d_update = mamba_kernels.causal_conv1d_update
mixer.mamba_chunk_scan_combined_varlen = mamba_kernels.chunk_scan
mixer.selective_state_update = mamba_kernels.selective_state_update

_post_init = moe_config.FusedMoEConfig.__post_init__
_pack, _apply = Experts.process_weights_after_loading, Experts.apply


def _allow_plain_experts(self: Any) -> None:
    try:
        _post_init(self)
    except NotImplementedError as error:
        if "is_act_and_mul=False" not in str(error):
            raise


def _pack_gated(self: Any, layer: Any) -> None:
    if self.moe_config.is_act_and_mul:
        _pack(self, layer)
    else:
        self._use_zentorch = False


def _apply_plain(
    self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any,
    activation: Any, *args: Any, **rest: Any,
) -> None:  # fmt: skip
    """Experts without a gate: relu, squared."""
    if self.moe_config.is_act_and_mul:
        _apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, *args, **rest)
        return
    out = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        tokens, place = (topk_ids == expert).nonzero(as_tuple=True)
        hidden = torch.relu(hidden_states[tokens] @ w1[expert].t()).square()
        weight = topk_weights[tokens, place].float()[:, None]
        out.index_add_(0, tokens, (hidden @ w2[expert].t()).float() * weight)
    output.copy_(out.to(output.dtype))


moe_config.FusedMoEConfig.__post_init__ = _allow_plain_experts
Experts._supports_no_act_and_mul = staticmethod(lambda: True)
Experts._supports_activation = staticmethod(lambda activation: True)
Experts.process_weights_after_loading = _pack_gated
Experts.apply = _apply_plain


class NemotronExtension(RefitExtension):
    """The same calls; importing this module is what it is for."""
