"""What a caller may hand over by mistake, refused by name before anything is made for it."""

import os
from collections.abc import Iterable, Mapping

from convtools.errors import UsageError, tick
from convtools.refit.sinks.base import Sink

SOURCES = (
    "a module, a mapping of names to tensors, a call that gives one of these, `Shards`, `RankedSource`, "
    "`Arena`, or a checkpoint's path"
)
"""What can be pushed."""


def listed_sinks(given: Iterable[Sink]) -> list[Sink]:
    """The sinks. Raises UsageError for what is no list of them."""
    if isinstance(given, str | bytes | os.PathLike):
        raise UsageError(
            "sinks are a list, and not a URL or a path", found=tick(os.fsdecode(given)),
            fix="convtools.connect(url) gives the sinks of an engine, LocalSink(directory) is one",
        )  # fmt: skip
    if _is_sink(given):
        raise UsageError("sinks are a list", found=_kind(given), fix="put the one sink into a list: [sink]")
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise UsageError("sinks are a list", found=_kind(given), fix="convtools.connect(url) gives one")
    sinks = list(given)
    for sink in sinks:
        if not _is_sink(sink):
            fix = "convtools.connect(url) gives the sinks of an engine, DirectSink(receiver) is one"
            raise UsageError("not a sink", found=_kind(sink), fix=fix)
    return sinks


def step_of(version: int) -> int:
    """A version. Raises UsageError."""
    if type(version) is not int or not 0 <= version < 1 << 62:
        raise UsageError("a version is a step of the trainer", found=repr(version))
    return version


def no_source(given: object) -> UsageError:
    """Of something that holds no weights."""
    fix = None
    if hasattr(given, "__next__") or isinstance(given, list | tuple):
        fix = "make a mapping of it, such as dict(module.named_parameters()), or give the module"
    elif _is_sink(given):
        fix = "the source comes first: WeightSync(source, sinks)"
    return UsageError("no named tensors to push", expected=SOURCES, found=_kind(given), fix=fix)


def _is_sink(given: object) -> bool:
    return all(hasattr(given, name) for name in ("connect", "send", "receive", "name"))


def _kind(given: object) -> str:
    return "None" if given is None else type(given).__name__
