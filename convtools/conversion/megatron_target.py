"""What both Megatron targets share: the padded vocabulary, the args, and the kept Hugging Face side."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from convtools.conversion.plan import SideFile
from convtools.conversion.source import Source
from convtools.errors import AccountingError, UsageError, capped
from convtools.families.blocks.embedding import padded_vocab_size
from convtools.families.table import Table
from convtools.families.wrapping import group_outside
from convtools.layout.parallel import ParallelLayout
from convtools.layout.region import Region
from convtools.layout.stages import PipelineSplit
from convtools.stores.base import TORCH_DTYPE
from convtools.stores.names import tick
from convtools.stores.pickle_write import torch_dtype

SPELLING_FILE = ".convtools.json"
"""Beside the kept config.json: how the Hugging Face side spells its names."""
_DTYPES = {f"torch.{name}": torch_dtype(dtype) for dtype, name in TORCH_DTYPE.items()}
"""What a dtype that was read from args is written as."""
_OTHER_STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
"""megatron-core's names for what args call otherwise: true of the source's stages only."""


@dataclass(frozen=True, slots=True)
class MegatronChoices:
    """What the user chooses in Megatron's own words."""

    layout: ParallelLayout | None
    """None: whole tensors, one chunk an expert."""
    divisible_by: int = 128
    """`--make-vocab-size-divisible-by`."""
    padded_vocab: int | None = None
    """`--padded-vocab-size`."""
    iteration: int | str = 1
    mcore: tuple[int, int] = (0, 19)
    grouped_experts: bool = True
    split: PipelineSplit = field(default_factory=PipelineSplit)
    """How the layout's stages were asked for."""

    @property
    def folder(self) -> str:
        """`iter_0000001`, or `release`."""
        return self.iteration if isinstance(self.iteration, str) else f"iter_{self.iteration:07d}"


def padded_rows(source: Source, choices: MegatronChoices) -> int:
    """Rows of embedding and head on the Megatron side. Raises UsageError."""
    vocab, tp = source.model.spec.vocab, choices.layout.tp if choices.layout else 1
    if choices.padded_vocab is None:
        return padded_vocab_size(vocab, tp, choices.divisible_by)
    if choices.padded_vocab < vocab or choices.padded_vocab % tp:
        raise UsageError(
            f"--padded-vocab-size {choices.padded_vocab} does not fit",
            expected=f"at least the vocabulary's {vocab} rows, and a multiple of tp={tp}",
        )
    return choices.padded_vocab


def target_table(source: Source, choices: MegatronChoices) -> Table:
    """The model's table at the target's vocabulary, checked.

    Raises UsageError, MappingError; AccountingError for tensors outside the language model.
    """
    if source.outside:
        raise AccountingError(
            f"{len(source.outside)} tensors lie outside the language model: Megatron's has no place for them",
            where=source.root,
            found=f"{capped(group_outside(source.outside))}: {capped(map(tick, source.outside))}",
            fix="convert a checkpoint of the language model alone; only --to hf passes the others through",
        )
    padded = padded_rows(source, choices)
    same = source.table.params["embedding.word_embeddings.weight"].shape[0] == padded
    table = source.table if same else source.model.table(padded)
    table.check()
    return table


def vocab_fills(table: Table) -> dict[str, Region]:
    """The rows of every parameter that are padding, by parameter."""
    return {
        p.name: Region((p.vocab, 0), (p.shape[0] - p.vocab, *p.shape[1:]))
        for p in table.params.values()
        if p.vocab is not None and p.vocab < p.shape[0]
    }


def param_dtypes(table: Table, dtypes: dict[str, str]) -> dict[str, str]:
    """dtype of every parameter. Raises AccountingError where tensors of several dtypes meet in one."""
    out: dict[str, str] = {}
    first: dict[str, str] = {}
    for piece in table.mapping.pieces:
        dtype = dtypes[piece.b]
        if out.setdefault(piece.a, dtype) != dtype:
            raise AccountingError(
                f"`{piece.a}` joins tensors of different dtypes",
                expected=f"one dtype; `{first[piece.a]}` is {out[piece.a]}",
                found=f"`{piece.b}` is {dtype}",
                fix="pass --dtype to cast all of them to one",
            )
        first.setdefault(piece.a, piece.b)
    return out


def megatron_args(
    source: Source, table: Table, choices: MegatronChoices, dtypes: dict[str, str]
) -> dict[str, Any]:
    """`args` as `--use-checkpoint-args` reads it: plain values and torch dtypes only."""
    model, layout = source.model, choices.layout or ParallelLayout()
    was = {k: v for k, v in source.args.items() if _plain(v) and k not in _OTHER_STAGES}
    kept = {k: _DTYPES.get(v, v) if isinstance(v, str) else v for k, v in was.items()}
    told = model.megatron_args()
    args = kept | {k: v for k, v in told.items() if v is not None or k not in kept}
    if choices.split.pattern and "hybrid_layer_pattern" in args:
        args["hybrid_layer_pattern"] = choices.split.marked(str(args["hybrid_layer_pattern"]))
    if choices.mcore < (0, 18) and "hybrid_layer_pattern" in args:
        args["hybrid_override_pattern"] = str(args.pop("hybrid_layer_pattern")).split("/")[0]
    params_dtype = dtypes[next(iter(source.hf))]
    return args | {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        **choices.split.args(layout.vpp),
        "context_parallel_size": 1,
        "make_vocab_size_divisible_by": choices.divisible_by,
        "padded_vocab_size": table.params["embedding.word_embeddings.weight"].shape[0],
        "moe_grouped_gemm": choices.grouped_experts,
        "bf16": params_dtype == "BF16",
        "fp16": params_dtype == "F16",
        "params_dtype": torch_dtype(params_dtype),
        "iteration": choices.iteration if isinstance(choices.iteration, int) else 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "no_save_optim": True,
        "no_save_rng": True,  # else Megatron's loader asks for the state that is not there
    }


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_plain(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str)


def kept_hf_side(source: Source, folder: str) -> list[SideFile]:
    """The Hugging Face side's own files, under `<folder>/hf/`, with a note of how names are spelled."""
    model = source.model
    note = {
        "version": 1,
        "family": model.family.NAME,
        "spelling": asdict(model.spelling),
        "wrapping": asdict(model.wrapping),
    }
    side = [
        SideFile(f"{folder}/hf/config.json", source.config_bytes),
        SideFile(f"{folder}/hf/{SPELLING_FILE}", json.dumps(note, indent=1).encode()),
    ]
    side += [
        SideFile(f"{folder}/hf/{name}", source.side_root / name)
        for name in source.side_files
        if source.side_root
    ]
    return side


def tracker(choices: MegatronChoices) -> SideFile:
    """The file that makes the folder a checkpoint."""
    return SideFile("latest_checkpointed_iteration.txt", str(choices.iteration).encode())
