"""The worker extension: named by vLLM's own option, it makes the `convtools` backend known in each worker."""

from contextlib import suppress
from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from convtools.refit.vllm.options import BACKEND

# vLLM imports this module in a worker before the model is loaded, and makes the engine right after.
with suppress(ValueError):  # it is known already
    WeightTransferEngineFactory.register_engine(BACKEND, "convtools.refit.vllm.transfer", "SocketEngine")


class RefitExtension:
    """What is added to a worker: calls for `collective_rpc`, by name, that only look."""

    def refit_state(self) -> dict[str, Any]:
        """State and version of this rank, and why its last push was given up."""
        receiver = self.weight_transfer_engine.receiver  # type: ignore[attr-defined]
        return {"state": receiver.state, "version": receiver.version, "reason": receiver.reason}

    def refit_digests(self) -> dict[str, str]:
        """Digests of this rank's own parameters, packed ones included."""
        digests = self.weight_transfer_engine.applier.digests()  # type: ignore[attr-defined]
        return {name: value.hex() for name, value in digests.items()}
