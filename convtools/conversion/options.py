"""What a user asks of a conversion, checked before anything is read."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from convtools.codecs.cast import FLOATS
from convtools.errors import UsageError
from convtools.layout.stages import PipelineSplit
from convtools.stores.hf_write import parse_size

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
    vpp: int | None = None
    """Model chunks a pipeline rank (`--num-virtual-stages-per-pipeline-rank`)."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | Sequence[Sequence[str]] | None = None
    """The layers of each stage: `"Ett|ttt|mL"`, or lists of words."""
    hybrid_layer_pattern: str | None = None
    """A hybrid model's own pattern, with `|` where a pipeline stage ends."""
    make_vocab_size_divisible_by: int = 128
    padded_vocab_size: int | None = None
    iteration: int | str | None = None
    """Which iteration of a Megatron source; for an HF source, the one to write (1 when None)."""
    expert_layout: str = "grouped"
    """`grouped` or `sequential`: names of experts in the legacy format."""
    mcore_version: str = "0.19"
    """The megatron-core that will load a legacy checkpoint: names in memory changed in 0.19."""
    hf_config: str | os.PathLike[str] | None = None
    """Folder with config.json (tokenizer, ...) for a Megatron source, before what the source itself keeps."""
    max_shard_size: int | str = 5_000_000_000
    """Bytes of tensors a file (or such as "5GB"), for HF and for `torch_dist` without a layout."""
    dtype: str | None = None
    """`bf16`, `fp16`, `fp32` or `fp64`: cast all but what Megatron keeps in fp32."""
    dtype_fp32_only: bool = False
    """Let `dtype` reach the tensors that Megatron keeps in fp32 too."""
    mixed_dtypes: bool = False
    """Accept tensors whose dtype is not the model's, each keeping its own."""
    allow_inexact: bool = False
    """Round norms that only one side centres on zero, where their dtype cannot hold what is added exactly."""
    workers: int = 2
    fsync: bool = True
    """Bring every file to disk before it is published; without, a power cut can damage a published copy."""
    overwrite: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        iteration = self.iteration
        if (
            isinstance(iteration, str)
            and iteration.isdecimal()
            and iteration.isascii()
            and len(iteration) < 20
        ):
            object.__setattr__(self, "iteration", int(iteration))
        object.__setattr__(self, "max_shard_size", parse_size(self.max_shard_size))

    def check(self) -> None:
        """Raise UsageError for a choice that cannot be served."""
        if self.to not in FORMATS:
            raise UsageError(f"--to {self.to} is no format", expected=", ".join(FORMATS))
        idle = [
            name
            for name, given in (
                ("--expert-layout", self.expert_layout != "grouped" and self.to == "hf"),
                ("--padded-vocab-size", self.padded_vocab_size is not None and self.to == "hf"),
                ("--dtype-fp32-only", self.dtype_fp32_only and self.dtype is None),
            )
            if given
        ]
        if idle:
            raise UsageError(
                f"{idle[0]} means nothing here", fix="leave it out, or see what it goes with in --help"
            )
        for name in (
            "tp", "pp", "ep", "etp", "vpp", "num_layers_per_virtual_pipeline_stage",
            "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
            "make_vocab_size_divisible_by", "padded_vocab_size", "workers",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value < 2**31):
                raise UsageError(f"--{name.replace('_', '-')} {value} is not a positive number")
        split = self.split()
        if self.to == "hf" and self.has_layout:
            stages = "".join(f", {name}" for name in split.given())
            raise UsageError(
                "an HF checkpoint has no parallel layout", fix=f"leave out --tp, --pp, --ep, --etp{stages}"
            )
        split.check()
        if (isinstance(self.iteration, int) and not 1 <= self.iteration < 2**31) or (
            self.iteration not in (None, "release") and not isinstance(self.iteration, int)
        ):
            raise UsageError(
                f"--iteration {self.iteration} is none that Megatron loads",
                expected=f"a number from 1 to {2**31 - 1}, or `release`",
            )
        if self.dtype is not None and self.dtype not in FLOATS:
            raise UsageError(f"--dtype {self.dtype} is not known", expected=", ".join(FLOATS))
        if self.expert_layout not in ("grouped", "sequential"):
            raise UsageError(f"--expert-layout {self.expert_layout}", expected="grouped or sequential")
        self.mcore()

    def mcore(self) -> tuple[int, int]:
        """`mcore_version` as numbers. Raises UsageError."""
        parts = self.mcore_version.removeprefix("core_v").removeprefix("v").split(".")
        if len(parts) < 2 or not all(p.isdecimal() and len(p) < 5 for p in parts[:2]):
            raise UsageError(
                f"--mcore-version {self.mcore_version} is no version", expected="such as 0.16 or 0.19.2"
            )
        version = int(parts[0]), int(parts[1])
        if version < (0, 12):
            raise UsageError(f"--mcore-version {self.mcore_version} is too old", expected="0.12 or later")
        return version

    @property
    def shard_nbytes(self) -> int:
        """`max_shard_size` as a number."""
        return int(self.max_shard_size)

    @property
    def has_layout(self) -> bool:
        """Whether a parallel layout was asked for."""
        sizes = (self.tp, self.pp, self.ep, self.etp)
        return any(x is not None for x in sizes) or bool(self.split().given())

    def split(self) -> PipelineSplit:
        """How layers are dealt to pipeline stages."""
        return PipelineSplit(
            self.pp or 1,
            self.vpp,
            self.num_layers_per_virtual_pipeline_stage,
            self.decoder_first_pipeline_num_layers,
            self.decoder_last_pipeline_num_layers,
            self.account_for_embedding_in_pipeline_split,
            self.account_for_loss_in_pipeline_split,
            self.pipeline_model_parallel_layout,
            self.hybrid_layer_pattern,
        )
