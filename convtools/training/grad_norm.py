"""The L2 norm of a gradient that lies in pieces on several ranks, each element counted once."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from convtools.errors import UsageError, tick

if TYPE_CHECKING:
    import torch


def global_grad_norm(parameters: "Iterable[tuple[str, torch.nn.Parameter]]") -> float:
    """Named parameters -> the L2 norm of their gradients, in float64; the same number on every rank.

    Squares of a DTensor's local shard are summed over the mesh dimensions that cut it, and over no other:
    replicas count once. Plain tensors count as they are. One all-reduce a mesh dimension and kind of cut;
    all ranks must call it together. Raises UsageError where no parameter has a gradient, and for a gradient
    that is a partial sum.
    """
    import torch
    import torch.distributed as dist

    total, found = 0.0, False
    sums: dict[tuple[Any, tuple[int, ...]], torch.Tensor | float] = defaultdict(float)
    for name, parameter in parameters:
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:  # every rank takes part, also one whose shard of it is empty
            sums[mesh, _cuts(name, parameter)] += 0.0
        grad: Any = parameter.grad
        if grad is None:
            continue
        found = True
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        square = torch.linalg.vector_norm(local, dtype=torch.float64).square()
        if hasattr(grad, "placements"):
            sums[grad.device_mesh, _cuts(name, grad)] += square
        else:
            total += float(square)
    if not found:
        raise UsageError("there is no gradient", fix="call backward() first")
    for (mesh, dims), partial in sums.items():
        value = torch.as_tensor(partial, dtype=torch.float64, device=mesh.device_type)
        for dim in dims:
            dist.all_reduce(value, group=mesh.get_group(dim))
        total += float(value)
    return math.sqrt(total)


def _cuts(name: str, tensor: Any) -> tuple[int, ...]:
    """The mesh dimensions that cut it. Raises UsageError for a partial sum."""
    if any(place.is_partial() for place in tensor.placements):
        raise UsageError(f"the gradient of {tick(name)} is a partial sum: its ranks were not reduced yet")
    return tuple(d for d, place in enumerate(tensor.placements) if not place.is_replicate())
