"""`ReferenceEngine`: a checkpoint served over HTTP, whose weights can be replaced while it answers."""

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from convtools.engine.generation import Generated, Generator, Request
from convtools.engine.loading import check_folder, load
from convtools.engine.prefixes import PrefixCache
from convtools.engine.traffic import Traffic
from convtools.engine.web import WebServer
from convtools.errors import UsageError
from convtools.refit.applier import Applier, InPlaceApplier, ShadowApplier
from convtools.refit.channels.local_memory import Server
from convtools.refit.protocol import POISONED
from convtools.refit.receiver import Receiver
from convtools.refit.weights import TensorWeights

SHADOW, IN_PLACE, IN_PLACE_UNDO = "shadow", "in-place", "in-place-undo"
MODES = (SHADOW, IN_PLACE, IN_PLACE_UNDO)


class ReferenceEngine:
    """Loads a checkpoint's folder, serves it at `url`, and takes new weights at `refit_dir`.

        with ReferenceEngine("model/") as engine, WeightSync(trained, [LocalSink(engine.refit_dir)]) as sync:
            sync.push(version=1)
            engine.generate([1, 2, 3], max_new_tokens=8).ids

    `mode`: shadow (a second copy of the model; answers until the commit), in-place-undo (the same memory
    as an undo log; answers nothing during a push) or in-place (no memory; an abort leaves it poisoned).
    A push waits `drain` seconds for requests in flight, a request `wait` seconds for a push.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        mode: str = SHADOW,
        version: int = 0,
        refit_dir: str | os.PathLike[str] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        drain: float = 30.0,
        wait: float = 30.0,
    ) -> None:
        """Raises UsageError, for a taken port before it loads, and CheckpointError; see `loading.load`."""
        self.model = Path(model)
        """The folder that it was started on."""
        self.mode = mode
        self._open = ExitStack()
        check_folder(self.model)
        web = WebServer(host, port)
        self.url = web.url
        """Where it answers."""
        with ExitStack() as opening:
            opening.callback(web.close)
            self._start(web, opening, version, refit_dir, drain, wait)
            self._open = opening.pop_all()

    def _start(
        self, web: WebServer, opening: ExitStack, version: int, refit_dir: str | os.PathLike[str] | None,
        drain: float, wait: float,
    ) -> None:  # fmt: skip
        self.loaded = load(self.model)
        """The model, and its memory by the checkpoint's names."""
        self.prefixes = PrefixCache()
        """Prompts that are not read twice."""
        self._traffic = Traffic(wait)
        self.receiver = Receiver(
            _applier(self.mode, TensorWeights(self.loaded.named)), version=version, flush=self.prefixes.flush,
            drain=drain, in_flight=self._traffic.usher,
        )  # fmt: skip
        """State and version, and the gate that its requests go through."""
        self.receiver.origin = str(self.model.absolute())
        self._traffic.receiver = self.receiver
        self._generator = Generator(self.loaded.model, self._traffic, self.prefixes)
        if refit_dir is None:
            refit_dir = opening.enter_context(tempfile.TemporaryDirectory(prefix="convtools-refit-"))
        self.refit_dir = Path(refit_dir).absolute()
        """The directory of its refit socket: `LocalSink(engine.refit_dir)`."""
        opening.enter_context(Server(self.receiver, self.refit_dir))
        web.serve(self._pages(), self._generator.generate)
        opening.callback(web.close)
        opening.callback(self._traffic.end)

    @property
    def version(self) -> int:
        """Of the weights that it serves."""
        return self.receiver.version

    @property
    def state(self) -> str:
        """clean, updating or poisoned."""
        return self.receiver.state

    def generate(self, input_ids: Sequence[int] | Sequence[Sequence[int]], **options: Any) -> Generated:
        """What POST /generate does, without HTTP; `options` are the fields of `Request`."""
        rows = [list(row) if isinstance(row, Sequence) else row for row in input_ids]
        return self._generator.generate(Request(rows, **options))

    def info(self) -> dict[str, object]:
        """What GET /info answers."""
        named = self.loaded.named
        return {
            "model": str(self.model.absolute()),
            "architecture": type(self.loaded.model).__name__,
            "state": self.state,
            "version": self.version,
            "reason": self.receiver.reason,
            "incarnation": self.receiver.incarnation,
            "mode": self.mode,
            "in_flight": list(self.receiver.policies),
            "tensors": len(named),
            "nbytes": sum(t.nbytes for t in {t.data_ptr(): t for t in named.values()}.values()),
            "carried": list(self.loaded.carried),
            "computed": list(self.loaded.computed),
            "prefixes": len(self.prefixes),
            "vocab": self._generator.vocab,
            "context": self._generator.context,
        }

    def _pages(self) -> dict[str, Any]:
        return {
            "/health": self._health,
            "/info": lambda: (200, self.info()),
            "/refit": lambda: (200, {"directory": str(self.refit_dir)}),
        }

    def _health(self) -> tuple[int, object]:
        state = self.state
        return 503 if state == POISONED else 200, {"state": state, "version": self.version}

    def close(self) -> None:
        """End requests and refits; nothing is left of the socket, the key and the port."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _applier(mode: str, weights: TensorWeights) -> Applier:
    if mode == SHADOW:
        return ShadowApplier(weights)
    if mode == IN_PLACE:
        return InPlaceApplier(weights)
    if mode == IN_PLACE_UNDO:
        return InPlaceApplier(weights, undo_budget=sum(t.nbytes for t in weights.tensors().values()))
    raise UsageError("no such mode", expected=" or ".join(MODES), found=mode)
