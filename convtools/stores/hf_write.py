"""Plan the files of a Hugging Face checkpoint from the tensors that will really be written.

Shards copied from a source's index lose whole files when one tensor of them is left out, and the
index still looks right. So nothing here sees a source: the shards, the index and its sizes all
follow from one list of tensors.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from convtools.errors import AccountingError, UnsupportedEncoding, UsageError, capped
from convtools.layout.region import Region
from convtools.stores.base import DTYPE_NBYTES, FilePlan, Payload
from convtools.stores.names import tick
from convtools.stores.safetensors_header import SUB_BYTE_BITS, encode_header

INDEX_NAME = "model.safetensors.index.json"
"""The name every reader looks for."""

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3})\s*", re.ASCII)

_PAGE = 4096

Tensor = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape."""


@dataclass(frozen=True, slots=True)
class HFPlan:
    """The files to write; the index belongs on disk after all of them."""

    files: tuple[FilePlan, ...]
    """`model.safetensors` alone, or the shards in order."""
    index: bytes | None
    """Content of `model.safetensors.index.json`, or None where one file holds everything."""


def plan_hf(tensors: Sequence[Tensor], max_shard_size: int = 5_000_000_000) -> HFPlan:
    """Tensors, in order -> files of at most `max_shard_size` tensor bytes each.

    A tensor larger than that has a file to itself. As in transformers, the size is of tensors: a
    header of about 100 bytes a tensor comes on top. A tensor's file follows from the given order;
    within a file the wider dtypes come first, so that every tensor is aligned in memory, as the
    format's library writes it. Raises `AccountingError` for a name given twice, `UsageError` and
    `UnsupportedEncoding` for what cannot be written.

    >>> plan = plan_hf([("a", "BF16", (4,)), ("b", "BF16", (4,)), ("c", "F32", (1,))], max_shard_size=12)
    >>> [file.path for file in plan.files]
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    if type(max_shard_size) is not int or max_shard_size <= 0:
        raise UsageError(f"max_shard_size is {max_shard_size!r}", expected="a positive number of bytes")
    if not tensors:
        raise UsageError("no tensors to write", fix="check which layers and tensors were selected")
    _check_names(tensors)
    shards = _cut(tensors, max_shard_size)
    if len(shards) == 1:
        return HFPlan((_file("model.safetensors", shards[0]),), None)
    paths = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    files = tuple(_file(path, shard) for path, shard in zip(paths, shards, strict=True))
    return HFPlan(files, _index(files))


def lined_up(file: FilePlan, lies_at: Mapping[str, int]) -> FilePlan:
    """The same file with spaces in its header, so that pages of it line up with pages of their source.

    `lies_at` gives the byte in its source file at which a payload's bytes lie. The kernel copies pages
    that line up faster than others. Most bytes win, where not all can line up.
    """
    weight: Counter[int] = Counter()
    header, *payloads = file.parts
    assert isinstance(header, bytes)
    at = 0
    for part in payloads:
        assert isinstance(part, Payload)
        if part.name in lies_at and (lies_at[part.name] - at) % 8 == 0:
            weight[(lies_at[part.name] - at) % _PAGE] += part.nbytes
        at += part.nbytes
    if not weight:
        return file
    wanted, _ = weight.most_common(1)[0]
    spaces = (wanted - len(header)) % _PAGE
    length = int.from_bytes(header[:8], "little") + spaces
    return FilePlan(file.path, (length.to_bytes(8, "little") + header[8:] + b" " * spaces, *payloads))


def parse_size(text: str | int) -> int:
    """A size in bytes, as huggingface reads it: GB is 10**9, GiB is 2**30.

    >>> parse_size("5GB"), parse_size("1.5 GiB"), parse_size(7)
    (5000000000, 1610612736, 7)

    Raises `UsageError` for anything else. A unit in `b` is refused: transformers reads "5Gb" as
    bits, huggingface_hub as bytes.
    """
    fix = "write it like 5GB, 500MB, 2GiB, or as a number of bytes"
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise UsageError(f"{tick(text)} is not a size", fix=fix)
    match = _SIZE.fullmatch(str(text)) if isinstance(text, str) or 0 <= text < 10**18 else None
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(f"{tick(text)} is not a size", fix=fix)
    if match[2].endswith("b"):
        raise UsageError(f"{tick(text)}: bits or bytes? Libraries differ on a lower-case b", fix=fix)
    nbytes = int(Fraction(match[1]) * _UNITS[match[2].upper()])
    if nbytes <= 0:
        raise UsageError(f"{tick(text)} is less than a byte", fix=fix)
    return nbytes


def _check_names(tensors: Sequence[Tensor]) -> None:
    """No name twice, over all files; each dtype one that a byte copy can write."""
    twice = [tick(name) for name, count in Counter(name for name, _, _ in tensors).items() if count > 1]
    if twice:
        raise AccountingError(
            f"{len(twice)} tensors would be written twice: {capped(twice)}",
            fix="two sources map to one name: neither may silently win",
        )
    for name, dtype, _ in tensors:
        if dtype in SUB_BYTE_BITS:
            raise UnsupportedEncoding(f"tensor {tick(name)} has the sub-byte dtype {dtype}")
        if dtype not in DTYPE_NBYTES:
            raise UsageError(f"tensor {tick(name)} has the dtype {tick(dtype)}, unknown to safetensors")


def _cut(tensors: Iterable[Tensor], max_shard_size: int) -> list[list[Tensor]]:
    """The tensors in runs, each as long as fits."""
    shards: list[list[Tensor]] = []
    room = -1
    for tensor in tensors:
        nbytes = _payload(tensor).nbytes
        if nbytes > room:
            shards.append([])
            room = max(nbytes, max_shard_size)
        shards[-1].append(tensor)
        room -= nbytes
    return shards


def _file(path: str, tensors: list[Tensor]) -> FilePlan:
    """One safetensors file, wider dtypes first and otherwise in the given order."""
    ordered = sorted(tensors, key=lambda tensor: -DTYPE_NBYTES[tensor[1]])
    return FilePlan(path, (encode_header(ordered), *map(_payload, ordered)))


def _payload(tensor: Tensor) -> Payload:
    name, dtype, shape = tensor
    return Payload(name, Region.whole(tuple(shape)), dtype)


def _index(files: tuple[FilePlan, ...]) -> bytes:
    """The index of `files`, spelled as huggingface spells it."""
    placed = [(part, file.path) for file in files for part in file.parts if isinstance(part, Payload)]
    index = {
        "metadata": {"total_size": sum(part.nbytes for part, _ in placed)},
        "weight_map": {part.name: path for part, path in placed},
    }
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
