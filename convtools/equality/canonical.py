"""Any store seen as Hugging Face tensors: what there is of either side, and where its bytes come from."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from convtools.codecs.cast import cast
from convtools.conversion.from_hf import model_of
from convtools.conversion.plan import Resolver, Target
from convtools.conversion.source import Duplicate, LeftOut, Padding, Source
from convtools.equality.given import check_given
from convtools.equality.live import LiveBytes, Shards, named_tensors, shards_source
from convtools.equality.reading import Memory, Reader, Stamp, stamps
from convtools.errors import CheckpointError, ConvtoolsError, UsageError
from convtools.families.registry import Model
from convtools.families.table import Table
from convtools.layout.mapping import Mapping as Pieces
from convtools.layout.region import Region
from convtools.manifest import Manifest, read_manifest
from convtools.stores.base import DTYPE_NBYTES, Payload, StoredTensor
from convtools.stores.move import DIRECT, Unit
from convtools.stores.names import tick


class Loose(NamedTuple):
    """Tensors under Hugging Face names, of which no table need be known: what a `Resolver` reads."""

    tensors: dict[str, StoredTensor]
    hf: dict[str, tuple[int, ...]]
    format: str = "hf"
    to_hf: None = None


class Run(NamedTuple):
    """Bytes of a region that lie in order in one file."""

    to: int
    """Byte of the region where they belong."""
    path: Path
    offset: int
    nbytes: int


@dataclass(eq=False)
class Side:
    """One side of a comparison, opened."""

    name: str
    """As the caller named it."""
    format: str
    """hf, torch_dist, torch, tensors, shards, manifest."""
    hf: Mapping[str, tuple[int, ...]]
    """Shape of every Hugging Face tensor, under this side's own names."""
    dtypes: Mapping[str, str]
    source: Any = None
    """A `Source` or `Loose`; None for a manifest."""
    config: Mapping[str, Any] = field(default_factory=dict)
    manifest: Manifest | None = None
    memory: Memory = field(default_factory=dict)
    spans: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)
    """The memory behind live tensors."""
    hub: Any = None
    root: Path | None = None
    """Folder of a Hugging Face directory."""
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()
    files: dict[Path, Stamp | None] = field(default_factory=dict)
    """Every file that is read, as it was when the side was opened."""

    def reader(self) -> Reader:
        """A reader for one thread."""
        return Reader(self.memory, self.hub)

    @cached_property
    def resolver(self) -> Resolver:
        """Where the elements of its own tensors lie."""
        return Resolver(self.source, Target("hf", (), None, {}))

    @property
    def duplicates(self) -> tuple[Duplicate, ...]:
        """Stored tensors that must be the same bytes."""
        return self.source.duplicates if isinstance(self.source, Source) else ()

    @property
    def padding(self) -> tuple[Padding, ...]:
        """Rows past the vocabulary."""
        return self.source.padding if isinstance(self.source, Source) else ()

    @cached_property
    def model(self) -> Model | None:
        """The model that config and names describe; None where no family knows it."""
        if isinstance(self.source, Source):
            return self.source.model
        if not self.config:
            return None
        try:
            return model_of(self.config, self.hf)[0]
        except ConvtoolsError:  # an unknown or an incomplete model: its names are all there is to go by
            return None

    @cached_property
    def table(self) -> Table | None:
        """The model's table, at the true vocabulary."""
        if self.model is None:
            return None
        try:
            return self.model.table(self.model.spec.vocab)
        except ConvtoolsError:
            return None

    @cached_property
    def copies(self) -> dict[str, str]:
        """Hugging Face tensors that must repeat another, such as a tied head -> the embedding."""
        if self.model is None:
            return {}
        return {copy.name: copy.of for copy in self.model.copies()}


def open_side(
    given: Any,
    *,
    iteration: int | str | None = None,
    hf_config: Path | None = None,
    other_root: Path | None = None,
    manifest: bool = True,
) -> Side:
    """Open a folder, `org/name[@revision]`, manifest, opened source, live tensors; reads metadata only.

    `other_root` is the other side's Hugging Face folder, whose config a Megatron checkpoint that has none
    may borrow. `manifest`: whether errors offer one. Raises CheckpointError, ConfigError, AccountingError,
    UsageError.
    """
    if isinstance(given, Side):
        return given
    if isinstance(given, Source):
        return _of_source(str(given.root), given)
    if isinstance(given, Manifest):
        return _of_manifest("manifest", given)
    if isinstance(given, Shards):
        live = LiveBytes()
        side = _of_source("shards", shards_source(given, live))
        return replace(
            side, format="shards", config=given.config, memory=live.memory, spans=live.spans, files={}
        )
    if (named := named_tensors(given)) is not None:
        return _of_tensors(named)
    if not isinstance(given, str | Path):
        raise UsageError(
            "not something to compare",
            expected="a path, a Hub id, a manifest, an opened source, named tensors or Shards",
            found=type(given).__name__,
        )
    path = Path(given)
    check_given(path, str(given), manifest)
    if path.suffix == ".json" and path.is_file():
        return _of_manifest(str(given), read_manifest(path))
    return _of_folder(str(given), iteration, hf_config, other_root)


def _of_folder(name: str, iteration: int | str | None, hf_config: Path | None, other: Path | None) -> Side:
    from convtools.conversion.api import open_source
    from convtools.slicing.origin import open_origin
    from convtools.stores.hf import is_hf
    from convtools.stores.megatron_dir import find_iteration, is_megatron

    root = Path(name)
    if root.is_dir() and not is_hf(root) and is_megatron(root):
        kept = os.path.lexists(find_iteration(root, iteration).path / "hf")
        if other is not None and hf_config is None and not kept:
            # What is derived from Megatron's args alone may lack rows or names that both sides hold.
            try:
                side = _of_source(name, open_source(root, iteration=iteration, hf_config=other))
                return replace(side, notes=(f"{name} has no config.json: read with that of {other}",))
            except ConvtoolsError:
                pass  # another model's: it is read by its own args
        return _of_source(name, open_source(root, iteration=iteration, hf_config=hf_config))
    if iteration is not None:
        raise UsageError(f"`{name}` has no iterations", fix="give one for a Megatron checkpoint only")
    try:
        origin = open_origin(name)
    except ConvtoolsError as error:
        if root.exists():
            raise
        raise CheckpointError(
            f"there is no folder {tick(name)}, and as a repository on the Hub: {error.what}",
            where=error.where, expected=error.expected, found=error.found, fix=error.fix,
        ) from None  # fmt: skip
    notes = tuple(
        f"{name}: not read: {left.name} ({left.reason})" for left in origin.left_out if _stray(left)
    )
    return Side(
        name, "hf", origin.hf, origin.dtypes, Loose(origin.tensors, origin.hf), origin.config,
        hub=origin.hub, root=origin.root, left_out=origin.left_out, notes=notes, files=stamps(origin.tensors),
    )  # fmt: skip


def _stray(left: LeftOut) -> bool:
    """Whether something that may hold weights was not read."""
    return "note of convtools" not in left.reason and "own manifest" not in left.reason


def _of_source(name: str, source: Source) -> Side:
    copies = {copy.name for copy in source.model.copies()} if source.format != "hf" else set()
    shapes = {n: s for n, s in source.hf.items() if n not in copies}
    dtypes = source.dtypes()
    if source.format == "hf":  # the copies too: here they are tensors like others
        shapes |= {n: t.shape for n, t in source.tensors.items()}
        dtypes = {n: t.dtype for n, t in source.tensors.items()}
        read: Any = Loose(source.tensors, shapes)
    else:
        read = source
    return Side(
        name, source.format, shapes, dtypes, read, dict(source.model.config),
        left_out=source.left_out, notes=(), files=stamps(source.tensors), root=source.side_root,
    )  # fmt: skip


def _of_manifest(name: str, manifest: Manifest) -> Side:
    shapes = {n: tuple(t.shape) for n, t in manifest.tensors.items()}
    return Side(
        name, "manifest", shapes, {n: t.dtype for n, t in manifest.tensors.items()}, manifest=manifest
    )


def _of_tensors(named: Mapping[str, Any]) -> Side:
    live = LiveBytes()
    tensors = {name: live.store(name, tensor) for name, tensor in named.items()}
    shapes = {name: t.shape for name, t in tensors.items()}
    dtypes = {name: t.dtype for name, t in tensors.items()}
    return Side(
        "tensors", "tensors", shapes, dtypes, Loose(tensors, shapes), memory=live.memory, spans=live.spans
    )


@dataclass(eq=False)
class Canonical:
    """A side in the coordinates in which both are compared."""

    side: Side
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    relation: Pieces | None = None
    """Canonical names (a) ~ this side's own (b); None: they are its own."""

    @cached_property
    def _resolver(self) -> Resolver:
        if self.relation is None:
            return self.side.resolver
        return Resolver(self.side.source, Target("hf", (), self.relation, {}))

    def prepare(self) -> None:
        """Build what the threads share."""
        _ = self._resolver

    def run_of(self, name: str) -> tuple[Path, int] | None:
        """(file, byte offset) of a tensor that lies whole and in order in one file."""
        if self.relation is not None or not isinstance(self.side.source, Loose):
            return None
        blob = self.side.source.tensors[name].blobs[0]
        return blob.path, blob.offset

    def read(self, name: str, region: Region, reader: Reader) -> Iterator[memoryview]:
        """The canonical bytes of a region, in order, in parts of at most 8 MiB; each valid until the next."""
        dtype = self.dtypes[name]
        for unit in self._resolver.units(Payload(name, region, dtype), 0):
            data = reader.gather(unit)
            yield data if unit.as_it_is else cast(data, unit.src_dtype, dtype, unit.plus)

    def units(self, name: str, region: Region) -> Iterator[Unit]:
        """Where a region's bytes lie, in order; the offsets count from its first byte."""
        return self._resolver.units(Payload(name, region, self.dtypes[name]), 0)

    def runs(self, name: str, region: Region) -> list[Run] | None:
        """A region as long runs of files, just as they lie there; None where it is not made of such."""
        dtype, size = self.dtypes[name], DTYPE_NBYTES[self.dtypes[name]]
        unit = next(self._resolver.units(Payload(name, region, dtype), 0))
        whole = unit.as_it_is and unit.numel == region.numel == sum(g.move.numel for g in unit.gathers)
        if not whole or any(g.move.run * size < DIRECT for g in unit.gathers):
            return None
        return [
            Run(to * size, g.path, g.offset + of * size, g.move.run * size)
            for g in unit.gathers
            for to, of in g.move.runs()
        ]

    def whole(self, name: str, region: Region, reader: Reader) -> bytearray:
        """The bytes of a region that is known to be small."""
        out = bytearray()
        for part in self.read(name, region, reader):
            out += part
        return out

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor."""
        return Region.whole(self.shapes[name]).numel * DTYPE_NBYTES[self.dtypes[name]]
