"""`verify`: whether a folder is still what its manifest says, and what its source says."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from convtools.codecs.cast import cast
from convtools.conversion.plan import Resolver, Target
from convtools.errors import CheckpointError, ConfigError, ConvtoolsError, UsageError
from convtools.layout.mapping import Mapping
from convtools.layout.piece import block
from convtools.layout.plan import slabs
from convtools.layout.region import Region
from convtools.manifest import (
    MANIFEST_NAME,
    XXH3,
    Manifest,
    ManifestTensor,
    hash_bytes,
    hash_tensor,
    read_manifest,
)
from convtools.slicing.check import model_faults
from convtools.slicing.layers import Unclear, find_layers, layer_count, text_part
from convtools.slicing.origin import Origin, open_origin
from convtools.stores.base import DTYPE_NBYTES, Payload, StoredTensor
from convtools.stores.hf import CONFIG, HFCheckpoint, open_hf
from convtools.stores.hf_index import SINGLE
from convtools.stores.hub import HubReader, is_remote
from convtools.stores.move import SLAB, Mover, Unit

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)", re.ASCII)


class Fault(NamedTuple):
    """A tensor, or `config.json`, that is not what it should be."""

    tensor: str
    what: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared, and every fault that was found."""

    path: str
    source: str | None
    """What the tensors were compared with, beside the manifest."""
    tensors: int
    nbytes: int
    """Bytes that were read of the folder."""
    faults: tuple[Fault, ...]
    config_covered: bool
    """Whether the manifest has a hash of config.json too."""

    @property
    def whole(self) -> bool:
        """Whether every tensor is as it should be."""
        return not self.faults

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return asdict(self) | {"whole": self.whole, "faults": [fault._asdict() for fault in self.faults]}


def verify_slice(path: str | Path, source: str | None = None, *, workers: int = 2) -> Verification:
    """Check config.json and every tensor of HF folder `path` against its manifest and, if given, its source.

    Raises CheckpointError where the folder cannot be read as a checkpoint or has no manifest.
    """
    root = Path(path)
    if workers < 1:
        raise UsageError(f"--workers {workers} reads nothing", expected="1 or more")
    if not root.is_dir():
        raise UsageError(f"`{root}` is not a directory", expected="a checkpoint's folder")
    if not (root / MANIFEST_NAME).is_file():
        raise CheckpointError(
            f"no `{MANIFEST_NAME}` in the folder",
            where=root,
            fix="`convtools slice` and `convtools publish` write one; without it nobody knows what was meant",
        )
    manifest = read_manifest(root / MANIFEST_NAME)
    store = open_hf(root)
    faults = [*_config(manifest, store), *_listed(manifest, store.tensors), *_beside(store)]
    if not any(fault.tensor == CONFIG for fault in faults):
        known = {fault.tensor for fault in faults}
        faults += [Fault(*found) for found in model_faults(store) if found[0] not in known]
    bad = {fault.tensor for fault in faults}
    good = {n: t for n, t in store.tensors.items() if n not in bad}
    faults += _in_parallel(lambda item: _hashed(item[1], manifest.tensors[item[0]]), good.items(), workers)
    if source is not None:
        faults += _against(open_origin(source), manifest, good, _stack(store), workers)
    nbytes = sum(t.nbytes for t in good.values())
    return Verification(str(root), source, len(good), nbytes, _once_each(faults), manifest.config is not None)


def _config(manifest: Manifest, store: HFCheckpoint) -> list[Fault]:
    """Whether config.json is the one that was written; raises where it has not the layers that lie there.

    What it says is only asked where it is unknown whether it is the one, or known that it is.
    """
    found = hash_bytes(store.config_bytes)
    if manifest.config not in (None, found):
        return [Fault(CONFIG, f"{XXH3} is {found}, expected {manifest.config}")]
    _check_layers(store.config, store.tensors, manifest)
    return []


def _once_each(faults: list[Fault]) -> tuple[Fault, ...]:
    """One fault a tensor, whatever it was compared with."""
    by_name: dict[str, list[str]] = {}
    for fault in faults:
        by_name.setdefault(fault.tensor, []).append(fault.what)
    return tuple(Fault(name, "; ".join(what)) for name, what in sorted(by_name.items()))


def _check_layers(config: dict[str, Any], found: dict[str, StoredTensor], manifest: Manifest) -> None:
    """Raise AccountingError, ConfigError where the config has not the layers that lie there (B68)."""
    text = text_part(config)
    try:
        find_layers(found, text)
    except Unclear:  # which stack was cut the user had to say: what is left is to count
        if manifest.layers is None:
            raise
        said = layer_count(text)
        if said is not None and said != len(manifest.layers):
            raise ConfigError(
                f"the config says {said} layers", where="config.json", expected=len(manifest.layers)
            ) from None


def _listed(manifest: Manifest, found: dict[str, StoredTensor]) -> Iterator[Fault]:
    """Which tensors are missing, left over, or of another dtype or shape."""
    for name in manifest.tensors:
        if name not in found:
            yield Fault(name, "missing: the manifest has it")
    for name, tensor in found.items():
        wanted = manifest.tensors.get(name)
        if wanted is None:
            yield Fault(name, "not in the manifest")
        elif (tensor.dtype, tuple(tensor.shape)) != (wanted.dtype, tuple(wanted.shape)):
            yield Fault(
                name, f"is {tensor.dtype} {list(tensor.shape)}, expected {wanted.dtype} {list(wanted.shape)}"
            )


def _beside(store: HFCheckpoint) -> Iterator[Fault]:
    """Weights that the index does not name, and that some loaders read in the place of those it does."""
    for file, reason in store.unread_files:
        if file == SINGLE:
            yield Fault(file, f"not in the manifest: {reason}")
    for name, file in store.stray_tensors:
        yield Fault(f"{name} in {file}", "not in the manifest: the index does not assign it to that file")


def _stack(store: HFCheckpoint) -> str | None:
    """What stands before the number of a layer in the slice; None where that is unclear."""
    try:
        return find_layers(store.tensors, text_part(store.config)).prefix
    except ConvtoolsError:
        return None


def is_its_place(name: str, of: str, layers: list[int] | None, prefix: str | None) -> bool:
    """Whether tensor `name` of a slice may be `of` of its source: the same one, of the layer that was kept.

    >>> is_its_place("h.0.q", "h.7.q", [7], "h."), is_its_place("h.0.q", "h.7.k", [7], "h.")
    (True, False)
    """
    number, dot, within = name.removeprefix(prefix or "").partition(".")
    if layers is None or prefix is None or not name.startswith(prefix) or not number.isdecimal():
        return name == of or (prefix is None and _NUMBER.sub("*", name) == _NUMBER.sub("*", of))
    if int(number) < len(layers):
        return of == f"{prefix}{layers[int(number)]}{dot}{within}"
    return of.startswith(prefix) and of[len(prefix) :].partition(".")[2] == within  # numbered on, for MTP


def _in_parallel(work: Any, items: Any, workers: int) -> Iterator[Fault]:
    with ThreadPoolExecutor(workers) as pool:
        for fault in pool.map(work, items):
            if fault is not None:
                yield fault


def _hashed(tensor: StoredTensor, wanted: ManifestTensor) -> Fault | None:
    expected = wanted.hashes.get(XXH3)
    if expected is None:
        return Fault(tensor.name, f"the manifest has no {XXH3} hash of it")
    blob = tensor.blobs[0]
    found = hash_tensor(blob.path, blob.offset, tensor.nbytes)
    return None if found == expected else Fault(tensor.name, f"{XXH3} is {found}, expected {expected}")


def _against(
    origin: Origin, manifest: Manifest, found: dict[str, StoredTensor], prefix: str | None, workers: int
) -> Iterator[Fault]:
    """Every tensor of the slice against the part of the source that it was cut from."""
    pairs: list[tuple[str, str]] = []
    for name, tensor in found.items():
        of, rows = manifest.tensors[name].source or name, manifest.tensors[name].source_rows
        if of not in origin.hf:
            yield Fault(name, f"the source has no `{of}`")
            continue
        if not is_its_place(name, of, manifest.layers, prefix):
            yield Fault(name, f"the manifest says that it is the source's `{of}`, which is another tensor")
            continue
        if rows is not None and (not origin.hf[of] or rows > origin.hf[of][0]):
            yield Fault(name, f"the source's `{of}` is {list(origin.hf[of])}: it has no {rows} rows")
            continue
        wanted = origin.hf[of] if rows is None else (rows, *origin.hf[of][1:])
        if origin.dtypes[of] != tensor.dtype or tuple(wanted) != tuple(tensor.shape):
            yield Fault(name, f"the source's `{of}` is {origin.dtypes[of]} {list(origin.hf[of])}")
            continue
        pairs.append((name, of))
    pieces = tuple(block(name, of, Region.whole(found[name].shape)) for name, of in pairs)
    shapes = {name: found[name].shape for name, _ in pairs}
    resolver = Resolver(origin, Target("hf", (), Mapping(shapes, origin.hf, pieces), {}))

    hub = HubReader(origin.hub) if origin.hub is not None else None

    def compare(pair: tuple[str, str]) -> Fault | None:
        name, of = pair
        same = _same(resolver, found[name], hub)
        return None if same else Fault(name, f"its bytes are not those of the source's `{of}`")

    yield from _in_parallel(compare, pairs, workers)


def _same(resolver: Resolver, tensor: StoredTensor, hub: HubReader | None) -> bool:
    """Whether a tensor of the slice is, byte for byte, what the source gives."""
    blob, size, at, mover = tensor.blobs[0], DTYPE_NBYTES[tensor.dtype], tensor.blobs[0].offset, Mover()
    try:
        for slab in slabs(Region.whole(tensor.shape), SLAB // size):
            for unit in resolver.units(Payload(tensor.name, slab, tensor.dtype), 0):
                theirs = _gathered(unit, mover, hub)
                if mover.read(blob.path, at, len(theirs)) != theirs:
                    return False
                at += len(theirs)
    finally:
        mover.close()
    return True


def _gathered(unit: Unit, mover: Mover, hub: HubReader | None) -> bytes | memoryview:
    """The bytes that the source gives for a unit, wherever they lie."""
    if hub is not None and is_remote(unit.gathers[0].path):
        out = bytearray(unit.numel * DTYPE_NBYTES[unit.src_dtype])
        for g in unit.gathers:
            size = DTYPE_NBYTES[unit.src_dtype]
            for to, of in g.move.runs():
                run = g.move.run * size
                out[to * size : to * size + run] = hub.read(g.path, g.offset + of * size, run)
        return bytes(out)
    view = mover.gather(unit)
    return cast(view, unit.src_dtype, unit.dst_dtype, unit.plus) if unit.plus else view
