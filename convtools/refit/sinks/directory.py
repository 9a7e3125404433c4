"""`file:///DIR` as a sink: which of the directory sinks, and what lies beside the weights."""

import os
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args
from urllib.parse import parse_qsl

from convtools.conversion.options import Options
from convtools.errors import UsageError, capped, tick
from convtools.refit.sinks.base import Sink
from convtools.refit.sinks.checkpoint import CheckpointSink
from convtools.refit.sinks.loaders import loader_of
from convtools.refit.sinks.reload import ReloadSink
from convtools.refit.sinks.side_files import beside

_NOT_ASKED = ("to", "hf_config", "overwrite", "dry_run", "workers", "fsync", "mixed_dtypes")
CHOICES = tuple(f.name for f in fields(Options) if f.name not in _NOT_ASKED)
"""Options of a conversion that a URL may name."""


def directory_sink(url: str, path: Path, query: str, source: str | os.PathLike[str] | None) -> Sink:
    """The sink of a directory; `source` is the checkpoint whose config.json and tokenizer it takes.

    Raises UsageError.
    """
    asked = _asked(url, query)
    if source is None:
        raise UsageError(
            f"{url}: a directory takes its config.json from the checkpoint that is pushed",
            fix="say which that is: connect(url, source=CKPT)",
        )
    to, reload = asked.pop("to", "hf"), asked.pop("reload", None)
    if to not in ("hf", "torch_dist", "torch"):
        raise UsageError(f"{url}: {tick(to)} is no format", expected="hf, torch_dist or torch")
    if reload is not None and to != "hf":
        raise UsageError(f"{url}: engines load Hugging Face directories", fix="leave out ?to=")
    if to == "hf" and (extra := sorted(set(asked) - {"max_shard_size"})):
        raise UsageError(f"{url}: {extra[0]} is for a Megatron directory", fix="add to=torch_dist")
    options = Options(to=to, **{name: _value(name, text) for name, text in asked.items()})
    options.check()
    files = beside(source)
    if reload is not None:
        return ReloadSink(path, files, loader_of(reload), name=url, max_shard_size=options.shard_nbytes)
    if to == "hf":
        return CheckpointSink(path, files, name=url, max_shard_size=options.shard_nbytes)
    return CheckpointSink(path, files, options=options, name=url)


def _asked(url: str, query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=64)
    except ValueError as error:
        raise UsageError(f"{url}: what follows `?` is no list of options: {error}") from None
    asked = dict(pairs)
    if len(asked) != len(pairs):
        raise UsageError(f"{url}: an option is given twice")
    if unknown := sorted(set(asked) - {"to", "reload", *CHOICES}):
        raise UsageError(
            f"{url}: {tick(unknown[0])} is no option of a directory",
            expected=f"to, reload, {capped(CHOICES, 20)}",
        )
    return asked


def _value(name: str, text: str) -> Any:
    """A choice as `Options` wants it. Raises UsageError."""
    kind = Options.__dataclass_fields__[name].type
    kinds = get_args(kind) or (kind,)
    if bool in kinds:
        if text not in ("true", "false", ""):
            raise UsageError(f"{name}={tick(text)}", expected="true or false")
        return text != "false"
    if int in kinds and str not in kinds:
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise UsageError(f"{name}={tick(text)} is no number")
        return int(text)
    return text
