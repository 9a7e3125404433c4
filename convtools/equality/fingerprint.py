"""The additive fingerprint: 128 bits of a tensor that every shard can compute for its own bytes.

Each 8-byte word of the canonical bytes is multiplied by a constant of its position, mod 2^127 - 1, and
all are added: so parts that were hashed apart, anywhere and in any order, add up to the whole.
docs/fingerprint.md is the definition; a compiled kernel and numpy compute the same.
"""

from collections.abc import Iterable
from functools import cache
from hashlib import shake_128
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from convtools.errors import UsageError
from convtools.layout.piece import block
from convtools.layout.plan import Move, Stride, move
from convtools.layout.region import Region

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Buffer

    Array = np.ndarray[Any, Any]

ALGORITHM = "additive-127"
"""Its name in a manifest's `hashes`."""
TAG = b"convtools additive-127/1"
PRIME = (1 << 127) - 1
WORDS = 128
"""Words a block: the position constants repeat after so many, times a power of gamma."""
BLOCK = 8 * WORDS
"""Bytes a block."""
COMPILED, NUMPY = "compiled", "numpy"
MAX_OFFSET = 1 << 62

_HALVES = 4 * WORDS  # 16-bit halves of words a block
_LIMB, _LIMBS = 28, 5  # 512 products of 16 and 28 bits add up exactly in a double: 9 + 16 + 28 = 53
_ROW_LIMB, _POWER_LIMB = 18, 25  # and 1024 of 18 and 25 bits: 10 + 18 + 25 = 53
_ROW_LIMBS, _POWER_LIMBS = 3, 6
_BATCH = 256  # blocks at once: what they become in doubles stays in a core's cache
_SPREAD = 4 << 20  # bytes of a canonical tensor that numpy lays out at once for strided runs


class Constants(NamedTuple):
    """What the positions are multiplied by."""

    k: tuple[int, ...]
    """108 bits each, by position within a block."""
    gamma: int
    """Block `b` is multiplied by `gamma ** (b + 1)`."""


@cache
def constants() -> Constants:
    """The constants, from SHAKE-128 of the tag."""
    stream = shake_128(TAG).digest(16 * (WORDS + 1))
    numbers = [int.from_bytes(stream[at : at + 16], "little") for at in range(0, len(stream), 16)]
    return Constants(tuple(n % (1 << 108) for n in numbers[:WORDS]), numbers[WORDS] % (1 << 127))


class Accumulate(Protocol):
    """One way to compute the sum of a nest of runs."""

    def __call__(self, data: "Buffer", start: int, at: int, loops: tuple[Stride, ...], run: int) -> int:
        """`run` bytes from byte `start` of `data`, lying at byte `at` of the tensor, repeated over loops.

        A loop is `n` steps of `dst` bytes in the tensor and `src` bytes in `data`, outermost first. No
        two runs may overlap in the tensor. Raises ValueError where they reach past the end of `data`.
        """


def hexdigest(value: int) -> str:
    """32 hex digits, the most significant first.

    >>> hexdigest(1)
    '00000000000000000000000000000001'
    """
    return f"{value:032x}"


def combine(values: Iterable[int]) -> int:
    """The value of the whole, from values of disjoint parts, in any order.

    >>> combine([PRIME - 1, 3])
    2
    """
    return sum(values) % PRIME


class Fingerprint:
    """Collects a tensor's bytes, in any order; each byte is to be added once."""

    __slots__ = ("_accumulate", "_value")

    def __init__(self, path: str | None = None) -> None:
        self._accumulate = paths()[path or path_used()]
        self._value = 0

    def add(self, offset: int, data: "Buffer") -> None:
        """Bytes that lie at byte `offset` of the tensor's canonical bytes."""
        self.add_move(Move(offset, 0, (), memoryview(data).nbytes), 1, data)

    def add_region(self, shape: tuple[int, ...], itemsize: int, region: Region, data: "Buffer") -> None:
        """One rectangle of a tensor of `shape`, C-contiguous. Raises UsageError where it does not fit."""
        have, need = memoryview(data).nbytes, region.numel * itemsize
        if not region.within(shape) or have != need:
            raise UsageError(
                f"{have} bytes are not {region} of a tensor of shape {list(shape)}", expected=f"{need} bytes"
            )
        if need:
            self.add_move(move(block("", "", region).inverse(), shape, region.sizes), itemsize, data)

    def add_move(self, of: Move, itemsize: int, data: "Buffer", start: int = 0) -> None:
        """A strided part: `of.dst` counts elements of the tensor, `of.src` those of `data` from `start` on.

        Raises UsageError where that lies outside of `data`, or `data` is not contiguous.
        """
        loops = tuple(Stride(s.n, s.dst * itemsize, s.src * itemsize) for s in of.loops)
        at, begin, run = of.dst * itemsize, start + of.src * itemsize, of.run * itemsize
        reach = [at, begin, run, *(x for loop in loops for x in loop)]
        end = at + run + sum((s.n - 1) * s.dst for s in loops)
        if min(reach) < 0 or end > MAX_OFFSET or begin > MAX_OFFSET:
            raise UsageError("a part of a tensor cannot lie there", found=f"{of} of {itemsize} bytes")
        try:
            self._value += self._accumulate(data, begin, at, loops, run)
        except ValueError as error:
            raise UsageError(f"a part of a tensor is larger than its data: {error}") from None
        except BufferError as error:
            raise UsageError(f"the data of a tensor is no run of bytes: {error}") from None
        self._value %= PRIME

    def add_value(self, value: int) -> None:
        """A part that was hashed elsewhere."""
        self._value = (self._value + value) % PRIME

    @property
    def value(self) -> int:
        """The sum so far, below `PRIME`."""
        return self._value

    def hexdigest(self) -> str:
        """The same as 32 hex digits."""
        return hexdigest(self._value)


def fingerprint_bytes(data: "Buffer", offset: int = 0, *, path: str | None = None) -> int:
    """The value of bytes that lie at byte `offset` of a tensor."""
    made = Fingerprint(path)
    made.add(offset, data)
    return made.value


def path_used() -> str:
    """Which way is taken: `compiled`, or `numpy` where the kernel was not built."""
    return next(iter(paths()))


@cache
def paths() -> dict[str, Accumulate]:
    """Every way that works here, the quickest first."""
    found: dict[str, Accumulate] = {}
    try:
        from convtools.equality import fingerprint_kernel as kernel
    except ImportError:
        pass
    else:
        k, gamma = constants()
        kernel.configure(b"".join(n.to_bytes(16, "little") for n in (*k, gamma, pow(gamma, -1, PRIME))))

        def compiled(data: "Buffer", start: int, at: int, loops: tuple[Stride, ...], run: int) -> int:
            return int.from_bytes(kernel.accumulate(data, start, at, loops, run), "little")

        found[COMPILED] = compiled
    return found | {NUMPY: accumulate_numpy}


def limbs(value: int, bits: int, count: int) -> list[int]:
    """`value` in `count` limbs of `bits` bits, the least significant first.

    >>> limbs(0x123, 4, 4)
    [3, 2, 1, 0]
    """
    return [value >> (bits * i) & ((1 << bits) - 1) for i in range(count)]


@cache
def tables() -> tuple["Array", "Array"]:
    """(constants of a block's 16-bit halves `[512, 5]`, powers of gamma `[256, 6]`), limbs in doubles."""
    import numpy as np

    k, gamma = constants()
    halves = [limbs((n << 16 * h) % PRIME, _LIMB, _LIMBS) for n in k for h in range(4)]
    powers = [1]
    while len(powers) < _BATCH:
        powers.append(powers[-1] * gamma % PRIME)
    return np.array(halves, "f8"), np.array([limbs(p, _POWER_LIMB, _POWER_LIMBS) for p in powers], "f8")


def joined(crossed: Iterable[Iterable[float]], at: int) -> int:
    """Products of row limbs and power limbs of a batch that begins at block `at` -> its value."""
    total = 0
    for i, line in enumerate(crossed):
        limb, part = divmod(i, _ROW_LIMBS)
        for j, number in enumerate(line):
            total += int(number) << (_LIMB * limb + _ROW_LIMB * part + _POWER_LIMB * j)
    return total * pow(constants().gamma, at + 1, PRIME) % PRIME


def _blocks(data: "Array", first: int) -> int:
    """The value of whole blocks (bytes, any number) of which the first is block `first`."""
    import numpy as np

    block_constants, powers = tables()
    total = 0
    for at in range(0, len(data) // BLOCK, _BATCH):
        halves = data[at * BLOCK : (at + _BATCH) * BLOCK].view("<u2").reshape(-1, _HALVES)
        rows = (halves.astype("f8") @ block_constants).astype("i8")
        parts = np.stack([rows >> (_ROW_LIMB * i) & ((1 << _ROW_LIMB) - 1) for i in range(_ROW_LIMBS)], -1)
        crossed = parts.reshape(len(rows), -1).T.astype("f8") @ powers[: len(rows)]
        total += joined(crossed.tolist(), first + at)
    return total % PRIME


def _contiguous(data: "Array", at: int) -> int:
    """The value of bytes that lie at byte `at`: edges are filled up to whole blocks with zeros."""
    import numpy as np

    total, lead = 0, -at % BLOCK
    middle = max(0, (len(data) - lead) // BLOCK * BLOCK)
    edges = ((0, min(lead, len(data))), (lead + middle, len(data))) if lead < len(data) else ((0, len(data)),)
    for first, end in edges:
        if first < end:
            begin = (at + first) % BLOCK
            padded = np.zeros(-(-(begin + end - first) // BLOCK) * BLOCK, "u1")
            padded[begin : begin + end - first] = data[first:end]
            total += _blocks(padded, (at + first) // BLOCK)
    if middle:
        total += _blocks(data[lead : lead + middle], (at + lead) // BLOCK)
    return total


def accumulate_numpy(data: "Buffer", start: int, at: int, loops: tuple[Stride, ...], run: int) -> int:
    """`Accumulate` by exact products in doubles; strided runs are first laid out among zeros."""
    import numpy as np

    flat = np.frombuffer(memoryview(data), "u1")
    loops = tuple(s for s in loops if s.n != 1)
    if not run or any(s.n == 0 for s in loops):
        return 0
    if start + run + sum((s.n - 1) * s.src for s in loops) > len(flat):
        raise ValueError("the runs reach past the end of the data")
    return _nest(flat, start, at, loops, run) % PRIME


def _nest(flat: "Array", start: int, at: int, loops: tuple[Stride, ...], run: int) -> int:
    import numpy as np

    if not loops:
        return _contiguous(flat[start : start + run], at)
    span = run + sum((s.n - 1) * s.dst for s in loops)
    if span > _SPREAD:
        return sum(_nest(flat, start + f, at + t, inner, run) for t, f, inner in halved(loops))
    laid = np.zeros(span, "u1")
    shape, item = tuple(s.n for s in loops), f"V{run}"
    of = np.ndarray(shape, item, flat.data, start, tuple(s.src for s in loops))
    np.ndarray(shape, item, laid.data, 0, tuple(s.dst for s in loops))[...] = of
    return _contiguous(laid, at)


def halved(loops: tuple[Stride, ...]) -> list[tuple[int, int, tuple[Stride, ...]]]:
    """(further in the tensor, further in the data, loops) of either half of the widest loop."""
    i = max(range(len(loops)), key=lambda i: (loops[i].n - 1) * loops[i].dst)
    n, d, s = loops[i]
    out = []
    for first, count in ((0, n // 2), (n // 2, n - n // 2)):
        kept = (Stride(count, d, s),) if count > 1 else ()
        out.append((first * d, first * s, (*loops[:i], *kept, *loops[i + 1 :])))
    return out
