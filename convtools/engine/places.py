"""Where a checkpoint's tensors lie in the memory of a transformers model.

transformers renames some tensors as it loads them, and keeps the experts of a layer in one tensor where
the files hold one an expert. What is worked out here from names alone is only a guess: `proof` compares
every byte with the files before an engine serves anything.
"""

import re
from collections.abc import Container, Iterator
from typing import NamedTuple

_PREFIXES = (("backbone.", "model."), ("", "model."), ("model.", ""))
_RENAMED = ((".block_sparse_moe.", ".mlp."),)
_EXPERT = re.compile(r"^(.+\.experts)\.(\d+)\.(\w+)\.weight$")
_FUSED = {
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", None),
    "w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", None),
}  # fmt: skip
"""An expert's matrix -> the tensor of all experts, and which half of its rows it is."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MTP = re.compile(r"(?:^|\.)mtp\.")


class Place(NamedTuple):
    """A tensor of a checkpoint, within a tensor of the model."""

    own: str
    """The model's name for it."""
    expert: int | None = None
    """Which of the experts, where it holds all of them."""
    half: int | None = None
    """Which half of that expert's rows: 0 gate, 1 up."""


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


def is_mtp(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to layers that predict further tokens, which transformers does not have.

    >>> is_mtp("mtp.layers.0.norm.weight", 4), is_mtp("model.layers.4.norm.weight", 4)
    (True, True)
    """
    layer = _LAYER.search(name)
    return bool(_MTP.search(name)) or (layer is not None and int(layer[1]) >= num_layers)
