"""An engine's tensors by name, as writable memory: what an engine gives to be refitted."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from convtools.equality.live import named_tensors
from convtools.errors import UsageError, tick
from convtools.refit.plan import Tensor
from convtools.stores.base import FROM_TORCH

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, Any]


class Weights(Protocol):
    """An engine's tensors."""

    def tensors(self) -> Mapping[str, Tensor]:
        """All that a push must bring."""

    def aliases(self) -> Mapping[str, str]:
        """Names whose memory is that of another one: such as a tied head -> the embedding."""

    def buffer(self, name: str) -> "Bytes":
        """The live bytes of a tensor, writable."""

    def adopt(self, buffers: "Mapping[str, Bytes]") -> None:
        """Serve these bytes from now on, all of them; nobody reads meanwhile."""

    step: int
    """Bytes that change places at once."""

    def zeros(self, nbytes: int) -> "Bytes":
        """New memory where the tensors lie."""

    def host_zeros(self, nbytes: int) -> "Bytes":
        """New memory of the host."""

    def copied(self, data: "Bytes") -> "Bytes":
        """A copy where the tensors lie."""

    def settle(self) -> None:
        """Wait until all that was written is there."""


class TensorWeights:
    """Named torch tensors or numpy arrays in the memory of the CPU; their addresses never change."""

    step = 1 << 18

    def __init__(self, named: Mapping[str, Any]) -> None:
        """A module's are those of its state_dict.

        Raises UsageError, naming the tensor, for what is not contiguous, or no tensor, or overlaps.
        """
        given, named = named, named_tensors(named) or {}
        if not named:
            raise UsageError(
                "an engine needs named tensors", expected="a mapping of names to tensors, or a module",
                found=type(given).__name__,
            )  # fmt: skip
        self._bytes = {name: self._flat(name, tensor) for name, tensor in named.items()}
        self._tensors = {name: described(name, tensor) for name, tensor in named.items()}
        first: dict[tuple[int, int], str] = {}
        self._aliases: dict[str, str] = {}
        for name, data in self._bytes.items():
            if not len(data):
                continue
            of = first.setdefault((self._address(data), len(data)), name)
            if of != name:
                self._aliases[name] = of
        _check_apart(first)

    def tensors(self) -> Mapping[str, Tensor]:
        """All of them, aliases included."""
        return self._tensors

    def aliases(self) -> Mapping[str, str]:
        """Names with the very memory of another."""
        return self._aliases

    def buffer(self, name: str) -> "Bytes":
        """Its live bytes."""
        return self._bytes[name]

    def adopt(self, buffers: "Mapping[str, Bytes]") -> None:
        """Copy them to where the tensors lie."""
        for name, data in buffers.items():
            self._bytes[name][:] = data

    def zeros(self, nbytes: int) -> "Bytes":
        """In the memory of the CPU."""
        import numpy as np

        return np.zeros(nbytes, "u1")

    def host_zeros(self, nbytes: int) -> "Bytes":
        """The same."""
        return self.zeros(nbytes)

    def copied(self, data: "Bytes") -> "Bytes":
        """A copy."""
        return data.copy()

    def settle(self) -> None:
        """It is there at once."""

    def _flat(self, name: str, tensor: Any) -> "Bytes":
        return writable_bytes(name, tensor)

    def _address(self, data: "Bytes") -> int:
        return int(data.__array_interface__["data"][0])


class SwappedWeights(TensorWeights):
    """The same, for an engine that can be pointed at other memory: a commit costs no copy.

    `point(name, bytes)` makes the engine use these bytes for the tensor and for its aliases.
    """

    def __init__(self, named: Mapping[str, Any], point: "Callable[[str, Bytes], None]") -> None:
        super().__init__(named)
        self._point = point
        self.mixed = False
        """Whether pointing failed and going back did too: some tensors may be of another version."""

    def adopt(self, buffers: "Mapping[str, Bytes]") -> None:
        """Point the engine at them; what it used before becomes the caller's."""
        done: dict[str, Bytes] = {}
        self.mixed = True
        try:
            for name, data in buffers.items():
                done[name] = self._bytes[name]
                self._point(name, data)
        except BaseException:
            for name, data in done.items():
                self._point(name, data)
            self.mixed = False
            raise
        now = self._bytes | dict(buffers)
        self._bytes = now | {name: now[of] for name, of in self._aliases.items()}  # all at once
        self.mixed = False


def _check_apart(first: Mapping[tuple[int, int], str]) -> None:
    """Raises UsageError where two tensors share a part of their memory: a push could fill it twice."""
    end, before = 0, ""
    for (start, nbytes), name in sorted(first.items()):
        if start < end:
            raise UsageError(
                f"{tick(before)} and {tick(name)} share a part of their memory",
                fix="give the whole, or parts that do not overlap",
            )
        end, before = start + nbytes, name


def described(name: str, tensor: Any) -> Tensor:
    """Name, dtype and shape of a torch tensor or numpy array. Raises UsageError for what is neither."""
    if not hasattr(tensor, "dtype") or not hasattr(tensor, "shape"):
        raise UsageError(f"{tick(name)} is no tensor", found=type(tensor).__name__)
    if hasattr(tensor, "placements"):
        raise UsageError(f"{tick(name)} is a DTensor", fix="push it with a RankedSource on every rank")
    if hasattr(tensor, "region"):
        raise UsageError(f"{tick(name)} is a rank's part", fix="push it with a RankedSource on every rank")
    if getattr(getattr(tensor, "device", None), "type", "cpu") == "meta":
        raise UsageError(f"{tick(name)} holds no numbers: it is on the meta device")
    if hasattr(tensor, "untyped_storage"):
        _check_held(name, tensor)
    text = str(tensor.dtype).removeprefix("torch.")
    if text not in FROM_TORCH:
        raise UsageError(f"{tick(name)} is of a dtype that no store holds", found=text)
    return Tensor(name, FROM_TORCH[text], tuple(int(n) for n in tensor.shape))


def _check_held(name: str, tensor: Any) -> None:
    """Raises UsageError where a torch tensor has no memory behind it, or not as plain numbers."""
    import torch

    if tensor.layout != torch.strided:
        raise UsageError(f"{tick(name)} is not dense", found=str(tensor.layout))
    if not tensor.numel():
        return
    last = sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < nbytes:
        raise UsageError(
            f"{tick(name)} holds no numbers: its memory was given back", fix="gather it before the push"
        )


def writable_bytes(name: str, tensor: Any) -> "Bytes":
    """The memory of a tensor, not a copy. Raises UsageError unless it is contiguous, here, and writable."""
    flat = flat_bytes(name, tensor)
    if flat is None or not flat.flags.writeable:
        raise UsageError(
            f"{tick(name)} is no contiguous writable memory of the CPU", fix="make it contiguous"
        )
    return flat


def flat_bytes(name: str, tensor: Any) -> "Bytes | None":
    """The memory of a tensor as bytes, in order; None where it does not lie so."""
    import numpy as np

    described(name, tensor)
    if hasattr(tensor, "data_ptr"):
        import torch

        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        if tensor.numel() == 0:
            return np.zeros(0, "u1")
        return np.asarray(tensor.detach().reshape(-1).view(torch.uint8).numpy())
    return tensor.reshape(-1).view("u1") if tensor.flags.c_contiguous else None
