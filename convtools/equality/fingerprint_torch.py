"""The additive fingerprint of live tensors where they are: on a GPU nothing but a few numbers leaves it.

The same exact products in doubles as numpy's, on any device that has them; each device is first asked
for a result that is known. Tensors in the memory of the CPU take the compiled kernel instead.
"""

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from convtools.equality.fingerprint import BLOCK, PRIME, accumulate_numpy, halved, joined, tables
from convtools.errors import UsageError
from convtools.layout.plan import Move, Stride

if TYPE_CHECKING:
    import torch

_BATCH = 256  # blocks that meet one table of powers
_PIECE = 32 << 20  # bytes at once: in doubles they are four times as many
_ROW_LIMBS = 3


def tensor_value(tensor: "torch.Tensor", of: Move | None = None) -> int:
    """The value of a part of a canonical tensor that is held by `tensor`, computed on its device.

    `of.dst` counts elements of the canonical tensor and `of.src` those of `tensor` in C order; without
    it, `tensor` is all of it. Raises UsageError where the device's doubles are not exact.
    """
    import torch

    _check(str(tensor.device))
    flat = tensor.detach().contiguous().reshape(-1)
    size = flat.element_size()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    items = flat.view(torch.uint8).view(kind) if flat.numel() else flat.new_empty(0, dtype=kind)
    of = of or Move(0, 0, (), items.numel())
    loops = tuple(s for s in of.loops if s.n != 1)
    if not of.numel:
        return 0
    if min(of.src, of.dst, *(x for s in loops for x in s)) < 0 or (
        of.src + of.run + sum((s.n - 1) * s.src for s in loops) > items.numel()
    ):
        raise UsageError(
            "a part of a tensor is larger than its data", found=f"{of} of {items.numel()} elements"
        )
    values = (_value(run, at * size) for run, at in _laid(items, of.src, of.dst, loops, of.run))
    return sum(values) % PRIME


def _laid(
    items: "torch.Tensor", start: int, at: int, loops: tuple[Stride, ...], run: int
) -> Iterator[tuple["torch.Tensor", int]]:
    """(contiguous elements, the first one's place in the canonical tensor): strided runs among zeros."""
    import torch

    most = _PIECE // items.element_size()
    if not loops:
        for first in range(0, run, most):
            yield items[start + first : start + min(first + most, run)], at + first
        return
    span = run + sum((s.n - 1) * s.dst for s in loops)
    if span > most:
        for t, f, inner in halved(loops):
            yield from _laid(items, start + f, at + t, inner, run)
        return
    laid = torch.zeros(span, dtype=items.dtype, device=items.device)
    shape = (*(s.n for s in loops), run)
    of = torch.as_strided(items, shape, (*(s.src for s in loops), 1), items.storage_offset() + start)
    torch.as_strided(laid, shape, (*(s.dst for s in loops), 1)).copy_(of)
    yield laid, at


def _value(items: "torch.Tensor", at: int) -> int:
    """The value of contiguous elements that lie at byte `at`."""
    import torch

    lead, nbytes = at % BLOCK, items.numel() * items.element_size()
    count = -(-(lead + nbytes) // BLOCK)
    count = count if count <= _BATCH else -(-count // _BATCH) * _BATCH
    padded = torch.zeros(count * BLOCK, dtype=torch.uint8, device=items.device)
    padded[lead : lead + nbytes] = items.view(torch.uint8)
    block_constants, powers = _tables(str(items.device))
    halves = padded.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF).to(torch.float64)
    rows = (halves.view(count, -1) @ block_constants).to(torch.int64)
    parts = torch.stack([(rows >> (18 * i)) & 0x3FFFF for i in range(_ROW_LIMBS)], -1)
    batch = min(count, _BATCH)
    parts = parts.view(count // batch, batch, -1).transpose(1, 2).to(torch.float64)
    crossed = (parts @ powers[:batch]).cpu().tolist()
    first = at // BLOCK
    return sum(joined(one, first + i * batch) for i, one in enumerate(crossed)) % PRIME


@cache
def _tables(device: str) -> tuple[Any, Any]:
    import torch

    block_constants, powers = tables()
    return torch.from_numpy(block_constants).to(device), torch.from_numpy(powers).to(device)


@cache
def _check(device: str) -> None:
    """Raise UsageError unless the device's doubles give the largest sums there are exactly."""
    import torch

    ones = torch.full((2 * _BATCH * BLOCK,), 255, dtype=torch.uint8)
    want = accumulate_numpy(ones.numpy().data, 0, 0, (), ones.numel())
    if _value(ones.to(device), 0) != want:
        raise UsageError(
            f"products of doubles on `{device}` are not exact",
            fix="move the tensors to the CPU, or another device",
        )
