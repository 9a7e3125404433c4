"""vLLM's scheduler, with a hand on it: no step is scheduled while a rank's weights are not whole.

Named by vLLM's own option `--scheduler-cls`. All steps of an engine come from its scheduler, so this one
place keeps every rank still: also between the commits of two ranks, when one has the new weights and the
other has not. Requests that arrive meanwhile wait.
"""

import threading
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from convtools.refit.errors import RefitError
from convtools.refit.protocol import ABORT, DRAIN, KEEP
from convtools.refit.vllm.control import ControlServer
from convtools.refit.vllm.options import DRAIN as WAIT, check_refittable, control_directory, directory_of
from convtools.refit.vllm.ranks import Ranks

_PAUSE = 0.01  # seconds that a step without work waits, so that an engine that is held does not spin


class _Held:
    """Goes before a scheduler of vLLM: its methods take turns with the threads that hold it."""

    _pause_state: Any  # vLLM's

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        check_refittable(vllm_config)
        if not isinstance(getattr(self, "_pause_state", None), PauseState):
            raise RefitError("this vLLM's scheduler is paused in another way than is known here")
        self._turn = threading.Condition(threading.RLock())
        self._ranks = Ranks(vllm_config.parallel_config.world_size)
        self._steps = 0
        self._draining = 0
        self._aborted: list[Any] = []
        self._control = ControlServer(self, control_directory(directory_of(vllm_config)))

    @property
    def held(self) -> bool:
        """Whether no step runs."""
        return not self._ranks.agree

    def hold(self, rank: int, policy: str, wait: float) -> None:
        """Run no more steps for `rank`'s sake; returns when the last one is over and the policy was done.

        Raises RefitError when that takes longer than `wait`; then it is as it was.
        """
        with self._turn:
            if rank not in self._ranks:
                raise RefitError(f"there is no rank {rank} here", found=self._ranks.describe())
            # An engine that stands still already cannot drain: what waits there is computed anew later.
            first, before = self._ranks.agree, self._ranks.hold(rank)
            drain = first and policy == DRAIN
            self._draining += drain
            try:
                quiet = self._turn.wait_for(lambda: not self._steps and not (drain and self._begun()), wait)
            finally:
                self._draining -= drain
            if not quiet:
                self._ranks.restore(rank, before)
                self._turn.notify_all()
                raise RefitError(
                    f"requests were still being answered after {wait:g} s",
                    found=f"{self._begun()} requests, {self._steps} steps",
                    fix=f"allow more time ({WAIT}), or push with in_flight {ABORT!r} or {KEEP!r}",
                )
            if first and policy == ABORT:
                self._aborted += self.finish_requests(None, RequestStatus.FINISHED_ABORTED)
            elif first and policy == KEEP:  # (for a reader, they stay where they are)
                self._reset()  # they go back to the queue, and their KV is computed anew

    def flush(self) -> None:
        """Empty the KV and prefix caches. Raises RefitError where a block is still in use, or steps run."""
        with self._turn:
            if not self.held or self._steps:
                raise RefitError("caches are emptied while an engine stands still")
            if not self._reset():
                raise RefitError("vLLM did not empty its prefix cache: a block is still in use")

    def serve(self, rank: int, version: int) -> None:
        """`rank` is whole at `version`; when all are, at one version, steps run again."""
        with self._turn:
            if rank not in self._ranks:
                raise RefitError(f"there is no rank {rank} here", found=self._ranks.describe())
            self._ranks.serve(rank, version)
            self._turn.notify_all()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, or an empty step while the engine is held."""
        with self._turn:
            before = self._pause_state
            if self.held:
                pause = PauseState.PAUSED_NEW if self._draining else PauseState.PAUSED_ALL
                self._pause_state = max(before, pause)
                if pause == PauseState.PAUSED_ALL:
                    self._turn.wait(_PAUSE)
            try:
                output = super().schedule(*args, **kwargs)  # type: ignore[misc]
            finally:
                self._pause_state = before
            self._steps += output.total_num_scheduled_tokens > 0
            return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; and the clients of requests that a push ended are told."""
        with self._turn:
            outputs = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
            self._steps -= scheduler_output.total_num_scheduled_tokens > 0
            aborted, self._aborted = self._aborted, []
            for request in aborted:
                told = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
                ended = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT)
                told.outputs = [*told.outputs, ended]
            self._turn.notify_all()
            return outputs

    def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        with self._turn:
            return super().add_request(*args, **kwargs)  # type: ignore[misc]

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        with self._turn:
            return super().finish_requests(*args, **kwargs)  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        with self._turn:
            return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]

    def shutdown(self) -> None:
        """As vLLM's, and stop listening."""
        self._control.close()
        super().shutdown()  # type: ignore[misc]

    def _begun(self) -> int:
        """Requests of which something was computed, and that are not over."""
        requests = self.requests.values()  # type: ignore[attr-defined]
        waiting = sum(1 for r in requests if r.status != RequestStatus.RUNNING and r.num_output_tokens)
        return waiting + len(self.running)  # type: ignore[attr-defined]

    def _reset(self) -> bool:
        self.reset_encoder_cache()  # type: ignore[attr-defined]
        return bool(self.reset_prefix_cache(reset_running_requests=True))


class RefitScheduler(_Held, Scheduler):  # type: ignore[misc]
    """For steps one after another."""


class RefitAsyncScheduler(_Held, AsyncScheduler):  # type: ignore[misc]
    """For steps that are scheduled before the last one is over."""


def make_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """The scheduler for an engine of this configuration. Raises UsageError, RefitError."""
    is_async = vllm_config.scheduler_config.async_scheduling
    kind = RefitAsyncScheduler if is_async else RefitScheduler
    return kind(vllm_config, *args, **kwargs)
