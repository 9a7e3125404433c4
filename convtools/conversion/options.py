"""What a user asks of a conversion, checked before anything is read."""

from dataclasses import dataclass
from pathlib import Path

from convtools.codecs.cast import FLOATS
from convtools.errors import UsageError

FORMATS = ("hf", "torch_dist", "torch")


@dataclass(frozen=True, slots=True)
class Options:
    """Choices of a conversion; Megatron's own words for Megatron's own choices."""

    to: str
    """`hf`, `torch_dist` or `torch`."""
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    etp: int | None = None
    """None with a parallel layout asked for: as tp, which is Megatron's default."""
    make_vocab_size_divisible_by: int = 128
    padded_vocab_size: int | None = None
    iteration: int | str | None = None
    """Which iteration of a Megatron source; for an HF source, the one to write (1 when None)."""
    expert_layout: str = "grouped"
    """`grouped` or `sequential`: names of experts in the legacy format."""
    mcore_version: str = "0.19"
    """The megatron-core that will load a legacy checkpoint: names in memory changed in 0.19."""
    hf_config: Path | None = None
    max_shard_size: int = 5_000_000_000
    """Bytes of tensors a file, for HF and for `torch_dist` without a layout."""
    dtype: str | None = None
    """`bf16`, `fp16`, `fp32` or `fp64`: cast all but what Megatron keeps in fp32."""
    dtype_fp32_only: bool = False
    """Let `dtype` reach the tensors that Megatron keeps in fp32 too."""
    mixed_dtypes: bool = False
    """Accept tensors whose dtype is not the model's, each keeping its own."""
    workers: int = 2
    fsync: bool = True
    """Bring every file to disk before it is published; without, a power cut can damage a published copy."""
    overwrite: bool = False
    dry_run: bool = False

    def check(self) -> None:
        """Raise UsageError for a choice that cannot be served."""
        if self.to not in FORMATS:
            raise UsageError(f"--to {self.to} is no format", expected=", ".join(FORMATS))
        for name in ("tp", "pp", "ep", "etp", "make_vocab_size_divisible_by", "padded_vocab_size", "workers"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < 2**31:
                raise UsageError(f"--{name.replace('_', '-')} {value} is not a positive number")
        if self.to == "hf" and any((self.tp, self.pp, self.ep, self.etp)):
            raise UsageError(
                "an HF checkpoint has no parallel layout", fix="leave out --tp, --pp, --ep and --etp"
            )
        if (isinstance(self.iteration, int) and self.iteration < 1) or (
            self.iteration not in (None, "release") and not isinstance(self.iteration, int)
        ):
            raise UsageError(
                f"--iteration {self.iteration} is none that Megatron loads",
                expected="a number from 1, or `release`",
            )
        if self.dtype is not None and self.dtype not in FLOATS:
            raise UsageError(f"--dtype {self.dtype} is not known", expected=", ".join(FLOATS))
        if self.expert_layout not in ("grouped", "sequential"):
            raise UsageError(f"--expert-layout {self.expert_layout}", expected="grouped or sequential")
        self.mcore()

    def mcore(self) -> tuple[int, int]:
        """`mcore_version` as numbers. Raises UsageError."""
        parts = self.mcore_version.removeprefix("core_v").removeprefix("v").split(".")
        if len(parts) < 2 or not all(p.isdecimal() for p in parts[:2]):
            raise UsageError(
                f"--mcore-version {self.mcore_version} is no version", expected="such as 0.16 or 0.19.2"
            )
        return int(parts[0]), int(parts[1])

    @property
    def has_layout(self) -> bool:
        """Whether a parallel layout was asked for."""
        return any(x is not None for x in (self.tp, self.pp, self.ep, self.etp))
