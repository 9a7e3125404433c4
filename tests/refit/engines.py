"""A tiny engine for tests of refit: tensors that all hold their version, and readers that look for mixes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from convtools.refit.applier import InPlaceApplier, ShadowApplier
from convtools.refit.channels.connection import Connection
from convtools.refit.errors import NotServing
from convtools.refit.receiver import Receiver
from convtools.refit.weights import TensorWeights

Tensors = dict[str, np.ndarray[Any, Any]]
MODES = ("shadow", "undo", "quarantine")


def model(version: int, layers: int = 3) -> Tensors:
    """Every element of every tensor is the version."""
    out: Tensors = {}
    for i in range(layers):
        out[f"layers.{i}.w"] = np.full((40, 33), version, "f4")
        out[f"layers.{i}.norm"] = np.full(33, version, "f8")
    out["head"] = np.full((97, 3), version, "i2")
    return out


def refill(tensors: Tensors, version: int) -> None:
    for tensor in tensors.values():
        tensor[...] = version


def versions_in(tensors: Tensors) -> set[float]:
    """Which versions the elements are of: one, unless it is a mix."""
    return {float(v) for t in tensors.values() for v in (t.min(), t.max())} if tensors else set()


class Engine:
    """A receiver over a model of version 0."""

    def __init__(
        self,
        mode: str = "shadow",
        *,
        flush: Callable[[], None] | None = None,
        slow: float = 0,
        in_flight: Callable[[str], None] | None = None,
    ) -> None:
        self.tensors = model(0)
        weights = TensorWeights(self.tensors)
        kinds: dict[str, Callable[[], Any]] = {
            "shadow": lambda: ShadowApplier(weights),
            "undo": lambda: InPlaceApplier(weights, undo_budget=1 << 30),
            "quarantine": lambda: InPlaceApplier(weights),
        }
        self.applier = kinds[mode]()
        if slow:
            write = self.applier.write

            def slowly(*args: Any) -> Any:
                threading.Event().wait(slow)
                return write(*args)

            self.applier.write = slowly
        self.receiver = Receiver(self.applier, flush=flush, drain=2, in_flight=in_flight)
        self.mixes: list[Any] = []
        self.served: set[int] = set()

    def look(self) -> int | None:
        """The version that a request would get, after checking that it gets that and nothing else."""
        try:
            with self.receiver.serving() as version:
                found = versions_in(self.tensors)
                if found != {float(version)}:
                    self.mixes.append((version, found))
                self.served.add(version)
                return version
        except NotServing:
            return None

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Requests all the time."""
        stop = threading.Event()

        def read() -> None:
            while not stop.wait(0.001):
                self.look()

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


FAULTS = ("drop", "double", "swap", "cut", "delay", "flip", "hang up")


class Faulty(Connection):
    """A connection that damages the frame whose turn it is."""

    fault = ""
    at = -1
    seed = 0
    _count = 0
    _held: "bytes | None" = None

    def _write(self, frame: bytes, until: float, fds: list[int]) -> None:
        turn, self._count = self._count == self.at, self._count + 1
        if turn and self.fault == "drop":
            return
        if turn and self.fault == "swap":
            self._held = frame
            return
        if turn and self.fault == "cut":
            frame = frame[: self.seed % len(frame)]
        if turn and self.fault == "delay":
            threading.Event().wait(0.02)
        if turn and self.fault == "flip":
            at = self.seed % (len(frame) * 8)
            frame = frame[: at // 8] + bytes([frame[at // 8] ^ 1 << at % 8]) + frame[at // 8 + 1 :]
        if turn and self.fault == "hang up":
            self._sock.shutdown(2)
        super()._write(frame, until, fds)
        if turn and self.fault == "double":
            super()._write(frame, until, [])
        if self._held is not None:
            held, self._held = self._held, None
            super()._write(held, until, [])
