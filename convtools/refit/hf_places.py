"""Where a checkpoint's tensors lie in the memory of a transformers model: names and regions only.

transformers renames some tensors as it loads them, and keeps the experts of a layer in one tensor where
the files hold one an expert. What is worked out here from names alone is only a guess: a comparison with
the bytes of the files proves it.
"""

import re
from collections.abc import Container, Iterator
from typing import NamedTuple

from convtools.layout.region import Region

_PREFIXES = (("backbone.", "model."), ("", "model."), ("model.", ""))
_RENAMED = ((".block_sparse_moe.", ".mlp."),)
_EXPERT = re.compile(r"^(.+\.experts)\.(\d+)\.(\w+)\.weight$")
_FUSED = {
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", None),
    "w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", None),
}  # fmt: skip
"""An expert's matrix -> the tensor of all experts, and which half of its rows it is."""


class Place(NamedTuple):
    """A tensor of a checkpoint, within a tensor of the model."""

    own: str
    """The model's name for it."""
    expert: int | None = None
    """Which of the experts, where it holds all of them."""
    half: int | None = None
    """Which half of that expert's rows: 0 gate, 1 up."""


class Part(NamedTuple):
    """What a rank holds of a tensor of the checkpoint."""

    region: Region
    """Where it lies in that tensor."""
    local: Region
    """Where it lies in the rank's own memory of the model's tensor."""


def place_of(name: str, held: Container[str]) -> Place | None:
    """The place of checkpoint tensor `name` in a model that holds the tensors `held`; None without one.

    >>> place_of("backbone.layers.0.norm.weight", {"model.layers.0.norm.weight"}).own
    'model.layers.0.norm.weight'
    >>> place_of("l.experts.3.up_proj.weight", {"l.experts.gate_up_proj"})
    Place(own='l.experts.gate_up_proj', expert=3, half=1)
    """
    for own in _spellings(name):
        if own in held:
            return Place(own)
    if (found := _EXPERT.match(name)) is None:
        return None
    of, expert, matrix = found[1], int(found[2]), found[3]
    fused, half = _FUSED.get(matrix, (matrix, None))
    for experts in _spellings(of):
        if f"{experts}.{fused}" in held:
            return Place(f"{experts}.{fused}", expert, half)
        if f"{experts}.{matrix}" in held:  # experts without a gate
            return Place(f"{experts}.{matrix}", expert)
    return None


def _spellings(name: str) -> Iterator[str]:
    yield name
    for old, new in _PREFIXES:
        if name.startswith(old):
            yield new + name.removeprefix(old)
    for old, new in _RENAMED:
        if old in name:
            yield from _spellings(name.replace(old, new))


def region_of(place: Place, shape: tuple[int, ...]) -> Region | None:
    """The region that `place` is of the model's tensor, which is of `shape`; None where it has none such.

    >>> region_of(Place("experts.gate_up_proj", 3, 1), (4, 6, 5))
    Region(offsets=(3, 3, 0), sizes=(1, 3, 5))
    """
    if place.expert is None:
        return Region.whole(shape)
    if len(shape) != 3 or place.expert >= shape[0]:
        return None
    first, rows = 0, shape[1]
    if place.half is not None:
        rows //= 2
        first = place.half * rows
    return Region((place.expert, first, 0), (1, rows, shape[2]))


def part_of(tensor: Region, held: Region, dropped: int) -> Part | None:
    """What a rank that holds region `held` of a model's tensor has of one of the checkpoint; None: nothing.

    `tensor`: the region of the checkpoint's tensor in the model's, whose first `dropped` dims it has not.

    >>> part_of(Region((3, 3, 0), (1, 3, 5)), Region((2, 4, 0), (2, 2, 5)), 1)
    Part(region=Region(offsets=(1, 0), sizes=(2, 5)), local=Region(offsets=(1, 0, 0), sizes=(1, 2, 5)))
    """
    common = tensor.intersect(held)
    if common is None:
        return None

    def seen_from(origin: Region) -> tuple[int, ...]:
        return tuple(a - b for a, b in zip(common.offsets, origin.offsets, strict=True))

    return Part(
        Region(seen_from(tensor)[dropped:], common.sizes[dropped:]), Region(seen_from(held), common.sizes)
    )
