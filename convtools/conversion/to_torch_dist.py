"""Megatron `torch_dist` as a target: the portable form that core 0.12 to 0.20 reads."""

from collections.abc import Iterator

from convtools.conversion.megatron_target import (
    MegatronChoices,
    kept_hf_side,
    megatron_args,
    param_dtypes,
    target_table,
    tracker,
    vocab_fills,
)
from convtools.conversion.plan import SideFile, Target
from convtools.conversion.source import Source
from convtools.errors import AccountingError
from convtools.families.dist_keys import Form, extra_states, lead, written_form
from convtools.families.rank_tensors import Placement
from convtools.families.table import Param, Table
from convtools.layout.mapping import Mapping
from convtools.layout.region import Region
from convtools.stores.torch_dist_write import METADATA_JSON, Chunk, DistFile, common_pt, dist_metadata


def torch_dist_target(
    source: Source, dtypes: dict[str, str], choices: MegatronChoices, *, max_shard_size: int
) -> Target:
    """Plan `.distcp` files, `.metadata`, `common.pt` and the kept Hugging Face side.

    The layout only decides how chunks are cut, and in which rank's file they lie.
    Raises ParallelError where it does not divide the model.
    """
    table = target_table(source, choices)
    forms = {name: written_form(p) for name, p in table.params.items()}
    shapes = {key: shape for form in forms.values() for key, shape in form.shapes.items()}
    keys = Mapping(shapes, table.mapping.a, tuple(p for form in forms.values() for p in form.pieces))
    param_dtype = param_dtypes(table, dtypes)
    _check_keys(forms, param_dtype)
    files = _files(table, forms, param_dtype, choices, max_shard_size)
    args = megatron_args(source, table, choices, dtypes)
    folder = choices.folder
    side = [
        *kept_hf_side(source, folder),
        SideFile(f"{folder}/common.pt", common_pt(args, choices.iteration)),
        SideFile(f"{folder}/.metadata", dist_metadata(files)),
        SideFile(f"{folder}/metadata.json", METADATA_JSON),
    ]
    return Target(
        "torch_dist",
        tuple(f.plan(folder) for f in files),
        keys.compose(table.mapping),
        dtypes,
        fills=vocab_fills(table),
        padded_vocab=args["padded_vocab_size"],
        iteration=choices.iteration,
        side_files=tuple(side),
        last=(tracker(choices),),
    )


def _check_keys(forms: dict[str, Form], dtypes: dict[str, str]) -> None:
    """Raise AccountingError where parameters of several dtypes share a stacked key: a key has but one."""
    first: dict[str, str] = {}
    for name, form in forms.items():
        for key in form.shapes:
            other = first.setdefault(key, name)
            if dtypes[other] != dtypes[name]:
                raise AccountingError(
                    f"`{key}` stacks tensors of different dtypes",
                    expected=f"one dtype; `{other}` is {dtypes[other]}",
                    found=f"`{name}` is {dtypes[name]}",
                    fix="pass --dtype to cast all of them to one, or write --to torch",
                )


def _files(
    table: Table,
    forms: dict[str, Form],
    dtypes: dict[str, str],
    choices: MegatronChoices,
    max_shard_size: int,
) -> list[DistFile]:
    """Deal chunks and extra states to files: one a rank, or, without a layout, as sizes ask for."""
    layout = choices.layout
    place = Placement(table.params.values(), layout, tied=False) if layout else None
    ranks = layout.pp * layout.stage_size if layout else 1
    files = [DistFile(f"__{rank}_0.distcp") for rank in range(ranks)]
    for name, param in table.params.items():
        owner = None
        for rank, key, region in _chunks(param, forms[name], choices, place):
            chunk = Chunk(key, dtypes[name], forms[name].shapes[key], region)
            if place is None and files[-1].nbytes and files[-1].nbytes + chunk.nbytes > max_shard_size:
                files.append(DistFile(f"__0_{len(files)}.distcp"))
            file = files[-1 if place is None else rank]
            file.add(chunk)
            owner = owner or file
        if owner is not None:
            for state in extra_states(param):
                owner.add_object(state)
    return [f for f in files if f.nbytes]


def _chunks(
    param: Param, form: Form, choices: MegatronChoices, place: Placement | None
) -> Iterator[tuple[int, str, Region]]:
    """(rank, key, region of the key) of every chunk of a parameter."""
    keys = list(form.shapes)
    first = lead(param)
    if place is None:
        for key in keys:
            shape = form.shapes[key][len(first) :]
            yield 0, key, _behind(first, Region.whole(shape))
        return
    layout = place.layout
    base = place.stage(param) % layout.pp * layout.stage_size
    size = layout.etp if param.expert else layout.tp
    if param.expert:
        base += param.expert.index // (param.expert.count // layout.ep) * layout.etp
    if param.cut is None:
        yield base, keys[0], _behind(first, Region.whole(param.shape))
        return
    for shard in range(size):
        at = 0
        for i, (whole, _) in enumerate(param.cut.shard(param.shape, size, shard)):
            begin = at if param.split else 0
            offsets = tuple(o - begin if d == param.cut.dim else o for d, o in enumerate(whole.offsets))
            yield base + shard, keys[i if param.split else 0], _behind(first, Region(offsets, whole.sizes))
            at += param.cut.parts[i].size


def _behind(lead: tuple[int, ...], region: Region) -> Region:
    """A region of one entry of a stack."""
    return Region((*lead, *region.offsets), (*(1 for _ in lead), *region.sizes))
