"""A worker extension whose engine leaves vLLM's own reload as it is: the self-test must find it wrong."""

from contextlib import suppress

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from convtools.refit.vllm.extension import RefitExtension

with suppress(ValueError):
    WeightTransferEngineFactory.register_engine("unmended", "unmended_engine", "UnmendedEngine")


class Unmended(RefitExtension):
    """The same calls."""
