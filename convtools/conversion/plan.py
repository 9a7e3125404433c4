"""A conversion before any byte moves: every payload of every file resolved to moves from the source."""

from collections.abc import Iterable, Iterator, Mapping as Mapping_
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from convtools.conversion.source import Stored
from convtools.errors import AccountingError
from convtools.layout.cover import first_fault
from convtools.layout.mapping import Mapping
from convtools.layout.piece import Piece, block, meet
from convtools.layout.plan import move, slabs
from convtools.layout.region import Region
from convtools.stores.base import DTYPE_NBYTES, FilePlan, Payload
from convtools.stores.move import DIRECT, SLAB, Gather, Unit


class SideFile(NamedTuple):
    """A small file of the destination: literal bytes, or a file to copy as it is."""

    path: str
    content: bytes | Path


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be written."""

    format: str
    files: tuple[FilePlan, ...]
    to_hf: Mapping | None
    """Side a: names of payloads, side b: HF names. None: they are the same tensors."""
    dtypes: dict[str, str]
    """dtype in which every HF tensor is written."""
    copies: dict[str, str] = field(default_factory=dict)
    """HF tensors that are written from another one: a tied head from the embedding."""
    fills: dict[str, Region] = field(default_factory=dict)
    """Rows of vocabulary padding, by name of payload: written as zeros."""
    padded_vocab: int | None = None
    """Rows of embedding and head, vocabulary padding included; None on the HF side."""
    iteration: int | str | None = None
    """Which iteration is written, on the Megatron side."""
    side_files: tuple[SideFile, ...] = ()
    last: tuple[SideFile, ...] = ()
    """Files that make the whole a checkpoint: written when all else is on disk."""

    def shapes(self, source: Stored) -> Mapping_[str, tuple[int, ...]]:
        """Shape of every tensor that is to be written."""
        if self.to_hf is not None:
            return self.to_hf.a
        return source.hf | {name: source.hf[of] for name, of in self.copies.items()}

    def needs(self) -> Iterable[str]:
        """HF tensors that it is made of."""
        return () if self.to_hf is None else self.to_hf.b

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        small = (f for f in (*self.side_files, *self.last))
        return sum(f.nbytes for f in self.files) + sum(
            len(f.content) if isinstance(f.content, bytes) else f.content.stat().st_size for f in small
        )


class _Run(NamedTuple):
    """A contiguous run of a source file: one blob."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str


class Resolver:
    """Answers where the elements of a destination's payload lie in the source's files."""

    def __init__(self, source: Stored, target: Target, like: "Resolver | None" = None) -> None:
        """`like`: another one of the same source, whose half of the work is taken over."""
        self._to_hf, self._copies = target.to_hf, target.copies
        self._fills, self._plus = target.fills, _payload_shifts(source, target)
        self._runs: dict[str, _Run] = {}
        self._hf_to_run: Mapping
        self._whole: dict[str, str]
        """HF tensors that are one run of a file: nothing to look up there."""
        if like is not None:
            self._runs, self._hf_to_run, self._whole = like._runs, like._hf_to_run, like._whole
            return
        stored: list[Piece] = []
        for name, tensor in source.tensors.items():
            for i, blob in enumerate(tensor.blobs):
                run = f"{name}#{i}"
                self._runs[run] = _Run(blob.path, blob.offset, blob.region.sizes, tensor.dtype)
                stored.append(block(run, name, blob.region).inverse())
        shapes = {name: t.shape for name, t in source.tensors.items()}
        runs = {name: run.shape for name, run in self._runs.items()}
        held = Mapping(shapes, runs, tuple(stored))
        self._hf_to_run = held if source.to_hf is None else source.to_hf.inverse().compose(held)
        self._whole = {
            name: f"{name}#0"
            for name, t in source.tensors.items()
            if source.to_hf is None and len(t.blobs) == 1
        }

    def pieces(self, name: str, region: Region) -> list[Piece]:
        """The pieces payload ~ source run. Raises AccountingError unless they make up the whole payload."""
        if self._to_hf is None:
            parts = [block("", self._copies.get(name, name), region)]
        else:
            parts = list(self._to_hf.restrict(name, region, into=""))
        found: list[Piece] = []
        for part in parts:
            if part.b in self._whole:
                found.append(part.renamed(part.a, self._whole[part.b]))
                continue
            for held in self._hf_to_run.touching(part.b, part.inverse().extent()):
                found += meet(part, held)
        fill = self._fills.get(name)
        zeros = fill.intersect(region) if fill else None
        have, want = sum(p.numel for p in found), region.numel - (zeros.numel if zeros else 0)
        if have != want:
            raise AccountingError(
                f"`{name}`: the source does not give every element once",
                expected=f"{want} elements of {region}",
                found=have,
            )
        return found

    def units(self, payload: Payload, offset: int) -> Iterator[Unit]:
        """The payload, lying at byte `offset` of its file, as units that fit one buffer."""
        pieces = self.pieces(payload.name, payload.region)
        shape = payload.region.sizes
        if not pieces:
            yield Unit(offset, payload.region.numel, payload.dtype, payload.dtype, ())
            return
        dtype, plus = self._runs[pieces[0].b].dtype, self._plus.get(payload.name, 0)
        gathers = [self._gather(p, shape) for p in pieces]
        size = DTYPE_NBYTES[dtype]
        direct = dtype == payload.dtype and not plus and all(g.move.run * size >= DIRECT for g in gathers)
        if direct or payload.region.numel * size <= SLAB:
            yield Unit(offset, payload.region.numel, dtype, payload.dtype, tuple(gathers), plus)
            return
        at, width = offset, DTYPE_NBYTES[payload.dtype]
        for slab in slabs(payload.region, SLAB // size):
            part = self.pieces(payload.name, slab)
            gathers = [self._gather(p, slab.sizes) for p in part]
            yield Unit(at, slab.numel, dtype, payload.dtype, tuple(gathers), plus)
            at += slab.numel * width

    def _gather(self, piece: Piece, shape: tuple[int, ...]) -> Gather:
        run = self._runs[piece.b]
        return Gather(run.path, run.offset, move(piece, shape, run.shape))

    def gathers(self, name: str, region: Region) -> list[Gather]:
        """Where the elements of a region lie in the source, however large it is."""
        return [self._gather(p, region.sizes) for p in self.pieces(name, region)]

    def dtype_of(self, piece: Piece) -> str:
        """dtype of the source run of a piece."""
        return self._runs[piece.b].dtype


def hf_shifts(source: Stored, target: Target) -> dict[str, int]:
    """What is added to HF tensors on the way, by name: only where one side centres a norm on zero."""
    sign = (target.format != "hf") - (source.format != "hf")
    if not sign:
        return {}
    params, pieces = source.table.params, source.table.mapping.pieces
    return {p.b: sign * params[p.a].shift for p in pieces if params[p.a].shift}


def _payload_shifts(source: Stored, target: Target) -> dict[str, int]:
    """The same by name of payload. Raises AccountingError where tensors that differ in it meet in one."""
    by_hf = hf_shifts(source, target)
    if not by_hf or target.to_hf is None:
        return by_hf | {name: by_hf[of] for name, of in target.copies.items() if of in by_hf}
    out: dict[str, int] = {}
    for piece in target.to_hf.pieces:
        plus = by_hf.get(piece.b, 0)
        if out.setdefault(piece.a, plus) != plus:
            raise AccountingError(f"`{piece.a}` joins norms that are centred and others, such as `{piece.b}`")
    return {name: plus for name, plus in out.items() if plus}


class Totals(NamedTuple):
    """What a plan comes to."""

    files: int
    tensors: int
    payload_nbytes: int
    nbytes: int


def verify(source: Stored, target: Target) -> Totals:
    """Check, by regions alone, that the target is whole; raises AccountingError.

    Payloads tile their tensors; their tensors are made of HF tensors (a table that was checked to be
    a bijection says so); and every HF tensor is in the source. Elements are counted once more when
    each payload is resolved.
    """
    payloads: dict[str, list[Region]] = {}
    nbytes = 0
    for file in target.files:
        for part in file.parts:
            if isinstance(part, Payload):
                payloads.setdefault(part.name, []).append(part.region)
                nbytes += part.nbytes
    shapes = target.shapes(source)
    for name, regions in payloads.items():
        boxes = ((i, tuple(zip(r.offsets, r.ends, strict=True))) for i, r in enumerate(regions))
        fault = first_fault(shapes[name], boxes)
        if fault:
            raise AccountingError(
                f"`{name}`: element {list(fault.index)} would be written {len(fault.holders)} times",
                expected="once",
            )
    unmade = [n for n in shapes if n not in payloads]
    unmade += [n for n in target.needs() if n not in source.hf]
    if unmade:
        raise AccountingError(f"`{unmade[0]}` would not be written", found=f"{len(unmade)} such tensors")
    return Totals(len(target.files), len(payloads), nbytes, target.nbytes)
