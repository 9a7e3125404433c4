"""What lies beside a checkpoint's weights and belongs into a directory that a push writes."""

import os
from collections.abc import Iterator
from pathlib import Path

from convtools.errors import CheckpointError, ConfigError, UsageError, tick
from convtools.manifest import MANIFEST_NAME
from convtools.slicing.origin import Origin, open_origin
from convtools.stores.regular_file import open_regular

MAX_NBYTES = 256 << 20
"""Bytes of one such file; weights are never read here."""
NOTE = "convtools_refit.json"
"""Version and plan of the push that wrote a directory."""
_NOT_CARRIED = ("config.json", NOTE, MANIFEST_NAME)  # they speak of the weights that were there


def beside(source: str | os.PathLike[str]) -> dict[str, bytes]:
    """config.json, tokenizer and whatever else a checkpoint of any format keeps beside its weights, by name.

    Raises UsageError where it keeps no config.json, and what opening it raises.
    """
    try:
        origin = open_origin(os.fspath(source))
    except ConfigError as error:
        raise UsageError(
            f"{tick(os.fspath(source))}: {error.what}",
            fix="push into a running engine, or from a checkpoint that keeps its config.json",
        ) from None
    return {"config.json": origin.config_bytes} | dict(_files(origin))


def _files(origin: Origin) -> Iterator[tuple[str, bytes]]:
    if origin.hub is not None:
        for name in origin.hub.side_files:
            if name not in _NOT_CARRIED:
                yield name, _read(origin.hub.side_path(name))
        return
    for file in origin.side_files:
        if file.path not in _NOT_CARRIED:
            yield file.path, file.content if isinstance(file.content, bytes) else _read(file.content)


def _read(path: Path) -> bytes:
    file, size = open_regular(path)
    with file:
        if size > MAX_NBYTES:
            raise CheckpointError(
                f"{tick(path.name)} is too large to lie beside weights", where=path,
                expected=f"<= {MAX_NBYTES} bytes", found=size,
            )  # fmt: skip
        return bytes(file.read(size))
