"""The manifest: which tensors a checkpoint has, where each came from, and hashes to check it by.

One schema, versioned in its first field, serves slices (hashes of bytes) and fingerprints alike: a
tensor has a table of hashes by algorithm, and a reader uses those it knows. As a file it is JSON with a
line a tensor, the same bytes for the same content. It comes from strangers too, so it is read strictly.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from convtools.errors import CheckpointError
from convtools.stores.base import DTYPE_NBYTES
from convtools.stores.json_file import json_object
from convtools.stores.names import is_unicode, tick
from convtools.stores.regular_file import DAMAGED, open_regular
from convtools.stores.safetensors_header import SUB_BYTE_BITS

MANIFEST_NAME = "convtools.manifest.json"
SCHEMA = "convtools.manifest/1"
XXH3 = "xxh3-128"
"""Name of the hash of a tensor's bytes: XXH3, 128 bits, seed 0, in its canonical (big-endian) hex."""

_MAX_NBYTES = 500_000_000
_MAX_TEXT = 4096
_MAX_LAYERS = 100_000
_MAX_DIMS = 64
_PIECE = 1 << 20
_ALGORITHM = re.compile(r"[a-z0-9][a-z0-9.-]{0,31}")
_HEX = re.compile(r"(?:[0-9a-f]{2}){1,64}")
_DIGITS = {XXH3: 32}


class ManifestSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the tensors were taken from."""

    name: str
    """A repository (`org/name`), or the name of a folder."""
    format: str
    """`hf`, `torch_dist`, ..."""
    revision: str | None = None
    """The commit of a repository."""


class ManifestTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor."""

    dtype: str
    """A dtype of the safetensors format."""
    shape: tuple[int, ...]
    source: str | None = None
    """Its name in the source; None where there is none, or it is not known."""
    source_rows: int | None = None
    """How many of the source tensor's first rows it is; None where it is all of it."""
    hashes: dict[str, str] = {}
    """Algorithm -> lower-case hex."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it."""

    made_by: str
    """The program and its version."""
    tensors: dict[str, ManifestTensor]
    """By name."""
    source: ManifestSource | None = None
    layers: list[int] | None = None
    """Layer `i` here is layer `layers[i]` of the source; None where layers were not chosen."""
    notes: list[str] = []
    """What a reader should know."""
    config: str | None = None
    """The `xxh3-128` of config.json's bytes; None where it is not covered."""
    schema: str = SCHEMA


def made_by() -> str:
    """What `Manifest.made_by` is for this version."""
    import convtools

    return f"convtools {convtools.__version__}"


def encode(manifest: Manifest) -> bytes:
    """`manifest` as a file: keys in a fixed order, tensors sorted by name, a line each.

    Raises CheckpointError for what `decode` would not take.
    """
    _check(manifest, Path(MANIFEST_NAME))
    head: dict[str, Any] = {
        "schema": manifest.schema,
        "made_by": manifest.made_by,
        "source": msgspec.to_builtins(manifest.source),
        "layers": manifest.layers,
        "notes": manifest.notes,
    }
    if manifest.config is not None:
        head["config"] = manifest.config
    lines = [f' "{key}": {_json(value)},' for key, value in head.items()]
    tensors = [
        f"  {_json(name)}: {_json(msgspec.to_builtins(manifest.tensors[name]))}"
        for name in sorted(manifest.tensors)
    ]
    text = "\n".join(["{", *lines, ' "tensors": {', ",\n".join(tensors), " }", "}", ""])
    return text.encode()


def decode(raw: bytes, path: Path = Path(MANIFEST_NAME)) -> Manifest:
    """The manifest in `raw`, every field checked; `path` is for messages. Raises CheckpointError."""
    if len(raw) > _MAX_NBYTES:
        raise CheckpointError(
            f"{tick(path.name)} is too large", where=path, expected=f"<= {_MAX_NBYTES} bytes", found=len(raw)
        )
    made = json_object(raw, path, constants=False)
    if "schema" not in made and "tensors" not in made:
        raise CheckpointError(
            f"{tick(path.name)} is a JSON file, and no manifest",
            where=path,
            expected=f"a manifest ({tick(SCHEMA)}), as `convtools fingerprint` writes it",
            fix="of a checkpoint give the folder",
        )
    if made.get("schema") != SCHEMA:
        raise CheckpointError(
            "not a manifest of the schema that this version reads",
            where=path,
            expected=tick(SCHEMA),
            found=tick(made.get("schema")),
            fix="use the version of convtools that made it, or a newer one",
        )
    try:
        manifest = msgspec.convert(made, Manifest)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"a damaged manifest: {error}", where=path, fix=DAMAGED) from None
    _check(manifest, path)
    return manifest


def read_manifest(path: Path) -> Manifest:
    """The manifest in file `path`. Raises CheckpointError."""
    file, size = open_regular(path)
    with file:
        if size > _MAX_NBYTES:
            raise CheckpointError(
                f"{tick(path.name)} is too large", where=path, expected=f"<= {_MAX_NBYTES} bytes", found=size
            )
        return decode(file.read(_MAX_NBYTES), path)


def hash_tensor(path: Path, offset: int, nbytes: int) -> str:
    """The `xxh3-128` of `nbytes` bytes at `offset` of file `path`, read piece by piece.

    Threads can hash at the same time. Raises CheckpointError where the file ends early.
    """
    file, _ = open_regular(path)
    with file:
        return hash_range(file.fileno(), offset, nbytes, path)


def hash_bytes(raw: bytes) -> str:
    """The `xxh3-128` of bytes in memory."""
    import xxhash

    return str(xxhash.xxh3_128(raw).hexdigest())


def hash_range(fd: int, offset: int, nbytes: int, path: Path) -> str:
    """The same of an open file; `path` is for messages. Raises CheckpointError."""
    import xxhash

    state, left = xxhash.xxh3_128(), nbytes
    buffer = memoryview(bytearray(min(_PIECE, nbytes)))
    while left:
        view = buffer[: min(left, _PIECE)]
        try:
            count = os.preadv(fd, [view], offset)
        except OSError as error:
            raise CheckpointError(
                f"cannot read the file: {error.strerror}", where=f"{path}:{offset}"
            ) from None
        if count == 0:
            raise CheckpointError(
                "the file ends before the tensor's bytes do", where=f"{path}:{offset}", fix=DAMAGED
            )
        state.update(view[:count])
        offset, left = offset + count, left - count
    return state.hexdigest()


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _check(manifest: Manifest, path: Path) -> None:
    """Raise CheckpointError for values that no manifest has."""
    texts = [manifest.made_by, *manifest.notes]
    if manifest.source is not None:
        texts += [manifest.source.name, manifest.source.format, manifest.source.revision or ""]
    for text in texts:
        if len(text) > _MAX_TEXT or not is_unicode(text):
            raise _bad(path, "a text is too long, or not valid Unicode", found=tick(text))
    if manifest.config is not None and (fault := _hash_fault({XXH3: manifest.config})):
        raise _bad(path, f"`config`: {fault}")
    layers = manifest.layers or []
    if manifest.schema != SCHEMA or len(layers) > _MAX_LAYERS or any(not 0 <= n < 2**31 for n in layers):
        raise _bad(path, "its schema or its layers cannot be", found=tick(layers[:12]))
    for name, tensor in manifest.tensors.items():
        fault = _fault(name, tensor) or _hash_fault(tensor.hashes)
        if fault:
            raise _bad(path, f"tensor {tick(name)}: {fault}")


def _fault(name: str, tensor: ManifestTensor) -> str | None:
    """What is wrong with an entry, but for its hashes."""
    for text in (name, tensor.source or ""):
        if len(text) > _MAX_TEXT or not is_unicode(text):
            return f"the name {tick(text)} is too long, or not valid Unicode"
    if tensor.dtype not in DTYPE_NBYTES and tensor.dtype not in SUB_BYTE_BITS:
        return f"unknown dtype {tick(tensor.dtype)}"
    if len(tensor.shape) > _MAX_DIMS or any(not 0 <= dim < 2**63 for dim in tensor.shape):
        return f"its shape is not possible: {tick(list(tensor.shape))}"
    rows = tensor.source_rows
    if rows is not None and (tensor.source is None or not tensor.shape or rows != tensor.shape[0]):
        return f"`source_rows` is {rows} for the shape {tick(list(tensor.shape))}"
    return None


def _hash_fault(hashes: Mapping[str, str]) -> str | None:
    for algorithm, text in hashes.items():
        if not _ALGORITHM.fullmatch(algorithm):
            return f"{tick(algorithm)} is not the name of a hash"
        if not _HEX.fullmatch(text) or len(text) != _DIGITS.get(algorithm, len(text)):
            return f"its {algorithm} is {tick(text)}"
    return None


def _bad(path: Path, what: str, *, found: object = None) -> CheckpointError:
    return CheckpointError(f"a damaged manifest: {what}", where=path, found=found, fix=DAMAGED)
