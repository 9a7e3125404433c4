"""What a reader must know beside the verdict, and what takes the verdict's ground away."""

from collections.abc import Iterator, Mapping

from convtools.conversion.source import Padding
from convtools.equality.canonical import Canonical, Side
from convtools.equality.options import CompareOptions
from convtools.equality.pairing import Pair
from convtools.equality.reading import Reader, stamp
from convtools.equality.screening import Lanes
from convtools.equality.verdict import SKIPPED, TensorResult
from convtools.errors import ConvtoolsError, capped
from convtools.layout.piece import block
from convtools.layout.plan import move, slabs
from convtools.layout.region import Region
from convtools.stores.base import DTYPE_NBYTES
from convtools.stores.hf_index import SINGLE
from convtools.stores.move import Gather, Unit

_SLAB = 4 << 20


def notes_of(
    lanes: Lanes, pairs: Mapping[str, Pair], results: Mapping[str, TensorResult], options: CompareOptions
) -> tuple[str, ...]:
    """Everything that is not a tensor's own result."""
    a, b = lanes.a, lanes.b
    notes = [*a.side.notes, *b.side.notes]
    for side, letter in ((a, "A"), (b, "B")):
        if side.relation is not None:
            notes.append(f"{letter} spells its tensors differently; compared under the other side's names")
    if options.ignore_dtype:
        count = sum(a.dtypes[p.a] != b.dtypes[p.b] for p in pairs.values())
        some = f"{count} tensor{'s' * (count != 1)} of two dtypes"
        notes.append(f"DTYPES IGNORED: {some} compared as values of the wider one, and ULP in its steps")
    if options.tolerant:
        notes.append("NaN is equal to NaN only in the same place, infinity only to the same; 0.0 equals -0.0")
    for pair in pairs.values():
        if pair.tied:
            of, letter = (pair.b, "B") if pair.b != pair.name else (pair.a, "A")
            notes.append(f"`{pair.name}` is not stored in {letter}: compared with `{of}`, which it repeats")
    skipped = [name for name, r in results.items() if r.verdict == SKIPPED]
    if skipped:
        notes.append(f"not compared: {capped(skipped, 5)}")
    for side, letter, reader in ((a, "A", 0), (b, "B", 1)):
        for rows in side.side.padding:
            notes += _padding(side, letter, rows, lanes.readers()[reader])
    return tuple(notes)


def _padding(side: Canonical, letter: str, rows: Padding, reader: Reader) -> Iterator[str]:
    try:
        count = nonzero_rows(side.side, rows, reader)
    except (ConvtoolsError, OSError):
        yield f"{letter}: rows of `{rows.name}` past the vocabulary could not be read"
        return
    if count:
        of = rows.region.sizes[0]
        yield f"{letter}: {count} of {of} rows of `{rows.name}` past the vocabulary are not zero; left out"


def nonzero_rows(side: Side, rows: Padding, reader: Reader) -> int:
    """How many rows past the vocabulary hold something. Raises CheckpointError."""
    import numpy as np

    tensor, found = side.source.tensors[rows.name], 0
    width = DTYPE_NBYTES[tensor.dtype]
    for blob in tensor.blobs:
        part = blob.region.intersect(rows.region)
        for slab in slabs(part, _SLAB // width) if part else ():
            at = Region(
                tuple(o - b for o, b in zip(slab.offsets, blob.region.offsets, strict=True)), slab.sizes
            )
            gather = Gather(blob.path, blob.offset, move(block("", "", at), at.sizes, blob.region.sizes))
            data = reader.gather(Unit(0, slab.numel, tensor.dtype, tensor.dtype, (gather,)))
            found += int(np.frombuffer(data, "u1").reshape(slab.sizes[0], -1).any(axis=1).sum())
    return found


def one_memory(lanes: Lanes, pairs: Mapping[str, Pair]) -> Iterator[str]:
    """Live tensors that are one memory on both sides: a snapshot that is none; comparing it says nothing."""
    spans = lanes.a.side.spans, lanes.b.side.spans
    if not spans[0] or not spans[1]:
        return
    theirs = {(device, at) for device, at, nbytes in spans[1].values() if nbytes}
    shared = [name for name, (device, at, nbytes) in spans[0].items() if nbytes and (device, at) in theirs]
    if shared:
        some = "1 tensor of A and B is" if len(shared) == 1 else f"{len(shared)} tensors of A and B are"
        yield f"{some} one memory, such as `{shared[0]}`: compare with a copy"


def read_first(a: Side, b: Side) -> Iterator[str]:
    """Weights beside an index that does not name them, and that transformers reads in their place."""
    for side, letter in ((a, "A"), (b, "B")):
        for left in side.left_out:
            if left.name == SINGLE and left.reason.startswith("the index does not name it"):
                yield f"{letter} has a `{SINGLE}` beside its index, that transformers reads first: remove one"


def changed_files(a: Side, b: Side) -> Iterator[str]:
    """Files that are not what they were when they were opened."""
    for side in (a, b):
        for path, before in side.files.items():
            now = stamp(path)
            if now != before:
                yield f"`{path}` {'is gone' if now is None else 'changed while it was compared'}"
