"""Zero-copy handover: the trainer's own tensors lie in the memory that the engine reads.

An `Arena` is one sealed memfd with all tensors in it, one after another. Nothing is packed: a bucket is a
window of the arena, and the only copy is the engine's, into its own buffers. The engine cannot write here,
and nobody can make it shorter.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from convtools.equality.live import named_tensors
from convtools.errors import UsageError, capped, tick
from convtools.refit.bucket import Ring
from convtools.refit.errors import RefitError
from convtools.refit.plan import Part, PlannedBucket, RefitPlan, Tensor, make_windows
from convtools.refit.weights import described, flat_bytes

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, Any]

WINDOW_BYTES = 8 << 20


class Arena(Ring):
    """Memory for named tensors, which both ends see and only this process can write.

    From the start of a push to its end, the trainer must not change them.
    """

    least, windows = 1, True

    def __init__(self, tensors: "tuple[Tensor, ...]", window_bytes: int = WINDOW_BYTES) -> None:
        """Zeros. Raises UsageError, RefitError; `Arena.like` is the usual way to make one."""
        self.plan: RefitPlan = make_windows(tensors, window_bytes)
        """Its buckets are windows of the arena, in order."""
        super().__init__(window_bytes, len(self.plan.buckets))
        self.tensors: dict[str, Any] = {}
        """The tensors in it, by name: what the trainer computes with from now on."""
        self._places = {tensors[p.tensor].name: i * window_bytes + p.offset - p.start
                        for i, b in enumerate(self.plan.buckets) for p in b.parts}  # fmt: skip
        self._watched: Callable[[], Mapping[str, Any]] | None = None

    @classmethod
    def like(
        cls, named: Any, *, tied: Mapping[str, str] | None = None, window_bytes: int = WINDOW_BYTES
    ) -> Self:
        """An arena with copies of named tensors or of a module's, torch for torch and numpy for numpy.

        `tied`: name -> the name whose tensor it is; it is not sent. Raises UsageError, RefitError.
        """
        tied, given = tied or {}, named_tensors(named)
        if not isinstance(given, Mapping) or not given:
            raise UsageError("no named tensors for an arena", found=type(named).__name__)
        if unknown := [n for pair in tied.items() for n in pair if n not in given or pair[1] in tied]:
            raise UsageError("tied weights that are not there", found=capped(map(tick, unknown)))
        own = {name: tensor for name, tensor in given.items() if name not in tied}
        arena = cls(tuple(described(n, t) for n, t in own.items()), window_bytes)
        for name, tensor in own.items():
            arena.tensors[name] = arena._like(name, tensor)
        arena.tensors |= {name: arena.tensors[of] for name, of in tied.items()}
        return arena

    def adopt(self, module: Any) -> None:
        """Let a torch module's parameters and buffers, by their names, be the tensors of this arena.

        Each push then sees that they still are. Raises UsageError where it has other tensors.
        """
        held = module.state_dict(keep_vars=True)
        problems = [f"{tick(n)}" for n in held.keys() ^ self.tensors.keys()]
        problems += [
            f"{tick(n)} is {t.dtype} {list(t.shape)}" for n, t in held.items()
            if n in self.tensors and (t.dtype, t.shape) != (self.tensors[n].dtype, self.tensors[n].shape)
        ]  # fmt: skip
        if problems:
            raise UsageError("the module has other tensors than the arena", found=capped(problems))
        for name, tensor in held.items():
            tensor.data = self.tensors[name]
        self._watched = lambda: dict(module.state_dict(keep_vars=True))

    def tensors_sent(self) -> dict[str, Any]:
        """Those that are pushed: all but the tied ones."""
        return {t.name: self.tensors[t.name] for t in self.plan.tensors}

    def check(self) -> None:
        """Raises RefitError, naming them, for tensors of an adopted module that lie elsewhere now."""
        if self._watched is None:
            return
        now = self._watched()
        gone = [tick(n) for n, t in self.tensors.items() if n not in now or _address(now[n]) != _address(t)]
        if gone:
            raise RefitError(
                "tensors of the module no longer lie in the arena",
                found=capped(gone),
                fix="write to them in place, or adopt the module again",
            )

    @property
    def ahead(self) -> int:
        """Windows that are handed over before the first is consumed."""
        return min(self.slots, 4)

    @property
    def staging_bytes(self) -> int:
        """None: these are the trainer's tensors."""
        return 0

    def slot(self, i: int, nbytes: int) -> memoryview:
        """The first `nbytes` of window `i`, to read. Raises RefitError where there is no such window."""
        return super().slot(i, nbytes).toreadonly()

    def _like(self, name: str, tensor: Any) -> Any:
        """A tensor of the arena, with the same numbers."""
        import numpy as np

        nbytes, at = described(name, tensor).nbytes, self._places.get(name, 0)
        here = memoryview(self.memory())[at : at + nbytes]
        if hasattr(tensor, "data_ptr"):
            import torch

            if not nbytes:
                return torch.empty_like(tensor, device="cpu")
            made = torch.frombuffer(here, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
            return made.copy_(tensor.detach())
        array = np.frombuffer(here, tensor.dtype).reshape(tensor.shape)
        array[...] = tensor
        return array


class ArenaSource:
    """What an arena holds: nothing is filled, for it lies in the windows already."""

    piecemeal = leads = True

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of the arena."""
        return self._arena.plan.tensors

    def copies(self) -> Mapping[str, str]:
        """None: a tied tensor is the same memory."""
        return {}

    def begin(self) -> None:
        """Raises RefitError where an adopted module went elsewhere."""
        self._arena.check()

    def bucket(self, index: int, planned: PlannedBucket) -> None:
        """Nothing to prepare."""

    def lies(self, tensor: Tensor) -> None:
        """In the window, which is looked at as it is."""

    def fill(self, tensor: Tensor, part: Part, to: memoryview) -> None:
        """It is there."""

    def end(self) -> None:
        """Nothing to let go of."""


def _address(tensor: Any) -> int:
    flat = flat_bytes("", tensor)
    return -1 if flat is None else int(flat.__array_interface__["data"][0])
