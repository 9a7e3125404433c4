"""What vLLM's own reload forgets on a CPU, found by the self-test: kernels go on with packed old weights.

Seen in 0.32.0, where every parameter's own bytes are right and the tokens are wrong. Nothing of vLLM is
replaced: states of single layers are set so that its own code runs again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mend:
    """A defect, and what makes good for it."""

    what: str
    before: Callable[[Any], None] | None = None
    """Called with the model before its layers are loaded."""
    after: Callable[[Any], None] | None = None
    """Called with the model when all are."""


def forget_moe_kernels(model: Any) -> None:
    """Let experts be packed anew: a kernel that is there already makes vLLM copy them unpacked."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def repack_embeddings(model: Any) -> None:
    """Pack tied heads anew: they are loaded with the embedding, and packed by nobody."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def refresh_convolutions(model: Any) -> None:
    """Mixers read `conv_weights`, a view of what the convolution's weight was before it was packed."""
    for module in model.modules():
        plain = getattr(getattr(module, "conv1d", None), "_cpu_unpacked_conv_weight", None)
        seen = getattr(module, "conv_weights", None)
        if plain is not None and seen is not None and seen.shape == plain.shape:
            seen.copy_(plain)


CPU_MENDS = (
    Mend("packed experts", before=forget_moe_kernels),
    Mend("packed tied heads", after=repack_embeddings),
    Mend("packed convolutions", after=refresh_convolutions),
)


def mends_of_platform() -> tuple[Mend, ...]:
    """Those that this vLLM needs."""
    from vllm.platforms import current_platform

    return CPU_MENDS if current_platform.is_cpu() else ()
