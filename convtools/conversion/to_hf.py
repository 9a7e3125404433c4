"""A Hugging Face directory as a target."""

from convtools.conversion.plan import SideFile, Target
from convtools.conversion.source import Source
from convtools.stores.hf_write import INDEX_NAME, plan_hf


def hf_target(source: Source, dtypes: dict[str, str], *, max_shard_size: int) -> Target:
    """Plan `model*.safetensors`, a fresh index, config.json and every other file as it came."""
    copies = {copy.name: copy.of for copy in source.model.copies()}
    shapes = dict(source.hf) | {name: source.hf[of] for name, of in copies.items()}
    plan = plan_hf(
        [(name, dtypes[copies.get(name, name)], shape) for name, shape in shapes.items()], max_shard_size
    )
    side = [SideFile("config.json", source.config_bytes)]
    side += [SideFile(name, source.side_root / name) for name in source.side_files if source.side_root]
    index = (SideFile(INDEX_NAME, plan.index),) if plan.index else ()
    return Target("hf", plan.files, None, dtypes, copies, side_files=tuple(side), last=index)
