"""A rank's part of a tensor of the checkpoint, where no DTensor says it: an expert cut out of fused ones."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from convtools.layout.region import Region

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class CutTensor:
    """What a `RankedSource` takes in place of a DTensor; its numbers are cast one tensor at a time."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    region: Region
    """What this rank holds of it; sizes of 0 for nothing."""
    held: "torch.Tensor"
    """That part, a view of live memory."""
    dtype: "torch.dtype"
    """As which it is pushed."""
