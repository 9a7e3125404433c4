"""Tensors that a checkpoint stores more than once: where its copies differ, the side is not one model."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

from convtools.conversion.source import Duplicate
from convtools.equality.canonical import Canonical
from convtools.equality.pairing import result
from convtools.equality.reading import Reader
from convtools.equality.screening import Lanes, same_bytes, same_runs, told
from convtools.equality.verdict import DIFFERS, UNREADABLE, TensorResult
from convtools.errors import ConvtoolsError
from convtools.layout.plan import slabs
from convtools.layout.region import Region
from convtools.stores.base import DTYPE_NBYTES

_AT_ONCE = 64
_MOST = 16
"""Copies that are looked into; the verdict needs one."""


def disagreements(lanes: Lanes, results: Mapping[str, TensorResult]) -> Iterator[TensorResult | str]:
    """A result for every canonical tensor of which a side's copies differ or cannot be read; or a note."""
    for side, letter in ((lanes.a, "A"), (lanes.b, "B")):
        index = 0 if side is lanes.a else 1
        pairs = iter(side.side.duplicates)
        batches = iter(lambda pairs=pairs: list(islice(pairs, _AT_ONCE)), [])  # type: ignore[misc]

        def look(
            batch: list[Duplicate], side: Canonical = side, index: int = index
        ) -> list[tuple[Duplicate, str | None]]:
            return [_compared(lanes, side, pair, lanes.readers()[index]) for pair in batch]

        found = lanes.each(look, batches)
        unequal = [one for batch in found for one in batch if one[1] is not None]
        for pair, fault in unequal[:_MOST]:
            names = list(_touched(side, pair, fault, lanes.readers()[index]))
            if not names:
                yield f"{letter}: `{pair.kept}` and `{pair.repeated}` differ only past the vocabulary"
            for name in names:
                if name not in results or not results[name].faulty:
                    yield _result(lanes, name, letter, pair, fault)


def _result(lanes: Lanes, name: str, letter: str, pair: Duplicate, fault: str | None) -> TensorResult:
    copies = f"{letter}'s copies of it: `{pair.kept}` and `{pair.repeated}`"
    if fault:
        return result(name, UNREADABLE, lanes.a, lanes.b, cause=f"{copies}: {fault}")
    return result(name, DIFFERS, lanes.a, lanes.b, cause=f"{copies} are not the same")


def _compared(lanes: Lanes, side: Canonical, pair: Duplicate, reader: Reader) -> tuple[Duplicate, str | None]:
    """(the copies, None where they are the same; "" where they are not; else why they cannot be read)."""
    a, b = side.side.source.tensors[pair.kept], side.side.source.tensors[pair.repeated]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return pair, ""
    try:
        left, right = a.blobs[0], b.blobs[0]
        same = same_runs(lanes, reader, (left.path, left.offset), (right.path, right.offset), a.nbytes)
    except (ConvtoolsError, OSError) as error:
        return pair, told(error)
    return pair, None if same else ""


def _touched(side: Canonical, pair: Duplicate, fault: str | None, reader: Reader) -> Iterator[str]:
    """The canonical tensors that come out different when the other copy is read."""
    source = side.side.source
    stored = dict.fromkeys(p.b for p in source.to_hf.of(pair.kept))
    names = [n for n in side.shapes if n in stored]
    if side.relation is not None:
        names = list(dict.fromkeys(p.a for p in side.relation.pieces if p.b in stored))
    kept, repeated = source.tensors[pair.kept], source.tensors[pair.repeated]
    if fault or (kept.dtype, kept.shape) != (repeated.dtype, repeated.shape):
        yield from names
        return
    other = replace(source, tensors={**source.tensors, pair.kept: replace(repeated, name=pair.kept)})
    swapped = Canonical(replace(side.side, source=other), side.shapes, side.dtypes, side.relation)
    second = swapped.side.reader()
    try:
        for name in names:
            if not _same(side, swapped, name, reader, second):
                yield name
    finally:
        second.close()


def _same(a: Canonical, b: Canonical, name: str, one: Reader, two: Reader) -> bool:
    for slab in slabs(Region.whole(a.shapes[name]), (4 << 20) // DTYPE_NBYTES[a.dtypes[name]]):
        parts = zip(a.read(name, slab, one), b.read(name, slab, two), strict=True) if slab.numel else ()
        if not all(same_bytes(x, y) for x, y in parts):
            return False
    return True
