"""What a user asks of a slice, checked before anything is read."""

from dataclasses import dataclass
from os import PathLike

from convtools.errors import UsageError
from convtools.slicing.selection import COVERS
from convtools.stores.hf_write import parse_size


@dataclass(frozen=True, slots=True)
class SliceOptions:
    """Choices of a slice; with neither `layers` nor `cover`, every kind of block is covered."""

    layers: str | None = None
    """Layers to keep, in order: `0-3,7`, ranges inclusive."""
    cover: str | None = None
    """`blocks`, `types` or `pairs`: choose the cheapest layers that cover all of them."""
    mtp: str = "keep"
    """`keep` or `drop` the MTP head."""
    experts: int | None = None
    """Keep the first so many routed experts."""
    not_per_layer: tuple[str, ...] = ()
    """Config lists that are not one entry a layer, although they are as long."""
    layer_prefix: str | None = None
    """The stack of layers to cut, where that is unclear: `model.layers`."""
    iteration: int | str | None = None
    """Which iteration of a Megatron source."""
    hf_config: str | PathLike[str] | None = None
    """Folder with the config.json of a Megatron source."""
    allow_inexact: bool = False
    """Round norms that only Megatron centres on zero, where the dtype cannot hold them exactly."""
    max_shard_size: int | str = 5_000_000_000
    workers: int = 2
    fsync: bool = True
    overwrite: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_shard_size", parse_size(self.max_shard_size))

    def check(self) -> None:
        """Raise UsageError for a choice that cannot be served."""
        if self.layers is not None and self.cover is not None:
            raise UsageError("--layers and --cover: only one can choose", fix="leave one of them out")
        if self.cover is not None and self.cover not in COVERS:
            raise UsageError(f"--cover {self.cover}", expected=", ".join(COVERS))
        if self.mtp not in ("keep", "drop"):
            raise UsageError(f"--mtp {self.mtp}", expected="keep or drop")
        for name in ("experts", "workers"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value < 2**31):
                raise UsageError(f"--{name} {value} is not a positive number")

    @property
    def shard_nbytes(self) -> int:
        """`max_shard_size` as a number."""
        return int(self.max_shard_size)
