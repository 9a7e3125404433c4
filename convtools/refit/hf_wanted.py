"""What a checkpoint calls for: names, shapes, and the dtypes of which the files or the tables are sure."""

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from convtools.conversion.dtypes import precisions
from convtools.errors import CheckpointError, UsageError, capped
from convtools.families.registry import Model, language_model
from convtools.families.table import FP32, MODEL, Table
from convtools.stores.hf import open_hf


class Wanted(NamedTuple):
    """A tensor of the checkpoint."""

    shape: tuple[int, ...]
    dtype: str | None
    """As the stores spell it; None where a config alone does not tell."""


def wanted_of(checkpoint: Any, dtype: str | None) -> dict[str, Wanted]:
    """The tensors of a checkpoint's folder, or of a config.json as a dict, to be pushed in `dtype`.

    Raises CheckpointError, ConfigError; UsageError for a folder that has no tensor of `dtype`.
    """
    if isinstance(checkpoint, Mapping):
        table, kinds = _table(checkpoint), {MODEL: dtype, FP32: "F32"}
        kind = precisions(table)
        return {n: Wanted(tuple(shape), kinds.get(kind[n])) for n, shape in table.hf.items()}
    if not isinstance(checkpoint, str | os.PathLike):
        raise UsageError(
            "no checkpoint", expected="its folder, or config.json as a dict", found=type(checkpoint).__name__
        )
    root = Path(checkpoint)
    wanted = _stored(root, _stamp(root))
    if dtype is not None and not any(w.dtype == dtype for w in wanted.values()):
        raise UsageError(
            f"the checkpoint has no tensor of {dtype}",
            where=root,
            found=capped(sorted({str(w.dtype) for w in wanted.values()})),
            fix="give the checkpoint that the engine was started from, or leave `dtype` out",
        )
    return wanted


def checkpoint_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """config.json -> every tensor of the checkpoint, MTP included, in its published spelling.

    Raises ConfigError for an architecture that convtools has no table of.
    """
    return {name: tuple(shape) for name, shape in _table(config).hf.items()}


def _table(config: Mapping[str, Any]) -> Table:
    found = language_model(dict(config))
    spec = found.parse()
    depth = getattr(spec, "mtp_depth", 0)  # each with weights of its own, unless the config says otherwise
    last = [f"mtp.layers.{depth - 1}.enorm.weight"] if depth else []
    model = Model(found.family, found.config, spec, found.family.mcore_spelling(spec, last))
    return model.table(spec.vocab)


_Stamp = tuple[tuple[str, int, int], ...]


def _stamp(root: Path) -> _Stamp:
    """Files that say what the checkpoint holds, and when they changed. Raises CheckpointError."""
    try:
        with os.scandir(root) as entries:
            files = [e for e in entries if e.name.endswith((".safetensors", ".json"))]
            stats = [(e.name, e.stat()) for e in files]
    except OSError as error:
        raise CheckpointError(
            f"cannot read the checkpoint folder: {error.strerror}",
            where=root,
            fix="give a local folder, or config.json as a dict",
        ) from None
    return tuple(sorted((name, s.st_mtime_ns, s.st_size) for name, s in stats))


@lru_cache(maxsize=4)
def _stored(root: Path, stamp: _Stamp) -> dict[str, Wanted]:
    """From the files' headers: read once, for this is asked at every push."""
    return {n: Wanted(t.shape, t.dtype) for n, t in open_hf(root).tensors.items()}
