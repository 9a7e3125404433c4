"""A Hugging Face checkpoint folder: which files hold the weights, and where each tensor's bytes lie.

The index, where there is one, is an allow-list: a reused shard can hold stale tensors, and a folder
can hold a second set of files, and both would silently win over the right ones. What is read, what
is left unread and why, and what a converter must carry along are all said by name.
"""

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from convtools.errors import CheckpointError, UnsupportedEncoding, capped
from convtools.layout.region import Region
from convtools.stores.base import Blob, StoredTensor
from convtools.stores.hf_index import SINGLE, WEIGHTS, check_single, choose_index, read_assigned, read_index
from convtools.stores.json_file import read_json
from convtools.stores.names import is_unicode, tick
from convtools.stores.regular_file import absence
from convtools.stores.safetensors_header import SUB_BYTE_BITS, HeaderEntry, read_header

CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
MAX_CONFIG_NBYTES = 50_000_000
MAX_FILES = 100_000
SKIPPED = frozenset((".git", ".cache"))
_LINKED_FOLDER = "a link to a folder: it may lead anywhere, and is not followed"


@dataclass(frozen=True, slots=True)
class HFCheckpoint:
    """A checkpoint folder, as its config, index and headers describe it."""

    root: Path
    config: dict[str, Any]
    """`config.json`, read as Python's json does (Infinity is a number)."""
    config_bytes: bytes
    """`config.json` as it is in the file."""
    tensors: dict[str, StoredTensor]
    """By name, file after file, in the headers' order; one blob each."""
    sub_byte: dict[str, HeaderEntry]
    """Tensors narrower than a byte, listed only on request: never readable as numbers."""
    index_file: str | None
    """The index that was followed, or None for a lone `model.safetensors`."""
    weight_files: tuple[str, ...]
    """Files whose headers were read, relative to `root`, sorted."""
    unread_files: tuple[tuple[str, str], ...]
    """(file, reason) of everything that looks like weights and was not read."""
    stray_tensors: tuple[tuple[str, str], ...]
    """(tensor, file) of tensors in a read file that the index does not assign to it: not read."""
    side_files: tuple[str, ...]
    """Every other file but `config.json`, relative to `root`: a converter copies them as they are."""


def is_hf(root: Path) -> bool:
    """Whether `root` looks like a checkpoint for `open_hf`, going by its file names alone."""
    try:
        names = os.listdir(root)
    except OSError:
        return False
    return CONFIG in names and any(n.endswith((".safetensors", ".safetensors.index.json")) for n in names)


def open_hf(root: Path, *, list_sub_byte: bool = False) -> HFCheckpoint:
    """The checkpoint in folder `root`; reads config, index and headers, and no tensor data.

    Raises `CheckpointError` where a file is missing, damaged or contradicts the index, or where it
    is unclear which of two sets of files is meant; `UnsupportedEncoding` for adapters, GGUF and,
    unless `list_sub_byte`, tensors narrower than a byte.
    """
    root = Path(root)
    try:
        top = sorted(os.listdir(root))
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint folder: {error.strerror}", where=root) from None
    if CONFIG not in top:
        refuse_folder(root, top)
    config_bytes, config = read_json(root / CONFIG, MAX_CONFIG_NBYTES, constants=True)
    index_file = choose_index(root, top)
    if index_file is None:
        check_single(root, top)
        assigned = None
        headers = {SINGLE: read_header(root / SINGLE).tensors}
    else:
        assigned = read_index(root / index_file)
        headers = read_assigned(root, index_file, assigned)
    tensors, sub_byte, stray = place_tensors(headers, assigned, lambda file: root / file)
    if not list_sub_byte:
        refuse_sub_byte(root, sub_byte)
    unread, side = _other_files(root, {CONFIG, *headers}, index_file)
    return HFCheckpoint(
        root, config, config_bytes, tensors, sub_byte, index_file, tuple(headers), unread, stray, side
    )


def place_tensors(
    headers: Mapping[str, Mapping[str, HeaderEntry]],
    assigned: Mapping[str, str] | None,
    place: Callable[[str], Path],
) -> tuple[dict[str, StoredTensor], dict[str, HeaderEntry], tuple[tuple[str, str], ...]]:
    """(tensors, sub-byte tensors, stray tensors) of the files whose headers were read; see `HFCheckpoint`."""
    tensors: dict[str, StoredTensor] = {}
    sub_byte: dict[str, HeaderEntry] = {}
    stray = []
    for file, entries in headers.items():
        path = place(file)
        for name, entry in entries.items():
            if assigned is not None and assigned.get(name) != file:
                stray.append((name, file))
            elif entry.dtype in SUB_BYTE_BITS:
                sub_byte[name] = entry
            else:
                blob = Blob(path, entry.start, Region.whole(entry.shape))
                tensors[name] = StoredTensor(name, entry.dtype, entry.shape, (blob,))
    return tensors, sub_byte, tuple(stray)


def refuse_sub_byte(root: Path, sub_byte: Mapping[str, HeaderEntry]) -> None:
    """Raise `UnsupportedEncoding` if there are tensors narrower than a byte."""
    if sub_byte:
        raise UnsupportedEncoding(
            "the weights are narrower than a byte, and are not read as numbers",
            where=root,
            found=capped(f"{tick(name)} ({entry.dtype})" for name, entry in sub_byte.items()),
            fix="convert the unquantised (bf16) checkpoint of the model",
        )


def read_config(root: Path) -> tuple[bytes, dict[str, Any]]:
    """(bytes, object) of `root/config.json`. Raises `CheckpointError`."""
    return read_json(Path(root) / CONFIG, MAX_CONFIG_NBYTES, constants=True)


def side_files(root: Path) -> tuple[str, ...]:
    """What a converter carries along: all files but config.json and weights. Raises `CheckpointError`."""
    return _other_files(Path(root), {CONFIG}, None)[1]


def refuse_folder(root: Path, top: list[str]) -> None:
    """Say why a folder without `config.json` is no checkpoint."""
    if _ADAPTER in top:
        raise UnsupportedEncoding(
            "a PEFT (LoRA) adapter, not a model",
            where=root,
            found=f"`{_ADAPTER}` and no `{CONFIG}`",
            fix="merge the adapter into its base model first (peft: merge_and_unload), and convert that",
        )
    raise CheckpointError(
        f"no `{CONFIG}` in the folder",
        where=root,
        found=capped(map(tick, top)) or "an empty folder",
        fix="give the folder that `save_pretrained` wrote, or a full download of the repository",
    )


def _other_files(
    root: Path, read: set[str], index_file: str | None
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """(unread weights with the reason, side files); raises for a side file that cannot be copied."""
    return sort_files(root, sorted(_walk(root)), read, index_file)


def sort_files(
    root: Path, listed: Iterable[tuple[str, str]], read: Container[str], index_file: str | None
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """(unread weights with the reason, side files) of `listed`: (file, why it cannot be read or "")."""
    unread, side, broken = [], [], []
    for name, fault in listed:
        if name in read or name == index_file:
            continue
        if fault == _LINKED_FOLDER or WEIGHTS.fullmatch(name):
            unread.append((name, fault or _reason(name, index_file)))
        elif fault or not is_unicode(name):
            broken.append(f"{tick(name)}: {fault or 'its name is not valid UTF-8'}")
        else:
            side.append(name)
    if broken:
        raise CheckpointError(
            "the folder holds files that cannot be copied",
            where=root,
            found=capped(broken),
            fix="fetch them again, or remove them",
        )
    return tuple(unread), tuple(side)


def _walk(root: Path) -> Iterator[tuple[str, str]]:
    """(file relative to `root`, why it cannot be read or ""), without `.git` and `.cache`."""

    def stop(error: OSError) -> NoReturn:
        raise CheckpointError(f"cannot list a folder: {error.strerror}", where=error.filename) from None

    count = 0
    for folder, dirs, files in os.walk(root, onerror=stop):
        dirs[:] = [name for name in dirs if name not in SKIPPED]
        count += len(files)
        if count > MAX_FILES:
            raise CheckpointError(f"over {MAX_FILES} files: this is not a checkpoint's folder", where=root)
        for name in dirs:
            if os.path.islink(os.path.join(folder, name)):
                yield _relative(folder, name, root), _LINKED_FOLDER
        for name in files:
            if name not in SKIPPED:
                yield _relative(folder, name, root), absence(Path(folder, name)) or ""


def _relative(folder: str, name: str, root: Path) -> str:
    return os.path.relpath(os.path.join(folder, name), root)


def _reason(name: str, index_file: str | None) -> str:
    if "/" in name:
        return "weights in a subfolder"
    if name.endswith(".json"):
        return "another index"
    if not name.endswith(".safetensors"):
        return "another format: only safetensors are read"
    if index_file is None:
        return f"not part of `{SINGLE}`"
    if name == SINGLE:
        return "the index does not name it (transformers reads this file first where both are there)"
    return "the index does not name it"
