"""The fingerprint of a whole checkpoint: read once, as it lies in its files, in bounded memory.

Nothing is gathered: each stored run is hashed at the places that its bytes have in the canonical
tensors, and the parts add up. Only norms that Megatron centres on zero, which have other bytes there,
and tensors whose bytes are also to be hashed in order go through a buffer in the tensor's own order.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from convtools.conversion.plan import Resolver, Target, hf_shifts
from convtools.conversion.source import Duplicate, Source
from convtools.equality.canonical import Canonical, Side, open_side
from convtools.equality.fingerprint import ALGORITHM, hexdigest
from convtools.equality.fingerprint_reading import InOrder, Part, hash_all, in_bytes
from convtools.equality.reading import Reader, Stamp, stamp
from convtools.errors import AccountingError, CheckpointError, UsageError
from convtools.layout.piece import block
from convtools.layout.plan import Move, move, slabs
from convtools.layout.region import Region
from convtools.manifest import XXH3, Manifest, ManifestSource, ManifestTensor, made_by
from convtools.stores.base import DTYPE_NBYTES
from convtools.stores.hf import HFCheckpoint, is_hf, open_hf
from convtools.stores.names import tick
from convtools.stores.safetensors_header import read_header

Bar = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Given the bytes to come, a context that is called with the bytes that were read."""

_PIECE = 4 << 20
_STORED = "stored: "  # before names of stored tensors, which are hashed to see that copies are the same
_NO_TARGET = Target("hf", (), None, {})


@dataclass(frozen=True, slots=True)
class _Plan:
    """What there is to hash."""

    format: str
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """(dtype, shape) of every tensor of the manifest."""
    items: Iterable[Part | InOrder]
    nbytes: int
    reader: Callable[[], Reader] = Reader
    copies: dict[str, str] = field(default_factory=dict)
    """Tensors that a conversion writes from another one."""
    twins: tuple[Duplicate, ...] = ()
    """Stored tensors that must be the same."""
    files: dict[Path, Stamp | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def fingerprint(
    store: Any,
    *,
    only: Collection[str] | None = None,
    xxh3: bool = False,
    iteration: int | str | None = None,
    hf_config: Path | None = None,
    workers: int | None = None,
    bar: Bar | None = None,
    path: str | None = None,
) -> Manifest:
    """One hash for every canonical tensor of `store`.

    `store` is a path, a Hub id, an opened source or side, named live tensors or a module, or `Shards`.
    `only` names the tensors that are wanted; `xxh3` adds a hash of the bytes in order; `path` is
    `compiled` or `numpy`. Raises CheckpointError where a file is damaged or changes while it is read,
    AccountingError where two stored copies of one tensor differ, ConfigError, UsageError.
    """
    root = Path(store) if isinstance(store, str | Path) else None
    if root is not None and is_hf(root):
        if iteration is not None or hf_config is not None:
            raise UsageError(
                "--iteration and --hf-config are for a Megatron checkpoint", fix="leave them out"
            )
        plan = _folder(root, only, xxh3)
    else:
        plan = _side(open_side(store, iteration=iteration, hf_config=hf_config), only, xxh3)
    strange = [name for name in only or () if name not in plan.tensors]
    if strange:
        raise UsageError(
            f"no tensor {tick(strange[0])} in the checkpoint", found=f"{len(strange)} such names"
        )
    with bar(plan.nbytes) if bar else nullcontext(lambda nbytes: None) as progress:
        count = workers or min(4, os.cpu_count() or 1)
        found = hash_all(plan.items, plan.reader, workers=count, progress=progress, xxh3=xxh3, path=path)
    _unchanged(plan.files)
    _same(plan.twins, found.values)
    name = root.resolve().name if root is not None and root.is_dir() else str(root or plan.format)
    return Manifest(
        made_by=made_by(),
        source=ManifestSource(name=name or "/", format=plan.format),
        tensors={
            n: ManifestTensor(dtype=dtype, shape=shape, hashes=_hashes(found, plan.copies.get(n, n)))
            for n, (dtype, shape) in plan.tensors.items()
        },
        notes=list(plan.notes),
    )


def _hashes(found: Any, name: str) -> dict[str, str]:
    out = {ALGORITHM: hexdigest(found.values[name])}
    return out | ({XXH3: found.in_order[name]} if name in found.in_order else {})


class _Run(NamedTuple):
    """A tensor that lies whole in one file."""

    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int

    def read(self, reader: Reader) -> Iterator[memoryview]:
        """Its bytes in order."""
        buffer = memoryview(bytearray(min(_PIECE, self.nbytes)))
        for at in range(0, self.nbytes, _PIECE):
            view = buffer[: min(_PIECE, self.nbytes - at)]
            reader.into(self.path, self.offset + at, view)
            yield view


def _folder(root: Path, only: Collection[str] | None, xxh3: bool) -> _Plan:
    """A Hugging Face folder: its tensors are canonical as they lie, whatever model they belong to."""
    store = open_hf(root, list_sub_byte=True)
    runs = {n: run for n, run in _runs(root, store) if only is None or n in only}
    notes = [
        *(
            f"not read: {tick(n)} in {tick(file)}: the index does not assign it there"
            for n, file in store.stray_tensors
        ),
        *(f"not read: {tick(file)}: {reason}" for file, reason in store.unread_files),
    ]  # fmt: skip
    items: list[Part | InOrder] = [
        InOrder(n, r.nbytes, r.read) if xxh3 else Part(n, r.path, r.offset, Move(0, 0, (), r.nbytes))
        for n, r in runs.items()
    ]
    return _Plan(
        "hf",
        {n: run[:2] for n, run in runs.items()},
        items,
        sum(run.nbytes for run in runs.values()),
        files={path: stamp(path) for path in {run.path for run in runs.values()}},
        notes=tuple(notes[:100]),
    )


def _runs(root: Path, store: HFCheckpoint) -> Iterator[tuple[str, _Run]]:
    for name, t in store.tensors.items():
        yield name, _Run(t.dtype, t.shape, t.blobs[0].path, t.blobs[0].offset, t.nbytes)
    for file in store.weight_files if store.sub_byte else ():
        for name, entry in read_header(root / file).tensors.items():
            if store.sub_byte.get(name) == entry and (name, file) not in store.stray_tensors:
                yield name, _Run(entry.dtype, entry.shape, root / file, entry.start, entry.end - entry.start)


def _side(side: Side, only: Collection[str] | None, xxh3: bool) -> _Plan:
    """Anything else that can be opened, through the model's tables where it is not in canonical form."""
    source = side.source
    if source is None:
        raise UsageError("a manifest has no weights to hash", fix="give the checkpoint that it describes")
    tensors = {n: (side.dtypes[n], tuple(shape)) for n, shape in side.hf.items()}
    megatron = isinstance(source, Source) and source.format != "hf"
    copies = {c.name: c.of for c in source.model.copies()} if megatron else {}
    # Megatron stores no copy: one that only a conversion would write is hashed where it is asked for.
    tensors |= {name: tensors[of] for name, of in copies.items() if only is not None and name in only}
    tensors = {n: t for n, t in tensors.items() if only is None or n in only}
    read = [n for n in side.hf if n in tensors or any(copies.get(t) == n for t in tensors)]
    shifted = hf_shifts(source, _NO_TARGET) if megatron else {}
    twins = side.duplicates if megatron and only is None else ()
    stored = sorted({name for pair in twins for name in pair})
    canonical = Canonical(side, dict(side.hf), dict(side.dtypes))
    resolver = Resolver(source, _NO_TARGET)

    def items() -> Iterator[Part | InOrder]:
        for name in read:
            size, whole = DTYPE_NBYTES[side.dtypes[name]], Region.whole(tuple(side.hf[name]))
            if xxh3 or name in shifted or not whole.numel:
                yield InOrder(name, whole.numel * size, partial(_in_order, canonical, name))
                continue
            for g in resolver.gathers(name, whole):
                yield Part(name, g.path, g.offset, in_bytes(g.move, size))
        for name in stored:
            tensor = source.tensors[name]
            for path, offset, region in tensor.blobs:
                of = move(block("", "", region).inverse(), tensor.shape, region.sizes)
                yield Part(f"{_STORED}{name}", path, offset, in_bytes(of, DTYPE_NBYTES[tensor.dtype]))

    nbytes = sum(canonical.nbytes(n) for n in read) + sum(source.tensors[n].nbytes for n in stored)
    return _Plan(
        side.format,
        tensors,
        items(),
        nbytes,
        side.reader,
        copies,
        tuple(twins),
        side.files,
        tuple(side.notes),
    )


def _in_order(canonical: Canonical, name: str, reader: Reader) -> Iterator[memoryview]:
    """A tensor's bytes in order: slab by slab, for a unit of long runs would be as large as the tensor."""
    whole = Region.whole(tuple(canonical.shapes[name]))
    for slab in slabs(whole, _PIECE // DTYPE_NBYTES[canonical.dtypes[name]]) if whole.numel else ():
        yield from canonical.read(name, slab, reader)


def _same(twins: Iterable[Duplicate], values: dict[str, int]) -> None:
    for kept, repeated in twins:
        if values[_STORED + kept] != values[_STORED + repeated]:
            raise AccountingError(
                f"two copies of one tensor differ: {tick(kept)} and {tick(repeated)}",
                expected="the same bytes",
                fix="the checkpoint mixes two states of the model; save it again",
            )


def _unchanged(files: dict[Path, Stamp | None]) -> None:
    """Raise CheckpointError where a file is another one than when it was opened."""
    for path, before in files.items():
        if stamp(path) != before:
            raise CheckpointError(
                "the file changed while it was read", where=path, fix="run it again when nothing writes to it"
            )
