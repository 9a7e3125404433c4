"""Tensors that both sides hold in a file that their index does not assign them to: compared as they lie.

They are part of no model that follows the index, and some loaders read them all the same.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from convtools.equality.canonical import Side
from convtools.equality.pairing import result
from convtools.equality.screening import Lanes, same_runs, told
from convtools.equality.verdict import DIFFERS, IDENTICAL, UNREADABLE, TensorResult
from convtools.errors import ConvtoolsError
from convtools.layout.region import Region
from convtools.stores.safetensors_header import Header, HeaderEntry, read_header


def strays_compared(lanes: Lanes, names: Iterable[str]) -> Iterator[TensorResult]:
    """A result for every such name (`tensor in file`)."""
    read: dict[Path, Header] = {}
    for name in names:
        try:
            yield _compared(lanes, name, read)
        except (ConvtoolsError, OSError) as error:
            yield result(name, UNREADABLE, lanes.a, lanes.b, cause=told(error))


def _compared(lanes: Lanes, name: str, read: dict[Path, Header]) -> TensorResult:
    a, b = _place(lanes.a.side, name, read), _place(lanes.b.side, name, read)
    why = "both sides hold it in a file that the index does not assign it to"
    if a is None or b is None:
        return result(name, UNREADABLE, lanes.a, lanes.b, cause=f"{why}: not looked at on the Hub")
    (path_a, one), (path_b, other) = a, b
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        cause = f"{one.dtype} {list(one.shape)} in A, {other.dtype} {list(other.shape)} in B"
        return result(name, DIFFERS, lanes.a, lanes.b, cause=cause)
    reader = lanes.readers()[0]
    if same_runs(lanes, reader, (path_a, one.start), (path_b, other.start), one.end - one.start):
        numel = Region.whole(one.shape).numel
        return result(name, IDENTICAL, lanes.a, lanes.b, elements=numel, cause=why)
    return result(name, DIFFERS, lanes.a, lanes.b, cause=f"{why}, and it is not the same")


def _place(side: Side, name: str, read: dict[Path, Header]) -> tuple[Path, HeaderEntry] | None:
    """(file, where it lies there); None where that is not known. Raises CheckpointError."""
    tensor, _, file = name.rpartition(" in ")
    if side.root is None or side.hub is not None:
        return None
    path = side.root / file
    if path not in read:
        read[path] = read_header(path)
    entry = read[path].tensors.get(tensor)
    return None if entry is None else (path, entry)
