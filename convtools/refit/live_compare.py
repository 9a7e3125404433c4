"""A comparison of which one side, or both, is a running engine.

An engine tells the fingerprints of what it serves, under the checkpoint's names: so it is compared as a
manifest is, which was written just now. What it cannot read back it says by name, and the verdict with it.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from convtools.equality.canonical import Side, open_side
from convtools.equality.compare import compare
from convtools.equality.fingerprint import ALGORITHM, hexdigest
from convtools.equality.options import CompareOptions
from convtools.equality.verdict import Comparison
from convtools.errors import UsageError, capped, tick
from convtools.manifest import Manifest, ManifestSource, ManifestTensor, made_by
from convtools.refit.errors import RefitError
from convtools.refit.plan import Tensor
from convtools.refit.protocol import CLEAN
from convtools.refit.serving import Served, held, served, standing
from convtools.refit.sinks.base import Sink
from convtools.refit.sinks.url import Found, find, is_url
from convtools.refit.source import SideSource

ENGINE = "engine"
"""The format of a side that is one."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """One rank of an engine, and what it told."""

    sink: Sink
    told: Served
    manifest: Manifest


def compare_live(
    a: str, b: str, options: CompareOptions | None = None, *, timeout: float | None = None
) -> Comparison:
    """Compare two sets of weights, of which one at least is the URL of an engine.

    `timeout`: seconds to wait for any one answer; by default 60, and 600 for fingerprints.
    Raises UsageError for a tolerance, PeerError and RefitError where an engine does not answer, is
    changing its weights, or cannot tell what it serves; and what `compare` raises.
    """
    began = time.monotonic()
    soon, late = timeout or 60.0, timeout or 600.0
    options = options or CompareOptions()
    options.check()
    if options.tolerant or options.ignore_dtype:
        raise UsageError(
            "an engine tells fingerprints: values cannot be compared", fix="leave out the tolerance"
        )
    for text in (a, b):
        if text.startswith("file:"):
            raise UsageError(f"{tick(text)} is a directory, and no engine", fix="give its path")
    engines = [find(url, timeout=min(soon, 30.0)) if is_url(url) else None for url in (a, b)]
    sides = [
        None if engine else _opened(given, side, options)
        for engine, given, side in zip(engines, (a, b), "ab", strict=True)
    ]
    for engine, side, letter in ((engines[0], sides[1], "a"), (engines[1], sides[0], "b")):
        if engine is not None and side is not None and side.manifest is None and len(engine.sinks) == 1:
            # An engine that gives no bytes back, but digests of its own that can be computed here.
            compared = getattr(engine.sinks[0], "compared", None)
            if compared is not None:
                found_so: Comparison = compared(side, options, letter, timeout)
                return found_so
    likely = _likely(next((side for side in sides if side is not None), None), engines, soon)
    asked = [list(_ask(engine, likely, soon, late)) if engine else [] for engine in engines]
    given = [
        [(rank.manifest, rank) for rank in _distinct(ranks)] if engine else [(side, None)]
        for engine, side, ranks in zip(engines, sides, asked, strict=True)
    ]
    found = None
    for (left, rank_a), (right, rank_b) in product(*given):
        one = compare(left, right, replace(options, iteration_a=None, iteration_b=None, hf_config=None))
        one = _named(one, (a, b), (rank_a, rank_b))
        if found is None or _worse(one, found):
            found = one
    assert found is not None
    ranks = [rank for engine in asked for rank in engine]
    _still(ranks, late)
    return _weakened(found, ranks, time.monotonic() - began)


def _opened(given: str, side: str, options: CompareOptions) -> Side:
    from pathlib import Path

    config = None if options.hf_config is None else Path(options.hf_config)
    found = open_side(given, iteration=getattr(options, f"iteration_{side}"), hf_config=config)
    if config is not None and found.format not in ("torch_dist", "torch"):
        raise UsageError("--hf-config is for a Megatron side", found=found.format, fix="leave it out")
    return found


def _likely(side: Side | None, engines: list[Found | None], timeout: float) -> tuple[Tensor, ...]:
    """The tensors to ask an engine for that cannot list its own: those of the other side."""
    if side is not None:
        if side.manifest is not None:
            return tuple(Tensor(n, side.dtypes[n], tuple(s)) for n, s in side.hf.items())
        return SideSource(side).tensors()
    for engine in engines:
        for sink in engine.sinks if engine else ():
            if (found := held(sink, timeout)) is not None:
                return found
    return ()


def _ask(engine: Found, likely: tuple[Tensor, ...], soon: float, late: float) -> Iterator[_Asked]:
    """What every rank of an engine serves. Raises RefitError unless it can tell, and serves whole weights."""
    for sink in engine.sinks:
        tensors = held(sink, soon) or likely
        if not tensors:
            raise RefitError(f"{tick(sink.name)} cannot list its tensors", fix="compare it with a checkpoint")
        told = served(sink, tensors, late)
        if told.state != CLEAN:
            raise RefitError(
                f"{tick(sink.name)} is {told.state}: what it holds is no version",
                fix="wait until the push is over" if told.state == "updating" else "push all weights again",
            )
        yield _Asked(sink, told, _manifest(engine, told))


def _manifest(engine: Found, told: Served) -> Manifest:
    tensors = {
        t.name: ManifestTensor(
            t.dtype, t.shape, hashes={ALGORITHM: hexdigest(int.from_bytes(value, "little"))}
        )
        for t, value in zip(told.tensors, told.fingerprints, strict=True)
    }
    return Manifest(made_by(), tensors, ManifestSource(told.name[:4096], ENGINE))


def _distinct(ranks: list[_Asked]) -> list[_Asked]:
    """One rank of each content: usually they all hold the same."""
    kept: list[_Asked] = []
    for rank in ranks:
        if all(rank.manifest.tensors != other.manifest.tensors for other in kept):
            kept.append(rank)
    return kept


def _named(
    found: Comparison, urls: tuple[str, str], ranks: tuple[_Asked | None, _Asked | None]
) -> Comparison:
    """The same, with what the sides are."""
    changes: dict[str, Any] = {}
    for letter, url, rank in zip("ab", urls, ranks, strict=True):
        changes[letter] = url if rank is None else f"{rank.told.name} at version {rank.told.version}"
        if rank is not None:
            changes[f"{letter}_format"] = ENGINE
    return replace(found, **changes)


def _worse(one: Comparison, other: Comparison) -> bool:
    order = {True: 0, None: 1, False: 2}
    return order[one.equal] > order[other.equal]


def _still(ranks: list[_Asked], timeout: float) -> None:
    """Raise RefitError where an engine has taken other weights since it was asked."""
    for rank in ranks:
        now = standing(rank.sink, timeout, rank.told.tensors)
        if (now.version, now.state) != (rank.told.version, CLEAN):
            raise RefitError(
                f"{tick(rank.sink.name)} took other weights while it was compared",
                expected=f"version {rank.told.version}", found=f"version {now.version}, {now.state}",
                fix="compare again when nobody pushes",
            )  # fmt: skip


def _weakened(found: Comparison, ranks: list[_Asked], seconds: float) -> Comparison:
    """Say of which tensors the engine's own bytes were not compared, and by what they were."""
    why: dict[str, list[str]] = {}
    for rank in ranks:
        for name, text in rank.told.weaker.items():
            names = why.setdefault(text, [])
            if name not in names:
                names.append(name)
    notes = [f"{capped(map(tick, names), 3)}: {text}" for text, names in why.items()]
    weak = {name for names in why.values() for name in names}
    more = ""
    if weak and found.equal:
        count = f"{len(weak)} tensor{'s' * (len(weak) != 1)}"
        more = f"; of {count} the engine's own bytes cannot be read back: compared as they were received"
    return replace(found, verdict=found.verdict + more, notes=(*found.notes, *notes), seconds=seconds)


__all__ = ["ENGINE", "compare_live"]
