"""A live model's tensors under the names and in the shapes of its checkpoint, as views.

The names and shapes are those of the tables that convert checkpoints, the places those where the reference
engine finds them. transformers keeps the experts of a layer in one 3-D tensor; the checkpoint has a matrix
an expert. A view along the first dimension is exact and moves nothing, of a plain tensor and of a DTensor
alike, as long as that dimension is not the one that is cut across ranks.
"""

from collections.abc import Mapping
from typing import Any

from convtools.engine.loading import view_of
from convtools.errors import AccountingError, UsageError, capped, tick
from convtools.refit.hf_places import place_of
from convtools.refit.hf_wanted import checkpoint_shapes

Shapes = Mapping[str, tuple[int, ...]]


def checkpoint_tensors(state: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """A module's `state_dict()` -> the tensors of its checkpoint: views, of DTensors too.

    Raises AccountingError, naming them, unless the checkpoint has every tensor of the module whole, and no
    other; UsageError for fused experts cut across ranks by their first dimension, and for halves of a tensor
    that is cut at all: a view of one would gather it.
    """
    out: dict[str, Any] = {}
    problems: list[str] = []
    left = {name: int(tensor.numel()) for name, tensor in state.items()}
    for name, shape in shapes.items():
        place = place_of(name, state)
        if place is None:
            problems.append(f"not in the module: {tick(name)}")
            continue
        if place.half is not None or place.expert is not None:
            _check_placements(place.own, state[place.own], halved=place.half is not None)
        view = view_of(state[place.own], place, name)
        if tuple(view.shape) != tuple(shape):
            problems.append(f"{tick(name)} is {list(view.shape)} in the module, not {list(shape)}")
        left[place.own] -= int(view.numel())
        out[name] = view
    problems += [f"{tick(own)} has {n} elements that the checkpoint has not" for own, n in left.items() if n]
    if problems:
        raise AccountingError("the module's tensors are not those of the checkpoint", found=capped(problems))
    return out


def _check_placements(name: str, tensor: Any, *, halved: bool) -> None:
    for place in getattr(tensor, "placements", ()):
        if place.is_shard(0) or (halved and not place.is_replicate()):
            raise UsageError(
                f"the experts of {tick(name)} are cut across ranks where the checkpoint separates them",
                found=str(place),
                fix="push convtools.hf_tensors(model, checkpoint) of a RankedSource: it takes any cut",
            )


__all__ = ["checkpoint_shapes", "checkpoint_tensors"]
