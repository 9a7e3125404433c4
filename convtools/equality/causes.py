"""What a difference looks like, in one sentence, where a cheap test can tell.

Only tensors that differ are looked into, each within fixed bounds of memory and of reads. A tensor too
large to hold is judged by the part around its first difference. A cause is a hint; the verdict rests on
the bytes alone.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from convtools.codecs.cast import FLOATS, cast
from convtools.equality.canonical import Canonical
from convtools.equality.difference import Meter, bits_differ
from convtools.equality.numbers import bits, parts, special, values
from convtools.equality.pairing import Pair, place_of
from convtools.equality.reading import Reader
from convtools.equality.reordering import reordered
from convtools.equality.screening import Lanes, same_bytes
from convtools.equality.verdict import TensorResult
from convtools.layout.plan import slabs
from convtools.layout.region import Region
from convtools.stores.base import DTYPE_NBYTES

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

WHOLE = 16 << 20
"""Bytes of a tensor that are held whole."""
_PROBE = 2048
_SIBLINGS, _PROBES, _FULL = 1024, 40_000, 4
_GATED = (("gate_proj", "up_proj"), ("w1", "w3"))
_DIGITS = {"BF16": 8, "F16": 11, "F32": 24, "F64": 53}


class Asker:
    """Looks into differences; safe to share among threads."""

    def __init__(self, lanes: Lanes, most: int) -> None:
        self._lanes, self._left, self._probes = lanes, most, _PROBES
        self._lock = threading.Lock()

    def ask(self, pair: Pair, meter: Meter) -> str | None:
        """What the difference of a pair looks like. Raises CheckpointError where it cannot be read."""
        said = bits_differ(meter)
        if said or not self._may():
            return said
        if said := self._padding(pair, meter):
            return said
        a, b = self._load(pair, meter)
        dtype = pair.dtype
        if said := of_values(a, b, dtype):
            return said
        one_dtype = dtype == self._lanes.a.dtypes[pair.a] == self._lanes.b.dtypes[pair.b]
        if one_dtype and (said := self._elsewhere(pair, meter)):
            return said
        if parts(dtype) == 1 and (said := reordered(a, b, pair.name)):
            return said
        return of_specials(a, b, dtype)

    def _may(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0

    def _padding(self, pair: Pair, meter: Meter) -> str | None:
        """Whether all that differs are rows past the vocabulary."""
        specs = [side.side.model for side in (self._lanes.a, self._lanes.b)]
        vocabs = {model.spec.vocab for model in specs if model is not None}
        if len(vocabs) != 1 or len(pair.shape) != 2 or meter.first is None:
            return None
        vocab = vocabs.pop()
        if pair.shape[0] > vocab and meter.first >= vocab * pair.shape[1] and _of_vocabulary(pair.name):
            return f"only rows past the vocabulary of {vocab} differ"
        return None

    def _load(self, pair: Pair, meter: Meter) -> tuple["Array", "Array"]:
        """Raw bits of both, whole or around the first difference."""
        import numpy as np

        width, whole = DTYPE_NBYTES[pair.dtype], Region.whole(pair.shape)
        region = whole
        if whole.numel * width > WHOLE:
            at = 0
            for region in slabs(whole, WHOLE // width // 2):
                at += region.numel
                if at > (meter.first or 0):
                    break
        left, right = bytearray(), bytearray()
        for _, a, b in self._lanes.slabs(pair, region):
            left += a
            right += b
        shape = (*region.sizes, *(() if parts(pair.dtype) == 1 else (2,)))
        return (
            np.asarray(bits(left, pair.dtype)).reshape(shape),
            np.asarray(bits(right, pair.dtype)).reshape(shape),
        )

    @cached_property
    def _alike(self) -> dict[tuple[object, str], list[str]]:
        found: dict[tuple[object, str], list[str]] = defaultdict(list)
        for name, shape in self._lanes.a.shapes.items():
            found[tuple(shape), self._lanes.a.dtypes[name]].append(name)
        return found

    def _elsewhere(self, pair: Pair, meter: Meter) -> str | None:
        """Whether B holds another tensor of A here."""
        a, b, (one, two) = self._lanes.a, self._lanes.b, self._lanes.readers()
        probe = _around(meter.first or 0, pair.shape)
        wanted = bytes(b.whole(pair.b, probe, two))
        full = 0
        for name in self._siblings(pair):
            if a.whole(name, probe, one) != wanted or full == _FULL:
                continue
            full += 1
            if _same(a, name, b, pair, one, two):
                return _named(pair.name, name)
        return None

    def _siblings(self, pair: Pair) -> Iterator[str]:
        """A's tensors of the same shape and dtype, the likeliest first, as many as may be looked at."""
        layer, component = place_of(pair.name)
        twins = {pair.name.replace(*names) for g, u in _GATED for names in ((g, u), (u, g))}

        def likely(name: str) -> tuple[bool, bool, int]:
            at, within = place_of(name)
            near = abs(at - layer) if at is not None and layer is not None else 1 << 30
            return name not in twins, within != component, near

        names = [n for n in self._alike[tuple(pair.shape), pair.dtype] if n != pair.a]
        for name in sorted(names, key=likely)[:_SIBLINGS]:
            with self._lock:
                self._probes -= 1
                if self._probes < 0:
                    return
            yield name

    def shapes(self, found: TensorResult) -> str | None:
        """What two shapes look like. Raises CheckpointError where they cannot be read."""
        a, b, (one, two) = self._lanes.a, self._lanes.b, self._lanes.readers()
        if found.name not in a.shapes or found.name not in b.shapes or found.dtype_a != found.dtype_b:
            return None
        left, right = found.shape_a, found.shape_b
        assert left is not None and right is not None and found.dtype_a is not None
        if len(left) == len(right) == 2 and left[1] == right[1] and left[0] and right[0]:
            rows = min(left[0], right[0])
            part = Region((0, 0), (rows, left[1]))
            same = _same_region(a, b, found.name, part, one, two)
            longer = "A" if left[0] > right[0] else "B"
            more = f"{longer} has {abs(left[0] - right[0])} rows more"
            return f"{more}, such as padding of the vocabulary; the first {rows} are {'the same' if same else 'not the same'}"
        if max(a.nbytes(found.name), b.nbytes(found.name)) > WHOLE or not self._may():
            return None
        import numpy as np

        x, y = (
            np.asarray(bits(side.whole(found.name, Region.whole(shape), reader), found.dtype_a))
            for side, shape, reader in ((a, left, one), (b, right, two))
        )
        if x.size == y.size and np.array_equal(x, y):
            return "the same elements in the same order, in another shape"
        if len(left) > 1 and right == (*left[:-2], left[-1], left[-2]) and parts(found.dtype_a) == 1:
            if np.array_equal(np.swapaxes(x.reshape(left), -1, -2), y.reshape(right)):
                return "B is A transposed"
        return None


def _of_vocabulary(name: str) -> bool:
    return "embed" in name or "lm_head" in name


def _around(first: int, shape: tuple[int, ...]) -> Region:
    """A short run of a row that holds flat position `first`."""
    index = []
    for size in reversed(shape):
        first, rest = divmod(first, size)
        index.append(rest)
    index.reverse()
    if not shape:
        return Region.whole(shape)
    start = min(index[-1], max(shape[-1] - _PROBE, 0)) if shape[-1] > _PROBE else 0
    return Region((*index[:-1], start), (*(1 for _ in index[:-1]), min(shape[-1], _PROBE)))


def _same(a: Canonical, name: str, b: Canonical, pair: Pair, one: Reader, two: Reader) -> bool:
    for slab in slabs(Region.whole(pair.shape), (4 << 20) // DTYPE_NBYTES[pair.dtype]):
        parts_of = zip(a.read(name, slab, one), b.read(pair.b, slab, two), strict=True)
        if not all(same_bytes(x, y) for x, y in parts_of):
            return False
    return True


def _same_region(a: Canonical, b: Canonical, name: str, region: Region, one: Reader, two: Reader) -> bool:
    for slab in slabs(region, (4 << 20) // DTYPE_NBYTES[a.dtypes[name]]):
        if not all(
            same_bytes(x, y) for x, y in zip(a.read(name, slab, one), b.read(name, slab, two), strict=True)
        ):
            return False
    return True


def _named(name: str, other: str) -> str:
    """What it means that B's `name` is A's `other`."""
    (layer, component), (at, within) = place_of(name), place_of(other)
    if component == within and layer == at:
        return f"experts are permuted: B's `{name}` is A's `{other}`"
    if component == within:
        return f"a stale or misplaced layer: B's layer {layer} holds A's layer {at} here"
    if layer == at and any(name.replace(*pair) == other for g, u in _GATED for pair in ((g, u), (u, g))):
        return f"gate and up are swapped: B's `{name}` is A's `{other}`"
    return f"B's `{name}` is A's `{other}`"


def of_values(a: "Array", b: "Array", dtype: str) -> str | None:
    """A sentence where one side is the other after simple arithmetic: zeros, a cast, one added, a factor."""
    import numpy as np

    for side, raw in (("A", a), ("B", b)):
        if not raw.any():
            return f"{side} is all zeros: it was never filled"
    if dtype not in _DIGITS:
        return None
    data = a.tobytes(), b.tobytes()
    for word, narrow in FLOATS.items():
        if narrow != dtype and _DIGITS[narrow] < 24 and _DIGITS[dtype] > 3:
            for left, right, names in ((0, 1, "B is A"), (1, 0, "A is B")):
                if cast(cast(data[left], dtype, narrow), narrow, dtype) == data[right]:
                    return f"{names} after a cast through {word}"
    for left, right, names in ((0, 1, "B is A"), (1, 0, "A is B")):
        if cast(data[left], dtype, dtype, 1) == data[right]:
            return f"{names} plus 1: a norm that only one side centres on zero"
    x, y = values(a, dtype).reshape(-1), values(b, dtype).reshape(-1)
    at = int(np.argmax(np.abs(np.nan_to_num(x, posinf=0, neginf=0))))
    if len(x) < 2 or not np.isfinite(x[at]) or x[at] == 0 or not np.isfinite(y[at]):
        return None
    factor = float(y[at] / x[at])
    if factor == 0 or abs(factor - 1) < 1e-2:
        return None
    with np.errstate(all="ignore"):
        near = np.abs(y - factor * x) <= 2.0 ** (2 - _DIGITS[dtype]) * np.abs(y)
    if near.all():
        return "B is A with its sign changed" if factor == -1 else f"B is A times {factor:.6g}"
    return None


def of_specials(a: "Array", b: "Array", dtype: str) -> str | None:
    """A sentence where NaN or infinities stand on one side only."""
    nan_a, inf_a = special(a, dtype)
    nan_b, inf_b = special(b, dtype)
    for what, x, y in (("NaN", nan_a, nan_b), ("infinite", inf_a, inf_b)):
        for names, left, right in (("B", x, y), ("A", y, x)):
            if count := int((right & ~left).sum()):
                return f"{count} elements of {names} are {what} where the other side has numbers"
    return None
