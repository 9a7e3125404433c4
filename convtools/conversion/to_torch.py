"""Legacy `torch` checkpoints as a target: one file a model-parallel rank, names as in its memory."""

from collections import OrderedDict
from typing import Any

from convtools.conversion.megatron_target import (
    MegatronChoices,
    kept_hf_side,
    megatron_args,
    param_dtypes,
    target_table,
    tracker,
    vocab_fills,
)
from convtools.conversion.plan import Target
from convtools.conversion.source import Source
from convtools.errors import ParallelError
from convtools.families.rank_tensors import MemoryStyle, Placement
from convtools.layout.mapping import Mapping
from convtools.layout.parallel import ParallelLayout
from convtools.layout.piece import Piece
from convtools.layout.region import Region
from convtools.stores.base import FilePlan, Payload
from convtools.stores.torch_frames import common_state, empty_tensor, torch_file
from convtools.stores.torch_legacy import FILE, rank_folder


def torch_target(source: Source, dtypes: dict[str, str], choices: MegatronChoices) -> Target:
    """Plan every rank's `model_optim_rng.pt`. Raises ParallelError where the layout does not divide."""
    layout = choices.layout or ParallelLayout()
    table = target_table(source, choices)
    place = Placement(table.params.values(), layout, tied=source.model.spec.tied)
    _check_names(layout)
    dtype_of, fills = param_dtypes(table, dtypes), vocab_fills(table)
    args = megatron_args(source, table, choices, dtypes)
    style = MemoryStyle(choices.mcore, choices.grouped_experts)
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: list[Piece] = []
    local_fills: dict[str, Region] = {}
    files: list[FilePlan] = []
    for rank in layout.ranks():
        folder = rank_folder(rank.tp, rank.pp, rank.ep, pp_size=layout.pp, ep_size=layout.ep)
        models: OrderedDict[str, Any] = OrderedDict()
        for chunk in range(layout.vpp):
            part = "model" if layout.vpp == 1 else f"model{chunk}"
            at = folder if layout.vpp == 1 else f"{folder}/{part}"
            model = models[part] = OrderedDict()
            for held in place.held(rank, chunk):
                name = held.name(style)
                key = f"{at}/{name}"
                shapes[key] = held.shape
                model[name] = Payload(key, Region.whole(held.shape), dtype_of[held.param.name])
                pieces += [p.renamed(key, p.b) for p in held.pieces]
                fill = fills.get(held.param.name)
                here = local_fill(fill, held.shard, held.shape) if fill else None
                if here:
                    local_fills[key] = here
                model |= {state: empty_tensor() for state in held.extra_state_names(style)}
        value = common_state(args | {"rank": 0}, _number(choices)) | models
        value["num_floating_point_operations_so_far"] = 0
        files.append(
            FilePlan(f"{choices.folder}/{folder}/{FILE}", torch_file(value, FILE.removesuffix(".pt")))
        )
    to_params = Mapping(shapes, table.mapping.a, tuple(pieces))
    return Target(
        "torch",
        tuple(files),
        to_params.compose(table.mapping),
        dtypes,
        fills=local_fills,
        padded_vocab=args["padded_vocab_size"],
        iteration=choices.iteration,
        side_files=tuple(kept_hf_side(source, choices.folder)),
        last=(tracker(choices),),
    )


def _number(choices: MegatronChoices) -> int:
    return choices.iteration if isinstance(choices.iteration, int) else 0


def local_fill(fill: Region, shard: int, shape: tuple[int, ...]) -> Region | None:
    """The rows of padding within one rank's even share of the rows."""
    mine = Region((shard * shape[0], *(0 for _ in shape[1:])), shape).intersect(fill)
    return mine and Region((mine.offsets[0] - shard * shape[0], *mine.offsets[1:]), mine.sizes)


def _check_names(layout: ParallelLayout) -> None:
    """File names hold tp, pp and ep only: refuse layouts in which two ranks would share one."""
    names = [(r.tp, r.pp, r.ep) for r in layout.ranks()]
    if len(set(names)) < len(names):
        raise ParallelError(
            f"etp={layout.etp} with tp={layout.tp} and ep={layout.ep} cannot be stored in the legacy format",
            expected="an etp that the tp and ep ranks determine: its file names hold no etp",
            fix="use --to torch_dist, or an etp that divides tp",
        )
