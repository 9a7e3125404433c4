"""What a transformers model holds in memory, as the tensors of its checkpoint: names, shapes and dtypes.

Wrappers add to the names, transformers fuses the experts of a layer, FSDP2 cuts what is fused, and a trainer
keeps float32 where the engine serves bfloat16. Each tensor here is a view of live memory, unless it is cast;
an element that belongs to no tensor of the checkpoint, or to two, is an error by name.
"""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any

from convtools.codecs.cast import FLOATS
from convtools.equality.live import dtype_of, named_tensors
from convtools.errors import AccountingError, UsageError, capped, tick
from convtools.layout.region import Region
from convtools.refit.hf_places import Place, part_of, place_of, region_of
from convtools.refit.hf_wanted import Wanted, wanted_of
from convtools.refit.ranks.covering import fault_of
from convtools.refit.ranks.cut_tensor import CutTensor
from convtools.refit.ranks.placement import dtensor_region
from convtools.refit.ranks.tensors import local_tensor
from convtools.stores.base import FROM_TORCH

if TYPE_CHECKING:
    import torch

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Segments of a name that torch.compile, FSDP1 and activation checkpointing add, at any depth."""
_SHOWN = 3


def hf_tensors(
    given: Any, checkpoint: Any, *, dtype: "torch.dtype | None" = None, prefix: str = "",
    leave_out: Iterable[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """A transformers model, or its `state_dict()` -> the tensors of its checkpoint, by name.

    `checkpoint`: the folder that the engine was started from, or config.json as a dict. `dtype`: floats are
    cast to it where the checkpoint holds it; what the checkpoint keeps in another dtype stays as it is.
    `prefix`: where in `given` the model lies, such as "policy.". `leave_out`: patterns (`*`) of names, of
    either side, that are not pushed. DTensors become `CutTensor`s, this rank's parts, for a `RankedSource`.

    Raises AccountingError, naming tensors, unless the checkpoint has every element once, and no other;
    CheckpointError, ConfigError; UsageError for a pattern or prefix that nothing has, and for a dtype that
    is not in the checkpoint or not to be told from a config.
    """
    target = _spelled(dtype)
    wanted = wanted_of(checkpoint, target)
    patterns = [leave_out] if isinstance(leave_out, str) else list(leave_out)
    state = _unwrapped(given, wanted)
    _check_patterns(patterns, [*state, *wanted])
    held = _inside(_left(state, patterns), prefix, wanted)
    wanted = _left(wanted, patterns)
    places, problems = _places(wanted, held)
    if problems:
        raise AccountingError(
            "the model's tensors are not those of the checkpoint",
            where=None if isinstance(checkpoint, Mapping) else str(checkpoint),
            found=capped(problems),
            fix=_advice(list(wanted), list(held), places, prefix),
        )
    return dict(_tensors(places, held, wanted, target, dtype))


def _spelled(dtype: Any) -> str | None:
    """Raises UsageError for what is no float that weights are kept in."""
    if dtype is None:
        return None
    spelled = FROM_TORCH.get(str(dtype).removeprefix("torch."))
    if isinstance(dtype, str) or spelled not in set(FLOATS.values()):
        raise UsageError("no dtype to cast to", expected="a float, such as torch.bfloat16", found=dtype)
    return spelled


def _unwrapped(given: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors by the names that they have without wrappers. Raises UsageError."""
    if hasattr(given, "state_dict") and hasattr(given, "named_parameters"):
        named: Any = given.state_dict(keep_vars=True)  # parameters themselves: ties are the same object
    else:
        named = named_tensors(given)
    if not named:
        raise UsageError("no module and no named tensors", found=type(given).__name__)
    drop = _dropped(wanted)
    out: dict[str, Any] = {}
    for name, tensor in named.items():
        short = _without(str(name), drop)
        if short in out:
            raise UsageError(f"two tensors are {tick(short)} without their wrappers' names", found=tick(name))
        out[short] = tensor
    return out


def _dropped(wanted: Iterable[str]) -> frozenset[str]:
    """DDP's `module` as well, unless the checkpoint has names with it."""
    return _WRAPPERS if any("module" in name.split(".") for name in wanted) else _WRAPPERS | {"module"}


def _without(name: str, drop: frozenset[str]) -> str:
    return ".".join(part for part in name.split(".") if part not in drop)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _left(named: Mapping[str, Any], patterns: list[str]) -> dict[str, Any]:
    return {n: t for n, t in named.items() if not _matches(n, patterns)} if patterns else dict(named)


def _check_patterns(patterns: list[str], names: list[str]) -> None:
    if idle := [tick(p) for p in patterns if not any(fnmatchcase(n, p) for n in names)]:
        raise UsageError("nothing is there to leave out", found=capped(idle))


def _inside(state: Mapping[str, Any], prefix: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors under the prefix, without it. Raises UsageError for others."""
    if not prefix:
        return dict(state)
    start = _without(prefix.rstrip("."), _dropped(wanted)) + "."
    if start == ".":
        return dict(state)
    if not any(n.startswith(start) for n in state):
        raise UsageError(
            f"no tensor's name begins with {tick(start)}", found=capped([tick(n) for n in state], _SHOWN)
        )
    if others := [n for n in state if not n.startswith(start)]:
        raise UsageError(
            f"tensors outside {tick(start)}",
            found=capped(map(tick, others)),
            fix=f'if they are not to be pushed, leave_out=["{_pattern(others[0])}"]',
        )
    return {n.removeprefix(start): t for n, t in state.items()}


def _pattern(name: str) -> str:
    first, _, rest = name.partition(".")
    return f"{first}.*" if rest else first


_Placed = dict[str, tuple[Place, Region]]


def _places(wanted: Mapping[str, Wanted], held: Mapping[str, Any]) -> tuple[_Placed, list[str]]:
    """Where each tensor of the checkpoint lies in the model, and what does not add up, by name."""
    out: _Placed = {}
    problems: list[str] = []
    of: dict[str, list[Region]] = {}
    shapes = {name: tuple(int(n) for n in getattr(t, "shape", ())) for name, t in held.items()}
    for name, (shape, _) in wanted.items():
        place = place_of(name, held)
        region = None if place is None else region_of(place, shapes[place.own])
        if place is None or region is None:
            problems.append(f"not in the model: {tick(name)}")
            continue
        sizes = region.sizes[_dims_dropped(place) :]
        if sizes != tuple(shape):
            problems.append(f"{tick(name)} is {list(sizes)} in the model, not {list(shape)}")
        of.setdefault(place.own, []).append(region)
        out[name] = (place, region)
    same = _ties(held)
    taken = {same[own] for own in of}
    for own, shape in shapes.items():
        regions = of.get(own, [])
        more = prod(shape) - sum(region.numel for region in regions)
        if not regions and same[own] in taken:
            continue  # tied to one that the checkpoint has
        if more > 0:
            problems.append(f"{tick(own)} has {more} elements that the checkpoint has not")
        elif more < 0 or (len(regions) > 1 and fault_of(shape, regions)):
            problems.append(f"{tick(own)} has elements that the checkpoint has twice")
    return out, problems


def _dims_dropped(place: Place) -> int:
    return 0 if place.expert is None else 1


def _ties(held: Mapping[str, Any]) -> dict[str, str]:
    """Name -> the first name of the same memory."""
    first: dict[Any, str] = {}
    return {name: first.setdefault(_memory(name, tensor), name) for name, tensor in held.items()}


def _memory(name: str, tensor: Any) -> Any:
    dtype_of(name, tensor)
    local = local_tensor(name, tensor)
    if not local.numel():  # a rank that holds nothing of it: the parameter itself tells
        return id(tensor)
    return str(local.device), local.data_ptr(), tuple(local.shape), local.stride()


def _advice(wanted: list[str], held: list[str], places: _Placed, prefix: str) -> str:
    """What to do about a model that does not fit."""
    for name in wanted:  # a model inside another module: its names end as the checkpoint's do
        inside = next((own for own in held if own.endswith(f".{name}") and name not in places), None)
        if inside is not None:
            return f'prefix="{prefix}{inside.removesuffix(name)}"'
    if any("lora_" in own or ".base_layer." in own for own in held):
        return "merge the adapters into the weights first"
    return (
        "give the checkpoint that the engine was started from; tensors that one side has and the other is "
        "not to get (such as layers that transformers has not), by name: leave_out=[...]"
    )


def _tensors(
    places: _Placed, held: Mapping[str, Any], wanted: Mapping[str, Wanted], target: str | None, dtype: Any
) -> Iterator[tuple[str, Any]]:
    """Views and parts; a cast tensor that has two names is cast once."""
    kept: dict[tuple[str, Region], Any] = {}
    same = _ties(held)
    parts: dict[str, tuple[Region, Any]] = {}
    for name, (place, region) in places.items():
        tensor = held[place.own]
        if place.own not in parts:
            shape, cut = tuple(int(n) for n in tensor.shape), hasattr(tensor, "placements")
            has = dtensor_region(place.own, tensor) if cut else Region.whole(shape)
            parts[place.own] = has, local_tensor(place.own, tensor)
        has, local = parts[place.own]
        to = dtype if _is_cast(name, place.own, tensor, wanted[name].dtype, target) else local.dtype
        if hasattr(tensor, "placements"):
            yield name, _cut(local, has, region, place, to)
            continue
        view = _view(local, region, _dims_dropped(place))
        if to != local.dtype:
            key = (same[place.own], region)
            view = kept[key] = kept[key] if key in kept else view.to(to)
        yield name, view


def _is_cast(name: str, own: str, tensor: Any, stored: str | None, target: str | None) -> bool:
    """Raises UsageError where a config does not tell."""
    has = dtype_of(own, tensor)
    if target is None or has == target or has not in set(FLOATS.values()):
        return False
    if stored is None:
        raise UsageError(
            f"config.json does not tell whether {tick(name)} is kept in a dtype of its own",
            fix="give the folder of the checkpoint: its files tell",
        )
    return stored == target


def _view(local: Any, region: Region, dropped: int) -> Any:
    view = local[tuple(slice(a, b) for a, b in zip(region.offsets, region.ends, strict=True))]
    return view[0] if dropped else view


def _cut(local: Any, has: Region, region: Region, place: Place, dtype: Any) -> CutTensor:
    """This rank's part of a tensor of the checkpoint."""
    dropped = _dims_dropped(place)
    shape = region.sizes[dropped:]
    part = part_of(region, has, dropped)
    if part is None:
        nothing = Region((0,) * len(shape), (0,) * len(shape))
        return CutTensor(shape, nothing, local.new_empty(nothing.sizes), dtype)
    return CutTensor(shape, part.region, _view(local, part.local, dropped), dtype)
