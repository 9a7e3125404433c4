"""The manifest of a folder's weights as they are: held against the one that lies there, or made new."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import msgspec

from convtools.errors import CheckpointError, together
from convtools.manifest import (
    MANIFEST_NAME,
    XXH3,
    Manifest,
    ManifestTensor,
    hash_bytes,
    hash_tensor,
    made_by,
    read_manifest,
)
from convtools.stores.base import StoredTensor
from convtools.stores.hf import CONFIG, HFCheckpoint
from convtools.stores.names import tick

Bar = Callable[[int], AbstractContextManager[Callable[[int], None]]]


class Checked(NamedTuple):
    """A manifest that the weights were held against."""

    manifest: Manifest
    how: str
    """`checked`: it lay there, and is right; `completed`: it lacked hashes; `written`: there was none."""


def checked_manifest(root: Path, store: HFCheckpoint, workers: int, bar: Bar) -> Checked:
    """Read all weights. Raises CheckpointError that names every tensor that is not what the manifest says."""
    old = read_manifest(root / MANIFEST_NAME) if MANIFEST_NAME in store.side_files else None
    if old is not None:
        _refuse(root, [*_config(old, store), *_listed(old, store)])  # before hours of reading
    hashes = _hashes(store, workers, bar)
    if old is None:
        tensors = {
            name: ManifestTensor(dtype=t.dtype, shape=t.shape, hashes={XXH3: hashes[name]})
            for name, t in store.tensors.items()
        }
        config = hash_bytes(store.config_bytes)
        return Checked(Manifest(made_by=made_by(), tensors=tensors, config=config), "written")
    wrong = [
        f"{tick(name)} has the {XXH3} {hashes[name]}, not {said}"
        for name, tensor in old.tensors.items()
        if (said := tensor.hashes.get(XXH3, hashes[name])) != hashes[name]
    ]
    _refuse(root, wrong)
    if all(XXH3 in tensor.hashes for tensor in old.tensors.values()):
        return Checked(old, "checked")
    tensors = {
        name: msgspec.structs.replace(tensor, hashes={**tensor.hashes, XXH3: hashes[name]})
        for name, tensor in old.tensors.items()
    }
    return Checked(msgspec.structs.replace(old, tensors=tensors), "completed")


def _config(manifest: Manifest, store: HFCheckpoint) -> list[str]:
    found = hash_bytes(store.config_bytes)
    if manifest.config in (None, found):
        return []
    return [f"`{CONFIG}` has the {XXH3} {found}, not {manifest.config}"]


def _listed(manifest: Manifest, store: HFCheckpoint) -> list[str]:
    """Tensors that are missing, left over, or of another dtype or shape."""
    found, problems = store.tensors, []
    for name, tensor in manifest.tensors.items():
        if name not in found:
            problems.append(f"{tick(name)} is missing: the manifest has it")
        elif (found[name].dtype, found[name].shape) != (tensor.dtype, tensor.shape):
            problems.append(
                f"{tick(name)} is {found[name].dtype} {list(found[name].shape)}, "
                f"not {tensor.dtype} {list(tensor.shape)}"
            )
    problems += [f"{tick(name)} is not in the manifest" for name in found if name not in manifest.tensors]
    return problems


def _hashes(store: HFCheckpoint, workers: int, bar: Bar) -> dict[str, str]:
    total = sum(t.nbytes for t in store.tensors.values())

    def one(tensor: StoredTensor) -> tuple[str, int, str]:
        blob = tensor.blobs[0]
        return tensor.name, tensor.nbytes, hash_tensor(blob.path, blob.offset, tensor.nbytes)

    out = {}
    with bar(total) as progress, ThreadPoolExecutor(max(1, workers)) as pool:
        for name, nbytes, text in pool.map(one, store.tensors.values()):
            out[name] = text
            progress(nbytes)
    return out


def _refuse(root: Path, problems: list[str]) -> None:
    if problems:
        fix = f"make the checkpoint anew; or remove {root / MANIFEST_NAME}, if what lies there now is meant"
        raise together(CheckpointError, problems, fix=fix)
