"""Whether one array is another in a different order, and which order that is, in words. Pure, on raw bits."""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_MOST_ROWS = 1 << 17


def reordered(a: "Array", b: "Array", name: str) -> str | None:
    """One sentence where B is A in another order; both of one shape and dtype."""
    import numpy as np

    if a.ndim >= 2 and (said := _transposed(a, b)):
        return said
    for axis in range(a.ndim):
        order = permutation(np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0))
        if order is not None:
            return describe(order, axis, a.ndim, name)
    if a.size > 1 and _sums(a) == _sums(b) and np.array_equal(np.sort(a, axis=None), np.sort(b, axis=None)):
        return "B holds the same elements as A in another order"
    return None


def _sums(raw: "Array") -> tuple[int, int]:
    """What no reordering changes, quick to work out."""
    import numpy as np

    return int(raw.sum(dtype="<u8")), int(np.bitwise_xor.reduce(raw, axis=None))


def _transposed(a: "Array", b: "Array") -> str | None:
    import numpy as np

    *outer, rows, columns = a.shape
    if min(rows, columns) < 2:
        return None
    how = "" if rows == columns else " and then read in the old shape"
    for names, x, y in (("B is A", a, b), ("A is B", b, a)):
        if np.array_equal(np.swapaxes(x, -1, -2), y.reshape(*outer, columns, rows)):
            return f"{names} transposed{how}"
    return None


def permutation(a: "Array", b: "Array") -> "Array | None":
    """p such that b[i] is a[p[i]] for every row, rows that are alike left in place; None: there is none."""
    import numpy as np

    n = len(a)
    if not 2 <= n <= _MOST_ROWS:
        return None
    left = np.ascontiguousarray(a).reshape(n, -1)
    right = np.ascontiguousarray(b).reshape(n, -1)
    moved = np.flatnonzero((left != right).any(axis=1))
    if len(moved) < 2:
        return None
    places: dict[bytes, list[int]] = defaultdict(list)
    for i in moved[::-1].tolist():
        places[left[i].tobytes()].append(i)
    order = np.arange(n)
    for i in moved.tolist():
        found = places.get(right[i].tobytes())
        if not found:
            return None
        order[i] = found.pop()
    return order


def describe(order: "Array", axis: int, ndim: int, name: str) -> str:
    """A permutation in words."""
    import numpy as np

    experts = ndim >= 3 and axis == 0 and "experts" in name
    what = (
        "experts"
        if experts
        else "columns"
        if axis == ndim - 1 and ndim > 1
        else "rows"
        if ndim > 1
        else "elements"
    )
    n, moved = len(order), np.flatnonzero(order != np.arange(len(order)))
    first = int(moved[0])
    example = f"{what[:-1]} {first} of B is {what[:-1]} {int(order[first])} of A"
    if swapped := _two_blocks(order, moved):
        low, high, size = swapped
        if size == 1 or experts:
            return f"{what} are swapped: {example}, and the other way round"
        ranges = f"{what} {low}:{low + size} and {high}:{high + size}"
        return f"{_parts(name, low, high, size, n)}{ranges} are swapped"
    low, high = first, int(moved[-1]) + 1
    inside = order[low:high] - low
    size = len(inside)
    shift = int(inside[0])
    if np.array_equal(inside, (np.arange(size) + shift) % size):
        part = "" if size == n else f" {low}:{high}"
        heads = " (whole heads or groups of QKV)" if _is_qkv(name) else ""
        return f"{what}{part} are shifted by {min(shift, size - shift)}{heads}: {example}"
    block = _block(order)
    coarse = order[::block] // block
    if said := _interleaved(coarse, block, what) or _per_head(order, what):
        return said
    if experts:
        return f"experts are permuted: {example}"
    if block > 1:
        unit = "heads" if _is_qkv(name) else "blocks"
        return f"{unit} are permuted: {what} in blocks of {block} are in another order, such as {example}"
    return f"{what} are permuted: {example}"


def _two_blocks(order: "Array", moved: "Array") -> tuple[int, int, int] | None:
    """(first block's start, second's, their length) where just two blocks have changed places."""
    import numpy as np

    size, rest = divmod(len(moved), 2)
    low, high = int(moved[0]), int(moved[size])
    if rest or not np.array_equal(moved[:size], np.arange(low, low + size)):
        return None
    there = np.array_equal(order[low : low + size], np.arange(high, high + size))
    back = np.array_equal(order[high : high + size], np.arange(low, low + size))
    return (low, high, size) if there and back else None


def _parts(name: str, low: int, high: int, size: int, n: int) -> str:
    if low == 0 and high == size:
        if "gate_up" in name and 2 * size == n:
            return "gate and up are swapped: "
        if "in_proj" in name:
            return "z and x are swapped: "
    return "heads are swapped: " if _is_qkv(name) else ""


def _is_qkv(name: str) -> bool:
    return any(word in name for word in ("q_proj", "k_proj", "v_proj", "qkv", "query_key_value", "c_attn"))


def _block(order: "Array") -> int:
    """The largest number of neighbours that stay together, aligned to itself."""
    import numpy as np

    n = len(order)
    breaks = np.flatnonzero(np.diff(order) != 1) + 1
    block = int(np.gcd.reduce(np.append(breaks, n)))
    while block > 1 and (n % block or (order[::block] % block).any()):
        block = next((d for d in range(block - 1, 0, -1) if block % d == 0), 1)
    return block


def _per_head(order: "Array", what: str) -> str | None:
    """The two ways to lay out a rotary head, pairs of rows side by side or halves, in every head alike."""
    import numpy as np

    n = len(order)
    for size in (d for d in range(4, n // 2 + 1) if n % d == 0):
        if np.array_equal(order.reshape(-1, size), order[:size] + np.arange(0, n, size)[:, None]):
            said = _interleaved(order[:size], 1, what)
            return said and f"{said}, within each of {n // size} heads of {size}"
    return None


def _interleaved(coarse: "Array", block: int, what: str) -> str | None:
    import numpy as np

    n = len(coarse)
    step = int(coarse[1]) if n > 3 and coarse[0] == 0 else 0
    if step < 2 or n % step or not np.array_equal(coarse, np.arange(n).reshape(-1, step).T.reshape(-1)):
        return None
    unit = f"blocks of {block} {what}" if block > 1 else what
    return f"re-interleaved: {unit} lie as [{n // step}, {step}] in A and as [{step}, {n // step}] in B"
