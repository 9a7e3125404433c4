"""Which of the engine's own parameters a checkpoint's tensor goes to: learnt from vLLM's own loader.

`load_weights` says what it loaded. The first tensor of each kind is loaded by itself and its parameter
noted; others of the kind differ by their layer's number.
"""

from dataclasses import dataclass
from typing import Any

from convtools.errors import tick
from convtools.refit.plan import Tensor
from convtools.refit.vllm.own import PACKED, is_packed

_EXPERTS = ("w13_weight", "w2_weight")
_HALVES = (("gate_proj", "w1"), ("up_proj", "w3"))
"""Names of what vLLM puts into the upper and the lower half of `w13_weight`."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in the engine."""

    path: str
    """Of the module, from the model on."""
    name: str
    """Of the parameter in it."""
    shape: tuple[int, ...]
    """Of the parameter as it is loaded, before a kernel packs it."""
    rows: tuple[int, int] | None
    """Where the whole tensor lies in it, if its rows lie there as they are."""
    first: bool
    """Whether this rank has the tensor's first element."""
    expert: int | None = None
    """Which of the parameter's matrices; `rows` are then its."""


def kind_of(name: str) -> tuple[str, ...]:
    """Names that differ in numbers only are of one kind."""
    return tuple(part for part in name.split(".") if not part.isdigit())


def layer_of(name: str) -> str | None:
    """The outermost number of a name.

    >>> layer_of("model.layers.3.mlp.experts.7.w1"), layer_of("lm_head.weight")
    ('3', None)
    """
    return next((part for part in name.split(".") if part.isdigit()), None)


def _of_layer(parameter: str, layer: str | None) -> str:
    parts = parameter.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if at is not None and layer is not None:
        parts[at] = layer
    return ".".join(parts)


class Mapping:
    """What was learnt so far."""

    def __init__(self, model: Any, tp_rank: int, tp_size: int) -> None:
        self._model, self._rank, self._size = model, tp_rank, tp_size
        self._modules = dict(model.named_modules())
        self._kinds: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._fused: dict[str, list[str]] = dict(getattr(model, "packed_modules_mapping", None) or {})

    def __contains__(self, name: str) -> bool:
        return kind_of(name) in self._kinds

    def learn(self, name: str, loaded: set[str] | None) -> None:
        """`load_weights` was given this tensor alone, and said that it loaded these parameters."""
        self._kinds[kind_of(name)] = tuple(sorted(loaded or ()))

    def place(self, tensor: Tensor) -> Place | None:
        """Where it lies; None where that is not known, or it is not on this rank."""
        found = self._kinds.get(kind_of(tensor.name), ())
        if len(found) != 1:
            return None
        path, _, name = _of_layer(found[0], layer_of(tensor.name)).rpartition(".")
        module = self._modules.get(path)
        if module is None or getattr(module, name, None) is None:
            return None
        shape = _loaded_shape(module, name)
        has_first = self._has_first(tensor, module, path, shape)
        if name in _EXPERTS:
            expert, rows = _expert_rows(tensor, shape, self._size)
            return Place(path, name, shape, rows, has_first, expert)
        return Place(path, name, shape, self._rows(tensor, module, path, name, shape), has_first)

    def touches(self, tensor: Tensor) -> tuple[str, ...]:
        """Own names of what changes with its first element; none where that is not known."""
        place = self.place(tensor)
        if place is None or not place.first:
            return ()
        shared = getattr(self._modules[place.path], place.name).data_ptr()
        out: list[str] = []
        for path, module in self._modules.items():
            prefix = f"{path}." if path else ""
            parameter = module._parameters.get(place.name)
            same = parameter is not None and parameter.numel() and parameter.data_ptr() == shared
            if path == place.path or same:
                out.append(prefix + place.name)
                if place.name == "weight" and is_packed(module) and module.weight.numel():
                    out.append(prefix + place.name + PACKED)
                if hasattr(module, "_cpu_unpacked_conv_weight"):
                    out.append(prefix + "_cpu_unpacked_conv_weight")
                    parent = path.rpartition(".")[0]
                    if hasattr(self._modules.get(parent), "conv_weights"):
                        out.append(f"{parent}.conv_weights")
        return tuple(out)

    def why_not(self, tensor: Tensor) -> str:
        """Why its bytes cannot be read back."""
        place = self.place(tensor)
        if place is None:
            return "vLLM's loader does not say where it went, or it is not on this rank"
        at = tick(f"{place.path}.{place.name}")
        if self._size > 1:
            return f"this rank holds a part of it, in {at}"
        if place.rows is None:
            return f"vLLM keeps it in another form, in {at}"
        return f"{at} is packed by a kernel, which does not give it back to the last bit"

    def _rows(
        self, tensor: Tensor, module: Any, path: str, name: str, shape: tuple[int, ...]
    ) -> tuple[int, int] | None:
        if name != tensor.name.rpartition(".")[2] or shape[1:] != tensor.shape[1:]:
            return None
        if self._is_whole(tensor, path, shape):
            return (0, shape[0]) if shape else (0, 1)
        if self._size > 1 or not shape:
            return None
        if getattr(module, "org_vocab_size", None) == tensor.shape[0]:
            return (0, tensor.shape[0])  # the rest is padding
        parts, sizes = self._fused.get(path.rpartition(".")[2]), getattr(module, "output_sizes", None)
        if parts is None or sizes is None or _owner(tensor.name) not in parts or len(parts) != len(sizes):
            return None
        at = parts.index(_owner(tensor.name))
        first = sum(sizes[:at])
        return (first, first + sizes[at]) if sizes[at] == tensor.shape[0] else None

    def _is_whole(self, tensor: Tensor, path: str, shape: tuple[int, ...]) -> bool:
        """Whether the parameter is the tensor, all of it."""
        # This rank's part of a fused one may happen to be of that shape.
        alone = self._size == 1 or _owner(tensor.name) == path.rpartition(".")[2]
        return shape == tensor.shape and alone

    def _has_first(self, tensor: Tensor, module: Any, path: str, shape: tuple[int, ...]) -> bool:
        if self._rank == 0 or self._is_whole(tensor, path, shape):
            return True
        # Of the heads of K and V there may be copies: the first ranks have the first.
        parts = self._fused.get(path.rpartition(".")[2], [])
        at = parts.index(_owner(tensor.name)) if _owner(tensor.name) in parts else 0
        return at > 0 and self._rank < int(getattr(module, "num_kv_head_replicas", 1))


def _expert_rows(
    tensor: Tensor, shape: tuple[int, ...], tp_size: int
) -> tuple[int | None, tuple[int, int] | None]:
    """Which expert a tensor is of, and its rows there: gate above up, or one of them alone."""
    numbers = [part for part in tensor.name.split(".") if part.isdigit()]
    if len(numbers) != 2 or tp_size > 1 or len(shape) != 3 or len(tensor.shape) != 2:
        return None, None
    expert, count = int(numbers[1]), tensor.shape[0]
    if expert >= shape[0] or shape[2] != tensor.shape[1]:
        return None, None
    if shape[1] == count:
        return expert, (0, count)
    half = next((i for i, names in enumerate(_HALVES) if _owner(tensor.name) in names), None)
    if half is None or shape[1] != 2 * count:
        return None, None
    return expert, (half * count, (half + 1) * count)


def _owner(name: str) -> str:
    """Of `a.q_proj.weight` the `q_proj`."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _loaded_shape(module: Any, name: str) -> tuple[int, ...]:
    """Of a parameter as a checkpoint is loaded to it."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    parameters, buffers = get_layerwise_info(module).restore_metadata
    tensor = parameters.get(name, buffers.get(name, getattr(module, name)))
    return tuple(tensor.shape)
