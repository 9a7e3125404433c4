"""What `torch_dist` calls a parameter: the keys that hold it.

A parameter has one form on writing and several on reading, because layer specs, core versions and
checkpoint options differ. A form relates whole stored tensors to the parameter, as views.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from convtools.families.table import Param
from convtools.layout.piece import Piece
from convtools.layout.view import View, same

DECODER = "decoder.layers."


@dataclass(frozen=True, slots=True)
class Form:
    """One way to store a parameter: every key it needs, and the pieces key ~ parameter."""

    shapes: dict[str, tuple[int, ...]]
    pieces: tuple[Piece, ...]


def written_form(param: Param) -> Form:
    """The portable `torch_dist` form: experts stacked, alike layers stacked, split parts under own keys."""
    key = param.stack if param.expert else param.name
    return _form(param, _layerless(key), layers=param.layers) if param.layers else _form(param, key)


def read_forms(param: Param, num_layers: int) -> Iterator[Form]:
    """Every `torch_dist` form that core 0.12 to 0.20 writes, the usual one first.

    Names of other specs, one key an expert (`singleton_local_shards`), and homogeneous layers
    stacked under one key `decoder.layers.<rest> [num_layers, ...]`.
    """
    for name in (param.name, *param.aliases):
        stack = name.replace(f".experts.{param.expert.index}.", ".experts.", 1) if param.expert else name
        yield _form(param, stack)
        if param.expert:
            yield _form(param, name, singleton=True)
        if isinstance(param.stage, int) and name.startswith(f"{DECODER}{param.stage}."):
            yield _form(param, _layerless(stack), layers=num_layers)


def _layerless(key: str) -> str:
    return DECODER + key.split(".", 3)[3]


def lead(param: Param) -> tuple[int, ...]:
    """Which entry of its stacked key a parameter is, as written: (layer, expert), where it has them."""
    layer = (int(param.stage),) if param.layers else ()
    return (*layer, param.expert.index) if param.expert else layer


def _form(param: Param, key: str, *, singleton: bool = False, layers: int = 0) -> Form:
    lead, index = [], []
    if layers:
        assert isinstance(param.stage, int)
        lead.append(layers)
        index.append(param.stage)
    if param.expert and not singleton:
        lead.append(param.expert.count)
        index.append(param.expert.index)
    whole = View(param.name, *param.shape)
    if not (param.split and param.cut):
        view = View(key, *lead, *param.shape)
        return Form({key: view.shape}, (same(view[tuple(index)] if index else view, whole),))
    shapes, pieces, at, dim = {}, [], 0, param.cut.dim
    for part in param.cut.parts:
        view = View(
            f"{key}.{part.name}", *lead, *(part.size if d == dim else n for d, n in enumerate(param.shape))
        )
        shapes[view.name] = view.shape
        take = tuple(slice(at, at + part.size) if d == dim else slice(None) for d in range(dim + 1))
        pieces.append(same(view[tuple(index)] if index else view, whole[take]))
        at += part.size
    return Form(shapes, tuple(pieces))


def extra_states(param: Param) -> list[str]:
    """Names of all (empty) objects that Megatron's strict loader wants beside it."""
    found = extra_state(param)
    states = [found] if found else []
    return [*states, f"{param.memory_state}._extra_state/shard_0_1"] if param.both_stored else states


def extra_state(param: Param) -> str | None:
    """Name of the (empty) Transformer Engine object that Megatron's strict loader wants beside it."""
    if param.module is None:
        return None
    e, module = param.expert, param.module
    if e is not None:
        module = module.replace(f".experts.{e.index}.", ".experts.", 1)
    if param.layers:
        module = _layerless(module)
    at = lead(param)
    of = [*([param.layers] if param.layers else []), *([e.count] if e else [])]
    return f"{module}._extra_state/shard_{'.'.join(map(str, at or [0]))}_{'.'.join(map(str, of or [1]))}"
