"""What a conversion did: pure data; the command line renders it."""

from collections import defaultdict
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from convtools.conversion.exactness import Shift
from convtools.conversion.options import Options
from convtools.conversion.plan import Target, Totals
from convtools.conversion.run import PaddingFound
from convtools.conversion.source import LeftOut, Source
from convtools.conversion.target_layout import target_layout
from convtools.layout.numbers import numberless
from convtools.stores.base import DTYPE_NBYTES
from convtools.stores.move import SLAB


@dataclass(frozen=True, slots=True)
class Cast:
    """One cast that was asked for."""

    src: str
    dst: str
    tensors: int
    exact: bool


@dataclass(frozen=True, slots=True)
class BlockLine:
    """One kind of tensor, over all layers."""

    block: str
    """Its name with numbers left out."""
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """What was (or, after a dry run, would be) converted."""

    source: str
    source_format: str
    target: str
    target_format: str
    family: str
    pattern: str
    iteration: int | str | None
    """The one written, for a Megatron target; else the one read."""
    layout: dict[str, int] | None
    padded_vocab: int | None
    hf_tensors: int
    """Canonical tensors, each accounted for exactly once."""
    parameters: int
    files: int
    nbytes: int
    """Bytes of everything written."""
    payload_nbytes: int
    """Of which tensor data."""
    peak_nbytes: int
    """Memory for buffers: workers times one slab on each side, whatever the checkpoint's size."""
    casts: tuple[Cast, ...]
    shifts: tuple[Shift, ...]
    """Norms that only one side centres on zero, and what of them was rounded."""
    left_out: tuple[LeftOut, ...]
    duplicates: int
    """Repeated copies in the source, each compared byte for byte."""
    padding: tuple[PaddingFound, ...]
    notes: tuple[str, ...]
    blocks: tuple[BlockLine, ...]
    dry_run: bool
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return asdict(self) | {
            "left_out": [x._asdict() for x in self.left_out],
            "padding": [x._asdict() for x in self.padding],
        }


def report(
    source: Source,
    target: Target,
    options: Options,
    dst: Path,
    totals: Totals,
    casts: tuple[Cast, ...],
    shifts: tuple[Shift, ...],
    padding: tuple[PaddingFound, ...],
    notes: tuple[str, ...],
    seconds: float,
) -> Report:
    """Put a report together."""
    tensors: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, shape in source.hf.items():
        numel = prod(shape)
        tensors[numberless(name)].append((numel, numel * DTYPE_NBYTES[target.dtypes[name]]))
    blocks = tuple(
        BlockLine(name, len(found), sum(n for n, _ in found), sum(b for _, b in found))
        for name, found in tensors.items()
    )
    chosen = None if options.to == "hf" else target_layout(source, options)
    layout = None
    if chosen is not None:
        layout = {"tp": chosen.tp, "pp": chosen.pp, "ep": chosen.ep, "etp": chosen.etp}
        layout |= {"vpp": chosen.vpp} if chosen.vpp > 1 else {}
    return Report(
        source=str(source.root),
        source_format=source.format,
        target=str(dst),
        target_format=target.format,
        family=source.model.family.NAME,
        pattern=source.model.spec.text,
        iteration=source.iteration if target.iteration is None else target.iteration,
        layout=layout,
        padded_vocab=target.padded_vocab,
        hf_tensors=len(source.hf),
        parameters=sum(line.parameters for line in blocks),
        files=len(target.files) + len(target.side_files) + len(target.last),
        nbytes=target.nbytes,
        payload_nbytes=totals.payload_nbytes,
        peak_nbytes=2 * SLAB * options.workers,
        casts=casts,
        shifts=shifts,
        left_out=source.left_out,
        duplicates=len(source.duplicates),
        padding=padding,
        notes=(*source.notes, *notes),
        blocks=blocks,
        dry_run=options.dry_run,
        seconds=seconds,
    )
