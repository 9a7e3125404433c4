"""A source, opened for one pass over its tensors, and one pass at a time."""

import threading
from collections.abc import Callable
from types import TracebackType

from convtools.errors import UsageError
from convtools.refit.packing import Packer
from convtools.refit.plan import RefitPlan
from convtools.refit.source import PushSource


class Reading:
    """The pass as a context that gives what packs buckets.

    `busy` is held while it lasts, also while `before` waits for the tensors; None inside of another pass.
    """

    def __init__(
        self,
        source: PushSource,
        plan: RefitPlan,
        busy: "threading.Lock | None",
        before: Callable[[], None] | None,
        *,
        finite: bool,
        fingerprints: bool,
        checksums: bool,
    ) -> None:
        self._source, self._plan, self._busy, self._before = source, plan, busy, before
        self._finite, self._fingerprints, self._checksums = finite, fingerprints, checksums

    def __enter__(self) -> Packer:
        """Raises UsageError where another pass is under way, and what `before` and the source raise."""
        if self._busy is not None and not self._busy.acquire(blocking=False):
            raise UsageError("a push is under way", fix="one thread holds a WeightSync")
        try:
            if self._busy is not None and self._before is not None:
                self._before()
            self._source.begin()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return Packer(
            self._source, self._plan, finite=self._finite, fingerprints=self._fingerprints,
            checksums=self._checksums,
        )  # fmt: skip

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._source.end()
        finally:
            if self._busy is not None:
                self._busy.release()
