"""What a refit may fail of."""

from convtools.errors import ConvtoolsError


class RefitError(ConvtoolsError):
    """A push was refused, or failed; it says in which state the engine is left."""


class FrameError(RefitError):
    """What arrived is no frame of this connection: damaged, replayed, oversized, or against the schema."""


class PeerError(RefitError):
    """The peer is not who it must be, did not answer in time, or has gone."""


class NotServing(RefitError):
    """The engine may hold a mix of two versions, or is taking one over: it answers nothing now."""
