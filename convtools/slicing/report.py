"""What a slice is, or would be: pure data; the command line renders it."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from convtools.slicing.origin import Origin
from convtools.slicing.plan_slice import SlicePlan


class LayerLine(NamedTuple):
    """One layer of the slice."""

    layer: int
    source: int
    """Which layer of the source it is."""
    kind: str
    why: str
    """The kind that it was chosen for, or `asked for`."""
    others: int
    """How many more layers of this kind the source has."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class SliceReport:
    """What was (or, after a dry run, would be) cut."""

    source: str
    source_format: str
    revision: str | None
    target: str
    layers: tuple[LayerLine, ...]
    source_layers: int
    mtp_tensors: int
    """Tensors of the MTP head that are kept."""
    tensors: int
    files: int
    nbytes: int
    """Bytes of everything written, but for the manifest."""
    payload_nbytes: int
    """Of which tensor data."""
    other_nbytes: int
    """Tensor data outside the layers: embedding, head, norms, MTP."""
    dropped: dict[str, int]
    """Why tensors of the source are not in the slice -> how many."""
    config_changes: tuple[str, ...]
    notes: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    """(file or tensor, reason) of what the source holds and no slice takes."""
    checked: str
    """How it was checked that config and tensors describe one model."""
    fetched_nbytes: int | None
    """Bytes read from the Hub; None for a local source."""
    dry_run: bool
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return asdict(self) | {"layers": [line._asdict() for line in self.layers]}


def slice_report(
    origin: Origin, plan: SlicePlan, target: str, *, checked: str, notes: tuple[str, ...],
    fetched_nbytes: int | None, dry_run: bool, seconds: float,
) -> SliceReport:  # fmt: skip
    """Put it together."""
    why = {layer: run.why for run in plan.chosen for layer in run.layers}
    count = Counter(map(str, plan.kinds))
    lines = tuple(
        LayerLine(
            new, old, str(plan.kinds[old]), why[old], count[str(plan.kinds[old])] - 1, plan.layer_nbytes[old]
        )
        for new, old in enumerate(plan.keep)
    )
    payload = sum(part.nbytes for f in plan.target.files for part in f.parts if not isinstance(part, bytes))
    mtp = {*plan.layers.mtp, *(name for names in plan.layers.tail for name in names)}
    return SliceReport(
        source=origin.name,
        source_format="hub" if origin.hub else origin.format,
        revision=origin.revision,
        target=target,
        layers=lines,
        source_layers=plan.layers.count,
        mtp_tensors=sum(kept.source in mtp for kept in plan.kept.values()),
        tensors=len(plan.kept),
        files=len(plan.target.files),
        nbytes=plan.target.nbytes,
        payload_nbytes=payload,
        other_nbytes=payload - sum(line.nbytes for line in lines),
        dropped=plan.dropped,
        config_changes=tuple(plan.changes.made),
        notes=(*origin.notes, *plan.changes.notes, *notes),
        left_out=tuple((item.name, item.reason) for item in origin.left_out),
        checked=checked,
        fetched_nbytes=fetched_nbytes,
        dry_run=dry_run,
        seconds=seconds,
    )
