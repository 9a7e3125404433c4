"""What a checkpoint is, from its metadata alone: also for models and encodings that are not converted."""

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from convtools.conversion.from_torch_dist import model_keys
from convtools.conversion.megatron_config import hf_side
from convtools.errors import ConfigError, ConvtoolsError, UsageError
from convtools.families.registry import language_model
from convtools.layout.region import Region
from convtools.stores.base import DTYPE_NBYTES
from convtools.stores.encodings import find_encodings
from convtools.stores.hf import is_hf, open_hf
from convtools.stores.megatron_dir import find_iteration, is_megatron
from convtools.stores.torch_dist import open_torch_dist
from convtools.stores.torch_legacy import open_torch_legacy


class Tensor(NamedTuple):
    """One stored tensor of the model."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: int
    """Contiguous pieces in which it is stored."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint is."""

    path: str
    format: str
    family: str | None
    """None where no family knows the architecture."""
    architectures: tuple[str, ...]
    pattern: str | None
    layers: int | None
    tensors: tuple[Tensor, ...]
    parameters: int
    """Elements stored, each counted once where copies are known to be copies."""
    nbytes: int
    dtypes: dict[str, int]
    """Tensors of each dtype."""
    iteration: int | str | None
    layout: dict[str, int] | None
    """Parallel layout it was saved at."""
    encodings: tuple[str, ...]
    """Quantised or adapter encodings: recognised, not converted."""
    left_out: int
    """Stored things that are no model weights: optimizer, RNG, extra states."""
    notes: tuple[str, ...]

    def to_dict(self, *, tensors: bool = False) -> dict[str, Any]:
        """Plain values, for `--json`."""
        out = asdict(self)
        out["tensors"] = [t._asdict() for t in self.tensors] if tensors else len(self.tensors)
        return out


class _Known(NamedTuple):
    family: str | None
    pattern: str | None
    layers: int | None
    note: str | None


def inspect(
    path: str | Path, *, iteration: int | str | None = None, hf_config: Path | None = None
) -> Inspection:
    """Look at a checkpoint's metadata. Raises CheckpointError where that is damaged, UsageError."""
    root = Path(path)
    if not root.is_dir():
        raise UsageError(
            f"`{root}` is not a directory",
            expected="a checkpoint's folder",
            fix="only slice and compare read from the Hub: download it first (`hf download`)"
            if not root.exists() and str(path).count("/") == 1
            else None,
        )
    if is_hf(root) or not is_megatron(root):
        return _inspect_hf(root)
    where = find_iteration(root, iteration)
    if where.format == "torch_dist":
        store = open_torch_dist(where.path)
        keys, left_out = model_keys(store)
        tensors = tuple(
            Tensor(name, t.dtype, t.shape, len(t.chunks)) for name, t in store.tensors.items() if name in keys
        )
        args, count = store.args, len(left_out)
    else:
        legacy = open_torch_legacy(where.path)
        tensors = tuple(
            Tensor(f"{legacy.label(rank, c)}/{name}", t.dtype, t.shape, 1)
            for rank, chunks in legacy.ranks.items()
            for c, chunk in enumerate(chunks)
            for name, t in chunk.items()
            if not name.endswith("_extra_state")
        )
        args, count = legacy.args, len(legacy.left_out)
        keys = {name: t.shape for chunks in legacy.ranks.values() for c in chunks for name, t in c.items()}
    known, architectures = _Known(None, None, None, None), ()
    try:
        side = hf_side(where.path, hf_config, args, keys)
        known, architectures = _family(side.config), tuple(side.config.get("architectures") or ())
    except ConvtoolsError as error:
        known = _Known(None, None, None, error.what)
    return _inspection(
        root, where.format, known, architectures, tensors, where.iteration, _layout(args), (), count
    )


def _inspect_hf(root: Path) -> Inspection:
    store = open_hf(root, list_sub_byte=True)
    tensors = tuple(Tensor(n, t.dtype, t.shape, 1) for n, t in store.tensors.items())
    tensors += tuple(Tensor(n, t.dtype, t.shape, 1) for n, t in store.sub_byte.items())
    files = (*store.side_files, *store.weight_files, *(name for name, _ in store.unread_files))
    encodings = tuple(
        f"{e.kind} (seen in {e.seen_in})" for e in find_encodings(store.config, store.tensors, files)
    )
    known = _family(store.config)
    names = store.config.get("architectures")
    architectures = tuple(map(str, names)) if isinstance(names, list) else ()
    return _inspection(
        root, "hf", known, architectures, tensors, None, None, encodings, len(store.unread_files)
    )


def _family(config: dict[str, Any]) -> _Known:
    try:
        found = language_model(config)
        spec = found.parse()
    except ConfigError as error:
        return _Known(None, None, None, error.what)
    return _Known(found.family.NAME, spec.text, spec.num_layers, None)


def _layout(args: dict[str, Any]) -> dict[str, int] | None:
    names = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size",
             "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size",
             "vpp": "virtual_pipeline_model_parallel_size"}  # fmt: skip
    found = {axis: args[name] for axis, name in names.items() if isinstance(args.get(name), int)}
    return found or None


def _inspection(
    root: Path,
    format: str,
    known: _Known,
    architectures: tuple[str, ...],
    tensors: tuple[Tensor, ...],
    iteration: int | str | None,
    layout: dict[str, int] | None,
    encodings: tuple[str, ...],
    left_out: int,
) -> Inspection:
    sizes = [Region.whole(t.shape).numel for t in tensors]
    return Inspection(
        path=str(root),
        format=format,
        family=known.family,
        architectures=architectures,
        pattern=known.pattern,
        layers=known.layers,
        tensors=tensors,
        parameters=sum(sizes),
        nbytes=sum(n * DTYPE_NBYTES.get(t.dtype, 0) for n, t in zip(sizes, tensors, strict=True)),
        dtypes=dict(Counter(t.dtype for t in tensors)),
        iteration=iteration,
        layout=layout,
        encodings=encodings,
        left_out=left_out,
        notes=(known.note,) if known.note else (),
    )
