"""What a difference looks like, in one sentence, where a cheap test can tell.

Only tensors that differ are looked into, each within fixed bounds of memory and of reads. A tensor too
large to hold is judged by the part around its first difference. A cause is a hint; the verdict rests on
the bytes alone.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
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
_VALUES = 1 << 20
"""Numbers around the first difference that arithmetic is tried on."""
_SIBLINGS, _PROBES, _FULL = 1024, 40_000, 4
_GATED = (("gate_proj", "up_proj"), ("w1", "w3"))
_DIGITS = {"BF16": 8, "F16": 11, "F32": 24, "F64": 53}

_Alike = dict[tuple[tuple[int, ...], str], list[str]]
"""(shape, dtype) -> the tensors that have them."""
_Held = tuple[Canonical, str, Reader]
"""A side, a tensor of it, and a reader of it."""


class Asker:
    """Looks into differences; safe to share among threads."""

    def __init__(self, lanes: Lanes, most: int) -> None:
        self._lanes, self._left, self._probes, self._off = lanes, most, _PROBES, most == 0
        self._lock, self._one = threading.Lock(), threading.Lock()

    def ask(self, pair: Pair, meter: Meter) -> str | None:
        """What the difference of a pair looks like. Raises CheckpointError where it cannot be read."""
        if self._off:
            return None
        said = bits_differ(meter)
        if said or not self._may():
            return said
        if said := self._padding(pair, meter):
            return said
        with self._one:  # what is held is bounded by one tensor, not by one a thread
            return self._look(pair, meter)

    def _look(self, pair: Pair, meter: Meter) -> str | None:
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
    def _alike(self) -> tuple[_Alike, _Alike]:
        return _alike(self._lanes.a), _alike(self._lanes.b)

    def _elsewhere(self, pair: Pair, meter: Meter) -> str | None:
        """Whether one side holds another tensor of the other side here."""
        one, two = self._lanes.readers()
        a, b = (self._lanes.a, pair.a, one), (self._lanes.b, pair.b, two)
        probe = _around(meter.first or 0, pair.shape)
        for (side, own, reader), (of, theirs, other), letters, alike in (
            (b, a, ("B", "A"), self._alike[0]), (a, b, ("A", "B"), self._alike[1])
        ):  # fmt: skip
            wanted, full = bytes(side.whole(own, probe, reader)), 0
            for name in self._siblings(pair, theirs, alike):
                if of.whole(name, probe, other) != wanted or full == _FULL:
                    continue
                full += 1
                if _same((side, own, reader), (of, name, other), Region.whole(pair.shape)):
                    return _named(pair.name, name, *letters)
        return None

    def _siblings(self, pair: Pair, but: str, alike: _Alike) -> Iterator[str]:
        """One side's tensors of the same shape and dtype, the likeliest first, only so many."""
        layer, component = place_of(pair.name)
        twins = {pair.name.replace(*names) for g, u in _GATED for names in ((g, u), (u, g))}

        def likely(name: str) -> tuple[bool, bool, int]:
            at, within = place_of(name)
            near = abs(at - layer) if at is not None and layer is not None else 1 << 30
            return name not in twins, within != component, near

        names = [n for n in alike[tuple(pair.shape), pair.dtype] if n != but]
        for name in sorted(names, key=likely)[:_SIBLINGS]:
            with self._lock:
                self._probes -= 1
                if self._probes < 0:
                    return
            yield name

    def shapes(self, found: TensorResult) -> str | None:
        """What two shapes look like. Raises CheckpointError where they cannot be read."""
        if self._off:
            return None
        a, b, (one, two) = self._lanes.a, self._lanes.b, self._lanes.readers()
        if found.name not in a.shapes or found.name not in b.shapes or found.dtype_a != found.dtype_b:
            return None
        left, right = found.shape_a, found.shape_b
        assert left is not None and right is not None and found.dtype_a is not None
        if len(left) == len(right) == 2 and left[1] == right[1] and left[0] and right[0]:
            rows = min(left[0], right[0])
            part = Region((0, 0), (rows, left[1]))
            same = _same((a, found.name, one), (b, found.name, two), part)
            longer = "A" if left[0] > right[0] else "B"
            count = abs(left[0] - right[0])
            more = f"{longer} has {count} row{'s' * (count != 1)} more"
            alike = "the same" if same else "not the same"
            return f"{more}, such as padding of the vocabulary; the first {rows} are {alike}"
        if max(a.nbytes(found.name), b.nbytes(found.name)) > WHOLE or not self._may():
            return None
        import numpy as np

        x, y = (
            np.asarray(bits(side.whole(found.name, Region.whole(shape), reader), found.dtype_a))
            for side, shape, reader in ((a, left, one), (b, right, two))
        )
        if x.size == y.size and np.array_equal(x, y):
            return "the same elements in the same order, in another shape"
        if len(left) < 2 or right != (*left[:-2], left[-1], left[-2]) or parts(found.dtype_a) > 1:
            return None
        turned = np.array_equal(np.swapaxes(x.reshape(left), -1, -2), y.reshape(right))
        return "B is A transposed" if turned else None


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


def _same(a: _Held, b: _Held, region: Region) -> bool:
    """Whether two tensors hold the same bytes in a region."""
    (side_a, name_a, one), (side_b, name_b, two) = a, b
    for slab in slabs(region, (4 << 20) // DTYPE_NBYTES[side_a.dtypes[name_a]]):
        both = zip(side_a.read(name_a, slab, one), side_b.read(name_b, slab, two), strict=True)
        if not all(same_bytes(x, y) for x, y in both):
            return False
    return True


def _named(name: str, other: str, holder: str, owner: str) -> str:
    """What it means that the holder's `name` is the owner's `other`."""
    (layer, component), (at, within) = place_of(name), place_of(other)
    if component == within and layer == at:
        return f"experts are permuted: {holder}'s `{name}` is {owner}'s `{other}`"
    if component == within:
        return f"a stale or misplaced layer: {holder}'s layer {layer} holds {owner}'s layer {at} here"
    if layer == at and any(name.replace(*pair) == other for g, u in _GATED for pair in ((g, u), (u, g))):
        return f"gate and up are swapped: {holder}'s `{name}` is {owner}'s `{other}`"
    return f"{holder}'s `{name}` is {owner}'s `{other}`"


def _alike(side: Canonical) -> _Alike:
    found: _Alike = defaultdict(list)
    for name, shape in side.shapes.items():
        found[tuple(shape), side.dtypes[name]].append(name)
    return found


def of_values(a: "Array", b: "Array", dtype: str) -> str | None:
    """A sentence where one side is the other after simple arithmetic: zeros, a cast, one added, a factor."""
    import numpy as np

    for side, raw in (("A", a), ("B", b)):
        if not raw.any():
            return f"{side} is all zeros: it was never filled"
    if dtype not in _DIGITS:
        return None
    at = max(0, int((a.reshape(-1) != b.reshape(-1)).argmax()) - _VALUES // 2)
    a, b = (raw.reshape(-1)[at : at + _VALUES] for raw in (a, b))
    data = a.tobytes(), b.tobytes()
    for word, narrow in FLOATS.items():
        if narrow != dtype and _DIGITS[narrow] < 24 and _DIGITS[dtype] > 3:
            for left, right, names in ((0, 1, "B is A"), (1, 0, "A is B")):
                if _is(_through(dtype, narrow), data[left], data[right]):
                    return f"{names} after a cast through {word}"
    for left, right, names in ((0, 1, "B is A"), (1, 0, "A is B")):
        if _is(lambda x: cast(x, dtype, dtype, 1), data[left], data[right]):
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


def _through(dtype: str, narrow: str) -> Callable[[bytes], object]:
    """A cast to a narrower dtype and back."""
    return lambda data: cast(cast(data, dtype, narrow), narrow, dtype)


def _is(made: Callable[[bytes], object], source: bytes, wanted: bytes) -> bool:
    """Whether `made` of one side is the other; a few numbers from the middle mostly say that it is not."""
    at = len(source) // 2 // 64 * 64
    return made(source[at : at + 1024]) == wanted[at : at + 1024] and made(source) == wanted


def of_specials(a: "Array", b: "Array", dtype: str) -> str | None:
    """A sentence where NaN or infinities stand on one side only."""
    nan_a, inf_a = special(a, dtype)
    nan_b, inf_b = special(b, dtype)
    for what, x, y in (("NaN", nan_a, nan_b), ("infinite", inf_a, inf_b)):
        for names, left, right in (("B", x, y), ("A", y, x)):
            if count := int((right & ~left).sum()):
                some = "1 element" if count == 1 else f"{count:,} elements"
                verb = "is" if count == 1 else "are"
                return f"{some} of {names} {verb} {what} where the other side has numbers"
    return None
