"""The engine's own parameters, as its kernels use them: fused, packed, cut; and their digests."""

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKED = "#packed"
"""After the name of a weight that is there twice: as it is, and packed for a kernel."""
_UNPACKED = "_cpu_unpacked_conv_weight"
_ROWS = 256  # of the identity at a time, so that reading a packed layer back costs little memory


def own_tensors(model: Any) -> "Iterator[tuple[str, torch.Tensor]]":
    """Every parameter and buffer by name, shared ones under each; packed ones as far as they give it back."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in named:
            if name != "weight" or not is_packed(module):
                yield prefix + name, tensor.detach()
                continue
            if tensor.numel():
                yield prefix + name, tensor.detach()
            yield prefix + name + (PACKED if tensor.numel() else ""), unpack(module)
        if (plain := getattr(module, _UNPACKED, None)) is not None:
            yield prefix + _UNPACKED, plain


def is_packed(module: Any) -> bool:
    """Whether a kernel holds the module's weight in a form of its own."""
    import torch

    call = getattr(module, "cpu_linear", None)
    return call is not None and call is not torch.nn.functional.linear


def unpack(module: Any) -> "torch.Tensor":
    """What a packed linear layer multiplies with: the identity pushed through it.

    Exact, but for the sign of zeros, and for denormal numbers, which kernels take for zero.
    """
    import torch

    weight = module.weight
    inner = weight.shape[1] if weight.numel() else _inputs(module)
    parts = []
    for first in range(0, inner, _ROWS):
        count = min(_ROWS, inner - first)
        rows = torch.zeros(count, inner, dtype=weight.dtype)
        rows[torch.arange(count), torch.arange(first, first + count)] = 1
        parts.append(module.cpu_linear(rows, weight, None))
    return torch.cat(parts).t().contiguous()


def expert_of(module: Any, name: str, expert: int) -> "torch.Tensor | None":
    """One expert's matrix of a fused parameter, as it was before a CPU kernel packed it; None elsewhere.

    Packing only moves elements: where to is learnt by packing their numbers.
    """
    import torch
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    found = getattr(module, name)
    if not isinstance(experts, CPUUnquantizedExperts) or found.ndim != 3 or found.element_size() != 2:
        return None
    one: torch.Tensor = found[expert].detach()
    if not experts.moe_config.is_act_and_mul:
        return one  # not packed
    if getattr(experts, "_use_zentorch", False):
        return None
    back = torch.empty_like(one).reshape(-1)
    back[_moved(tuple(one.shape), one.dtype, experts.isa)] = one.reshape(-1)
    return back.reshape(one.shape)


@cache
def _moved(shape: tuple[int, int], dtype: Any, isa: str) -> "torch.Tensor":
    """Of each element of a packed matrix, which one it was."""
    import torch
    from vllm._custom_ops import cpu_prepack_moe_weight

    numbers = torch.arange(shape[0] * shape[1], dtype=torch.int32)
    halves = []
    for half in (numbers & 0xFFFF, numbers >> 16):  # an element has room for half a number
        plain = half.to(torch.uint16).view(dtype).reshape(1, *shape)
        packed = cpu_prepack_moe_weight(plain, isa)
        halves.append(packed.view(torch.uint16).reshape(-1).to(torch.int64))
    moved: torch.Tensor = halves[0] | halves[1] << 16
    return moved


def _inputs(module: Any) -> int:
    """Width of what a linear layer takes on this rank; a replicated one knows only the whole."""
    return int(getattr(module, "input_size_per_partition", None) or module.input_size)


def bytes_of(tensor: "torch.Tensor") -> Any:
    """Its bytes, in order, on the host."""
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else flat.to(torch.uint8).numpy()


def digests_of_model(model: Any) -> dict[str, bytes]:
    """xxh3-128 of each of the engine's own tensors."""
    import torch
    import xxhash

    with torch.no_grad():
        return {
            name: xxhash.xxh3_128_digest(bytes_of(tensor).data)
            for name, tensor in own_tensors(model)
            if tensor.numel()
        }
