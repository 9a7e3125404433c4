"""See unmended.py."""

from convtools.refit.vllm.transfer import SocketEngine


class UnmendedEngine(SocketEngine):
    """Puts nothing right."""

    mends = ()
