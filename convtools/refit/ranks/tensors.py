"""A rank's own tensors, packed into messages where they lie: on the CPU or on a device, no matter."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from convtools.codecs.cast import cast
from convtools.equality.fingerprint import Fingerprint
from convtools.errors import UsageError, tick
from convtools.layout.plan import Move
from convtools.layout.region import Region
from convtools.refit.errors import RefitError
from convtools.refit.guard import is_finite
from convtools.refit.ranks.cut_tensor import CutTensor
from convtools.refit.ranks.legs import Copy, Message
from convtools.stores.base import DTYPE_NBYTES

if TYPE_CHECKING:
    import torch

_WIDTH = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def local_tensor(name: str, tensor: Any) -> "torch.Tensor":
    """A rank's own part of a DTensor, or a plain tensor; not cast. Raises UsageError for what is neither."""
    import torch

    held: Any = tensor.held if isinstance(tensor, CutTensor) else tensor
    local = held.to_local() if hasattr(held, "placements") else held
    if not isinstance(local, torch.Tensor):
        raise UsageError(f"{tick(name)} is no torch tensor", found=type(tensor).__name__)
    wait = getattr(local, "wait", None)  # a collective that is still under way
    return (wait() if callable(wait) else local).detach()


def as_numbers(flat: "torch.Tensor", size: int) -> "torch.Tensor":
    """Bytes or elements as whole numbers of `size` bytes, without a copy."""
    import torch

    return flat.view(torch.uint8).view(getattr(torch, _WIDTH[size]))


def copy_move(of: "torch.Tensor", to: "torch.Tensor", move: Move) -> None:
    """The elements of a move between two flat tensors of whole numbers of one width."""
    import torch

    shape = (*(s.n for s in move.loops), move.run)
    source = torch.as_strided(of, shape, (*(s.src for s in move.loops), 1), of.storage_offset() + move.src)
    target = torch.as_strided(to, shape, (*(s.dst for s in move.loops), 1), to.storage_offset() + move.dst)
    target.copy_(source)


class HeldTensors:
    """The tensors of this rank at one push, by their places among its rows."""

    def __init__(self, held: Sequence[tuple[str, Any]]) -> None:
        """Raises UsageError."""
        self._local = [(local_tensor(name, tensor), tensor.dtype) for name, tensor in held]
        self._last: tuple[int, Any] = (-1, None)

    def flat(self, held: int) -> "torch.Tensor":
        """Its elements in order; a copy, kept for its other parts, of one that is cast or does not lie so."""
        if self._last[0] != held:
            local, dtype = self._local[held]
            self._last = (held, local.to(dtype).contiguous().view(-1))
        found: torch.Tensor = self._last[1]
        return found

    def pack(self, message: Message, to: "torch.Tensor") -> None:
        """A message into bytes of the CPU. Raises UsageError for a norm that cannot be shifted."""
        for copy in message.copies:
            self.place(copy, to[copy.at : copy.at + copy.nbytes], copy.packed)

    def place(self, copy: Copy, to: "torch.Tensor", move: Move) -> None:
        """The elements of a copy, by a move into `to`: the packed one, or straight into a bucket."""
        import torch

        size = DTYPE_NBYTES[copy.dtype]
        of = as_numbers(self.flat(copy.held), size)
        if not copy.plus and of.device.type == "cpu":
            copy_move(of, as_numbers(to, size), move)
            return
        dense = torch.empty(copy.move.numel, dtype=of.dtype, device=of.device)
        copy_move(of, dense, copy.packed)
        flat = dense.cpu().view(torch.uint8)
        if copy.plus:
            array: Any = flat.numpy()
            data = cast(memoryview(array), copy.dtype, copy.dtype, copy.plus)
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        spread = move._replace(src=0, loops=tuple(
            s._replace(src=p.dst) for s, p in zip(move.loops, copy.packed.loops, strict=True)
        ))  # fmt: skip
        copy_move(as_numbers(flat, size), as_numbers(to, size), spread)

    def fingerprint(self, held: int) -> int:
        """Of all that this rank holds of a tensor."""
        made = Fingerprint()
        made.add(0, self._bytes(held))
        return made.value

    def fingerprint_in(self, held: int, shape: tuple[int, ...], size: int, region: Region) -> int:
        """The same, where it lies in the whole tensor: the values of all regions add up."""
        made = Fingerprint()
        made.add_region(shape, size, region, self._bytes(held))
        return made.value

    def _bytes(self, held: int) -> memoryview:
        import torch

        flat = self.flat(held)
        if not flat.numel():
            return memoryview(b"")
        array: Any = flat.view(torch.uint8).cpu().numpy()
        return memoryview(array)


def scatter(message: Message, of: "torch.Tensor", to: "torch.Tensor") -> None:
    """A message that came into the bucket's bytes."""
    for copy in message.copies:
        scatter_copy(copy, of, to, 0)


def scatter_copy(copy: Copy, of: "torch.Tensor", to: "torch.Tensor", first: int) -> None:
    """One copy of a message into a bucket whose byte `first` is the first of `to`."""
    size = DTYPE_NBYTES[copy.dtype]
    source = as_numbers(of[copy.at : copy.at + copy.nbytes], size)
    end = copy.to + size * (copy.move.dst + sum((s.n - 1) * s.dst for s in copy.move.loops) + copy.move.run)
    copy_move(source, as_numbers(to[copy.to - first : end - first], size), copy.unpacked)


def add_values(values: dict[int, Fingerprint], message: Message, data: memoryview) -> None:
    """The fingerprints of a message's copies, where they lie in the plan's tensors."""
    for copy in message.copies:
        size = DTYPE_NBYTES[copy.dtype]
        moved = copy.unpacked._replace(dst=copy.move.dst + copy.start // size)
        values.setdefault(copy.tensor, Fingerprint()).add_move(moved, size, data, copy.at)


def check_finite(message: Message, data: memoryview, names: Mapping[int, str]) -> None:
    """Raises RefitError, naming the tensor, for NaN and infinity."""
    import numpy as np

    for copy in message.copies:
        if not is_finite(np.frombuffer(data, "u1")[copy.at : copy.at + copy.nbytes], copy.dtype):
            raise RefitError(
                f"{tick(names[copy.tensor])} holds NaN or infinity",
                fix="look at the training step; to push it all the same, finite=False",
            )
