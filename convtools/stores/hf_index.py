"""Which files of a Hugging Face folder hold the model: the index, or `model.safetensors` alone.

The index is an allow-list, held against the headers of every file that it names. Where two sets of
weights lie side by side and nothing says which is meant, neither is read.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

from convtools.errors import CheckpointError, UnsupportedEncoding, capped, together
from convtools.stores.json_file import read_json
from convtools.stores.names import tick
from convtools.stores.regular_file import absence
from convtools.stores.safetensors_header import HeaderEntry, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(
    r".*(\.(safetensors|bin|pt|pth|ckpt|gguf|ggml|h5|msgpack|onnx|onnx_data|distcp|nemo|tflite)"
    r"|\.(safetensors|bin)\.index(\.[^.]+)?\.json)",
    re.IGNORECASE | re.DOTALL,
)
"""Names of files that hold weights, in any format, or that are an index of such files."""

MAX_INDEX_NBYTES = 200_000_000
_SHARD = re.compile(r"model-\d+-of-(?P<total>\d+)\.safetensors")


def choose_index(
    root: Path, top: list[str], read: Callable[[Path], Mapping[str, str]] | None = None
) -> str | None:
    """The index to follow, if there is one. Raises `CheckpointError` where it is unclear which.

    `read` is `read_index`, or does the same for a `root` that is not on this disk.
    """
    found = [name for name in top if name.endswith(".safetensors.index.json")]
    if INDEX in found or not found:
        return INDEX if found else None
    if len(found) > 1:
        raise _rivals(root, found)
    named = set((read or read_index)(root / found[0]).values())
    others = [name for name in top if name == SINGLE or _model_set(name)]
    if set(others) - named:
        raise _rivals(root, found + others)
    return found[0]


def check_single(root: Path, top: list[str]) -> None:
    """Without an index, `model.safetensors` is the checkpoint, and nothing may rival it.

    Raises `CheckpointError` where it is absent or has rivals; `UnsupportedEncoding` for GGUF alone.
    """
    sets = sorted({name for n in top if (name := _model_set(n))})
    if sets and (SINGLE in top or len(sets) > 1):
        raise _rivals(root, [SINGLE] * (SINGLE in top) + sets)
    if SINGLE in top:
        return
    if sets:
        raise CheckpointError(
            f"a set of shards without its index `{INDEX}`",
            where=root,
            found=tick(sets[0]),
            fix="fetch the index again; without it nobody can tell whether a shard is missing or stale",
        )
    weights = [name for name in top if WEIGHTS.fullmatch(name)]
    if weights and all(name.lower().endswith(".gguf") for name in weights):
        raise UnsupportedEncoding(
            "GGUF weights are not read",
            where=root,
            found=capped(map(tick, weights)),
            fix="convert the model's safetensors checkpoint",
        )
    raise CheckpointError(
        f"neither `{SINGLE}` nor `{INDEX}` in the folder",
        where=root,
        found=capped(map(tick, weights)) or "no weights at all",
        fix="weights must be safetensors: with transformers, `save_pretrained(folder)` writes them",
    )


def read_index(path: Path) -> dict[str, str]:
    """`weight_map` of an index: tensor -> file. Nothing else in it is believed (B45).

    Raises `CheckpointError` for a name that could lead out of the folder, among other things.
    """
    return weight_map(read_json(path, MAX_INDEX_NBYTES, constants=False)[1], path)


def weight_map(index: Mapping[str, object], path: Path) -> dict[str, str]:
    """The same of an index that was read. Raises as `read_index` does."""
    found = index.get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(
            "the index has no `weight_map` that names a tensor",
            where=path,
            expected="an object: tensor name -> file name",
            found=tick(found),
        )
    problems = [
        f"{tick(name)} is assigned to {tick(file)}: {fault}"
        for name, file in found.items()
        if (fault := _bad_file_name(file))
    ]
    if problems:
        raise together(CheckpointError, problems, fix=f"no part of {path} was followed; fetch it again")
    return found


def read_assigned(root: Path, index_file: str, assigned: dict[str, str]) -> dict[str, dict[str, HeaderEntry]]:
    """file -> its header, once every tensor lies where the index says.

    Raises `CheckpointError` that lists all missing files and tensors at once.
    """
    files = sorted(set(assigned.values()))
    absent = {file: why for file in files if (why := absence(root / file))}
    headers = {file: read_header(root / file).tensors for file in files if file not in absent}
    check_assigned(root / index_file, assigned, absent, headers)
    return headers


def check_assigned(
    index: Path,
    assigned: Mapping[str, str],
    absent: Mapping[str, str],
    headers: Mapping[str, Mapping[str, HeaderEntry]],
) -> None:
    """Raise `CheckpointError` unless every tensor of an index lies where it says.

    `absent` says why a file could not be read; `headers` has all the others.
    """
    homes = {name: file for file, entries in headers.items() for name in entries}
    lost: defaultdict[str, list[str]] = defaultdict(list)
    nowhere, elsewhere = [], []
    for name, file in assigned.items():
        if file in absent:
            lost[file].append(name)
        elif name in headers[file]:
            continue
        elif name in homes:
            elsewhere.append(f"{tick(name)} (index: {tick(file)}; lies in {tick(homes[name])})")
        else:
            nowhere.append(f"{tick(name)} (index: {tick(file)})")
    problems = []
    if lost:
        gone = [f"{tick(f)} ({absent[f]}; it should hold {capped(map(tick, n), 3)})" for f, n in lost.items()]
        problems.append(f"files that the index names and that are missing ({len(lost)}): {capped(gone)}")
    if nowhere:
        problems.append(f"tensors of the index that no shard holds ({len(nowhere)}): {capped(nowhere)}")
    if elsewhere:
        problems.append(
            f"tensors of the index that lie in another shard ({len(elsewhere)}): {capped(elsewhere)}"
        )
    if problems:
        fix = f"fetch the missing files again, or correct {index}"
        raise together(CheckpointError, problems, fix=fix)


def _model_set(name: str) -> str | None:
    """Which set of shards of the model `name` belongs to, if any."""
    shard = _SHARD.fullmatch(name)
    return f"model-*-of-{shard['total']}.safetensors" if shard else None


def _rivals(root: Path, found: list[str]) -> CheckpointError:
    return CheckpointError(
        "several sets of weights in one folder, and no index says which is meant",
        where=root,
        expected=f"`{INDEX}`, or one set alone",
        found=capped(map(tick, found)),
        fix="move the others out of the folder",
    )


def _bad_file_name(file: object) -> str | None:
    """Why an index may not name `file`."""
    if not isinstance(file, str):
        return "not a file name"
    if not file.isprintable() or "\\" in file or len(file) > 1024:
        return "not a plain file name"
    if any(part in ("", ".", "..") for part in file.split("/")):
        return "a path that leaves the folder, or is not in its plain form"
    return None if file.endswith(".safetensors") else "not a safetensors file"
