"""Where consumed bytes go, and how they are taken back: shadow copies, or in place with an undo log.

What a transaction needs is an `Applier`; the two here work over any `Weights`. An applier with `copies`
gives `write` a fourth argument: how to copy, which also looks at what lies at the destination then, in one
pass over memory.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from convtools.errors import UsageError
from convtools.refit.plan import RefitPlan, Tensor
from convtools.refit.taking import check_taken
from convtools.refit.weights import SwappedWeights, Weights

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, Any]

Copy = Callable[["Bytes", "Bytes"], None]
"""How bytes get to a destination: (to, from)."""

SHADOW, UNDO, QUARANTINE = "shadow", "undo", "quarantine"


class Applier(Protocol):
    """What a transaction does with bytes. `abort` may follow any of the others but `finish`."""

    mode: str
    """shadow, undo, quarantine, or the applier's own word."""

    def accept(self, tensors: Sequence[Tensor]) -> None:
        """Raises RefitError, naming the tensors, unless it takes exactly these."""

    def undo_bytes(self) -> int:
        """Memory beside the staging buffers that makes a transaction undoable."""

    def in_place(self) -> bool:
        """Whether writing changes what is served."""

    def begin(self, plan: RefitPlan) -> None:
        """A transaction begins."""

    def write(self, tensor: Tensor, start: int, data: "Bytes") -> "Bytes":
        """Put bytes where they belong; returns them as they lie there now."""

    def swap(self, version: int) -> None:
        """Make what was written what is served."""

    def finish(self) -> None:
        """The version was raised: forget how it was before."""

    def abort(self) -> bool:
        """Back to what it was; False where that is no longer possible."""

    def serves(self, tensor: Tensor) -> "Bytes | None":
        """The bytes that are served; None where they cannot be read back."""

    def pending(self, tensor: Tensor) -> "Bytes | None":
        """The bytes that a commit would serve."""


def applier_of(given: Any) -> Applier:
    """Raises UsageError for what is none, such as the weights themselves."""
    if isinstance(given, type) or not all(hasattr(given, n) for n in ("accept", "begin", "write", "swap")):
        raise UsageError(
            "a Receiver needs an applier: how new bytes get to the engine's tensors",
            found=given.__name__ if isinstance(given, type) else type(given).__name__,
            fix="Receiver(ShadowApplier(weights)), or InPlaceApplier(weights)",
        )
    applier: Applier = given
    return applier


class _OverWeights:
    """What both appliers share: names, aliases, reading back."""

    mode = ""
    copies = True
    """Whether `write` takes a way to copy."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def accept(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor of the engine under one of its names at least, and no other."""
        check_taken({t.name: t for t in tensors}, self._weights.tensors(), self._weights.aliases())

    def tensors(self) -> Mapping[str, Tensor]:
        """All that it holds, aliases included."""
        return self._weights.tensors()

    def aliases(self) -> Mapping[str, str]:
        """Names that must come with the same bytes as another."""
        return self._weights.aliases()

    def serves(self, tensor: Tensor) -> "Bytes | None":
        """Its live bytes."""
        return self._weights.buffer(tensor.name)

    @property
    def on_device(self) -> bool:
        """Whether its tensors are torch's, wherever they lie, and not memory of the host alone."""
        return hasattr(self._weights, "device")

    def settle(self) -> None:
        """Wait until all that was written is there: a device does it later."""
        self._weights.settle()

    def _own(self, name: str) -> str:
        return self._weights.aliases().get(name, name)


class ShadowApplier(_OverWeights):
    """Buckets go to copies of the tensors; requests are answered until the commit."""

    mode = SHADOW

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self._shadows: dict[str, Bytes] = {}
        self._before: dict[str, Bytes] | None = None
        self._exchanged: list[tuple[Bytes, Bytes]] = []
        self._torn = False

    def undo_bytes(self) -> int:
        """A second model, kept for life."""
        names = {self._own(n) for n in self._weights.tensors()}
        return sum(self._weights.tensors()[n].nbytes for n in names)

    def in_place(self) -> bool:
        """It does not touch what is served."""
        return False

    def begin(self, plan: RefitPlan) -> None:
        """Make the copies' memory, the first time."""
        self._before, self._exchanged, self._torn = None, [], False
        for name in {self._own(t.name) for t in plan.tensors}:
            if name not in self._shadows:
                self._shadows[name] = self._weights.zeros(self._weights.tensors()[name].nbytes)

    def write(self, tensor: Tensor, start: int, data: "Bytes", copy: Copy | None = None) -> "Bytes":
        """Into the copy."""
        to = self._shadows[self._own(tensor.name)][start : start + len(data)]
        _put(to, data, copy)
        return to

    def swap(self, version: int) -> None:
        """The copies' bytes are served, and what was served is the copy."""
        before = {name: self._weights.buffer(name) for name in self._shadows}
        if isinstance(self._weights, SwappedWeights):
            self._before = before
            self._weights.adopt(self._shadows)
            self._shadows = before
            return
        # The tensors' addresses stay: their bytes change places with the copies'.
        self.settle()
        for name, live in before.items():
            self._exchange(live, self._shadows[name])
        self.settle()

    def _exchange(self, live: "Bytes", shadow: "Bytes") -> None:
        """Two buffers change contents, a cache's worth at a time; what was done can be taken back."""
        step = self._weights.step
        for at in range(0, len(live), step):
            a, b = live[at : at + step], shadow[at : at + step]
            kept = self._weights.copied(a)
            self._torn = True
            a[:], b[:] = b, kept
            self._exchanged.append((live[: at + step], shadow[: at + step]))
            if at:
                del self._exchanged[-2]
            self._torn = False

    def finish(self) -> None:
        """Nothing to give back: the copies are for the next push."""
        self._before, self._exchanged = None, []

    def abort(self) -> bool:
        """Before the swap nothing was touched; after it, or in it, back by as much as was swapped."""
        before, self._before = self._before, None
        if before is not None and isinstance(self._weights, SwappedWeights):
            now = {name: self._weights.buffer(name) for name in before}
            if any(now[name] is not before[name] for name in before):
                self._weights.adopt(before)
                self._shadows = now
            return not self._weights.mixed
        done, self._exchanged = self._exchanged, []
        if self._torn:  # interrupted between three copies: the bytes of one run are neither here nor there
            return False
        for live, shadow in done:
            self._exchange(live, shadow)
        self._exchanged = []
        self.settle()
        return True

    def pending(self, tensor: Tensor) -> "Bytes | None":
        """The copy."""
        return self._shadows.get(self._own(tensor.name))


class InPlaceApplier(_OverWeights):
    """Buckets go straight to the tensors; with a budget, what they overwrite is kept.

    Without one, or for a model that it does not hold, an abort leaves a mix: the engine is quarantined
    until a full push succeeds.
    """

    def __init__(self, weights: Weights, undo_budget: int = 0) -> None:
        """Raises UsageError for a budget that holds less than the model: half an undo is none."""
        super().__init__(weights)
        total = sum(t.nbytes for t in weights.tensors().values())
        if 0 < undo_budget < total:
            raise UsageError(
                f"an undo log of {undo_budget} bytes cannot hold the model",
                expected=f"{total} bytes, or 0 for quarantine until a full push",
            )
        self.mode = UNDO if undo_budget else QUARANTINE
        self._log: list[tuple[Bytes, Bytes]] = []
        self._kept: dict[str, Bytes] = {}
        self._bytes = total if undo_budget else 0
        self._wrote = False

    def undo_bytes(self) -> int:
        """Host memory of the undo log."""
        return self._bytes

    def in_place(self) -> bool:
        """It writes over what is served."""
        return True

    def begin(self, plan: RefitPlan) -> None:
        """Make the log's memory, the first time."""
        self.settle()  # requests have left, and what they asked of a device is done
        self._log, self._wrote = [], False
        for tensor in plan.tensors if self.mode == UNDO else ():
            if tensor.name not in self._kept:
                self._kept[tensor.name] = self._weights.host_zeros(tensor.nbytes)

    def write(self, tensor: Tensor, start: int, data: "Bytes", copy: Copy | None = None) -> "Bytes":
        """Into the tensor itself, after its old bytes were kept."""
        live = self._weights.buffer(tensor.name)[start : start + len(data)]
        if self.mode == UNDO:
            # By name, not by memory: an alias written second keeps what the first wrote, and is undone first.
            kept = self._kept[tensor.name][start : start + len(data)]
            kept[:] = live
            self._log.append((live, kept))
        self._wrote = True
        _put(live, data, copy)
        return live

    def swap(self, version: int) -> None:
        """It is served already; the gate is closed."""

    def finish(self) -> None:
        """Forget the old bytes."""
        self._log, self._wrote = [], False

    def abort(self) -> bool:
        """The old bytes back, the last written first."""
        if self.mode == QUARANTINE:
            return not self._wrote
        while self._log:
            live, kept = self._log.pop()
            live[:] = kept
        self.settle()
        return True

    def pending(self, tensor: Tensor) -> "Bytes | None":
        """What lies in the tensor."""
        return self._weights.buffer(tensor.name)


def _put(to: "Bytes", data: "Bytes", copy: Copy | None) -> None:
    if copy is None:
        to[:] = data
    else:
        copy(to, data)
