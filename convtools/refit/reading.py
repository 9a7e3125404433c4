"""A source, opened for one pass over its tensors, and one pass at a time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from convtools.errors import ConvtoolsError, UsageError
from convtools.refit.packing import Packer
from convtools.refit.plan import RefitPlan
from convtools.refit.source import PushSource


@contextmanager
def reading(
    source: PushSource,
    plan: RefitPlan,
    busy: "threading.Lock | None",
    before: Callable[[], None] | None,
    *,
    finite: bool,
    fingerprints: bool,
    checksums: bool,
    packs: Callable[..., Packer] = Packer,
    refused: Callable[[ConvtoolsError], ConvtoolsError] | None = None,
) -> Iterator[Packer]:
    """Gives what packs buckets, made by `packs`.

    `busy` is held while it lasts, also while `before` waits for the tensors; None inside of another pass.
    Raises UsageError where another pass is under way, and what `before` and the source raise, or what
    `refused` makes of that.
    """
    # The lock's own `with`: Ctrl-C between any two steps of ours must not leave it taken.
    with nullcontext() if busy is None else _free(busy):
        try:
            try:
                if busy is not None and before is not None:
                    before()
                source.begin()
            except ConvtoolsError as error:
                if refused is None:
                    raise
                raise refused(error) from error
            yield packs(source, plan, finite=finite, fingerprints=fingerprints, checksums=checksums)
        finally:
            source.end()


def _free(busy: "threading.Lock") -> "threading.Lock":
    if busy.locked():
        raise UsageError("a push is under way", fix="one thread holds a WeightSync")
    return busy
