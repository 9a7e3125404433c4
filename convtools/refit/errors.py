"""What a refit may fail of."""

from typing import Any

from convtools.errors import ConvtoolsError


class RefitError(ConvtoolsError):
    """A push was refused, or failed; it says in which state the engine is left."""


class FrameError(RefitError):
    """What arrived is no frame of this connection: damaged, replayed, oversized, or against the schema."""


class PeerError(RefitError):
    """The peer is not who it must be, did not answer in time, or has gone."""


class NotServing(RefitError):
    """The engine is taking over new weights, or may hold a mix of two versions: it answers nothing now."""

    def __init__(self, what: str, *, poisoned: bool = False, **parts: Any) -> None:
        super().__init__(what, **parts)
        self.poisoned = poisoned
        """Whether waiting does not help: nothing is served until somebody pushes all weights."""
