"""The weight-transfer engine that vLLM makes in each worker: it opens the socket, and does nothing else.

vLLM gives it the model when it is loaded, and closes it at the end; vLLM's own calls for weight updates
(init, start, update, finish) are refused, because a push is a transaction over our own channel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from vllm.config import set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from convtools.refit.bucket import Slots
from convtools.refit.channels.local_memory import KEY, SOCKET, Server
from convtools.refit.errors import NotServing, RefitError
from convtools.refit.gate import Gate
from convtools.refit.protocol import CLEAN, Answer, Ask, Digest, Question
from convtools.refit.receiver import Receiver
from convtools.refit.vllm.applier import VllmApplier
from convtools.refit.vllm.checkpoint import path_of, wanted_of
from convtools.refit.vllm.control import STILL, Control
from convtools.refit.vllm.mending import Mend, mends_of_platform
from convtools.refit.vllm.options import (
    check_refittable,
    control_directory,
    directory_of,
    drain_of,
    rank_directory,
)


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """vLLM's own calls bring nothing here."""


@dataclass
class NoUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """vLLM's own calls bring nothing here."""


class WorkerGate(Gate):
    """A worker's gate; when it opens, the scheduler hears that this rank is whole."""

    def __init__(self, opens: Callable[[], None]) -> None:
        super().__init__()
        self._opens = opens

    def open(self) -> None:
        """Tell the scheduler first: a worker that cannot stays held. Raises RefitError."""
        self._opens()
        super().open()


class WorkerReceiver(Receiver):
    """A receiver whose engine's steps are run by a scheduler in another process."""

    def __init__(self, applier: VllmApplier, control: Control, drain: float) -> None:
        self._control, self._wait = control, drain
        hold = partial(control.hold, wait=drain)
        super().__init__(applier, flush=control.flush, drain=drain, in_flight=hold)
        self.gate = WorkerGate(lambda: control.serve(self.version))

    def handle(self, message: Question, owner: object, ring: Slots | None) -> Answer:
        """As any receiver; what reads weights back does so between two steps.

        A packed layer is read by running its kernel, which two threads must not do at once.
        """
        reads = isinstance(message, Digest) or (isinstance(message, Ask) and message.fingerprints != "none")
        with self._lock:
            if not reads or self.state != CLEAN:
                return super().handle(message, owner, ring)
            try:
                self._control.hold(STILL, self._wait)
            except RefitError as error:
                return self.refusal(str(error))
            try:
                return super().handle(message, owner, ring)
            finally:
                self._control.serve(self.version)


def forget_ranks(directory: Path, count: int) -> None:
    """Take away what an engine with more ranks left when it was killed: a push would look for them."""
    for path in directory.glob("rank-*"):
        number = path.name.removeprefix("rank-")
        if number.isdigit() and int(number) >= count:
            for name in (SOCKET, KEY):
                (path / name).unlink(missing_ok=True)


class SocketEngine(WeightTransferEngine):  # type: ignore[misc]
    """A `Receiver` over the worker's model, and the server that it listens with."""

    init_info_cls, update_info_cls = NoInit, NoUpdate
    mends: ClassVar[tuple[Mend, ...] | None] = None
    """What is put right around a reload; None: what this platform needs."""

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        """Raises UsageError, by name, for an engine that cannot be refitted; ConvtoolsError."""
        super().__init__(config, vllm_config, device, model)
        check_refittable(vllm_config)
        directory, rank = directory_of(vllm_config), get_world_group().rank
        tied = bool(getattr(vllm_config.model_config.hf_text_config, "tie_word_embeddings", False))
        self.applier = VllmApplier(
            model,
            vllm_config.model_config,
            wanted_of(path_of(vllm_config), tied=tied),
            tp_rank=get_tensor_model_parallel_rank(),
            tp_size=vllm_config.parallel_config.tensor_parallel_size,
            context=partial(set_current_vllm_config, vllm_config),
            mends=mends_of_platform() if self.mends is None else self.mends,
        )
        control = Control(control_directory(directory), rank)
        self.receiver = WorkerReceiver(self.applier, control, drain_of(vllm_config))
        self.receiver.origin = path_of(vllm_config)
        if rank == 0:
            forget_ranks(directory, vllm_config.parallel_config.world_size)
        # The scheduler runs no step in between; one that came all the same ends the engine.
        model.register_forward_pre_hook(self._check_still)
        self._server = Server(self.receiver, rank_directory(directory, rank))

    def _check_still(self, *_: Any) -> None:
        if self.receiver.state != CLEAN:
            raise NotServing("a step was to run while weights change")

    def init_transfer_engine(self, init_info: Any) -> None:
        """Refused."""
        raise RefitError(
            "weights come over convtools' socket, not by vLLM's calls", fix="push with WeightSync"
        )

    def start_weight_update(self) -> None:
        """Refused."""
        self.init_transfer_engine(None)

    def receive_weights(self, update_info: Any) -> None:
        """Refused."""
        self.init_transfer_engine(None)

    def finish_weight_update(self) -> None:
        """Refused."""
        self.init_transfer_engine(None)

    def shutdown(self) -> None:
        """Stop listening."""
        self._server.close()
