"""Sinks that an abort left with a mix get back the version that they had."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from convtools.errors import ConvtoolsError, UsageError, capped, tick
from convtools.refit.fleet import Fleet
from convtools.refit.packing import Packer
from convtools.refit.plan import make_plan
from convtools.refit.protocol import POISONED
from convtools.refit.source import PushSource, open_push_source


def heal(
    fleet: Fleet,
    base: Callable[[int], Any],
    reading: Callable[[PushSource], AbstractContextManager[Packer]],
    fingerprints: bool,
) -> str:
    """Push the base version again to sinks that hold a mix; says what came of it at each."""
    said: list[str] = []
    for link in [link for link in fleet.links if link.state == POISONED]:
        try:
            source = open_push_source(base(link.version))
            if make_plan(source.tensors(), fleet.plan.bucket_bytes).digest != fleet.plan.digest:
                raise UsageError("it has other tensors than the source")
            with reading(source) as packer:
                try:
                    fleet.open(link.version, force=False, fingerprints=fingerprints, only=[link])
                    fleet.stream(packer)
                    fleet.prepare(packer.values())
                except BaseException as error:
                    fleet.abort(error)
                    raise
                fleet.commit(link.version)
        except Exception as error:  # `base` is the caller's own, and what failed first must be told
            why = error.what if isinstance(error, ConvtoolsError) else f"{type(error).__name__}: {error}"
            said.append(f"base({link.version}) could not be restored at {tick(link.name)}: {why}")
        else:
            said.append(f"base({link.version}) was restored at {tick(link.name)}")
    return capped(said)
