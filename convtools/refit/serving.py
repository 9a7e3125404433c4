"""What an engine serves, asked without changing it: its tensors, its version, their fingerprints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from convtools.errors import tick
from convtools.refit.bucket import Ring
from convtools.refit.errors import RefitError
from convtools.refit.link import Link
from convtools.refit.plan import ALIGN, Tensor, make_plan
from convtools.refit.protocol import Answer, Ask, List, Listed, Question, Refused, Told
from convtools.refit.sinks.base import Sink

_BUCKET, _LARGEST = 1 << 20, 64 << 20
_MOST_BUCKETS = 1 << 19


@dataclass(frozen=True, slots=True)
class Served:
    """An engine's weights as it told of them."""

    name: str
    state: str
    """clean, updating or poisoned."""
    version: int
    tensors: tuple[Tensor, ...]
    fingerprints: tuple[bytes, ...]
    """One a tensor; none where they were not asked for."""
    weaker: dict[str, str]
    """Tensor -> why its fingerprint is that of the bytes as they came, and not of the engine's own."""


def origin(sink: Sink, timeout: float) -> str | None:
    """The checkpoint that an engine says it was started from; None where it does not. Raises RefitError."""
    inquire: Callable[[Question, float], Answer] | None = getattr(sink, "inquire", None)
    answer = inquire(List(), timeout) if inquire is not None else None
    return answer.origin or None if isinstance(answer, Listed) and answer.origin.isprintable() else None


def held(sink: Sink, timeout: float) -> tuple[Tensor, ...] | None:
    """The tensors that an engine takes; None where it cannot list them. Raises RefitError."""
    inquire: Callable[[Question, float], Answer] | None = getattr(sink, "inquire", None)
    if inquire is None:
        return None
    answer = inquire(List(), timeout)
    if isinstance(answer, Refused):
        return None
    if not isinstance(answer, Listed):
        raise RefitError(f"{tick(sink.name)} answered something else", found=type(answer).__name__)
    return tuple(Tensor(t.name, t.dtype, t.shape) for t in answer.tensors)


def standing(sink: Sink, timeout: float, tensors: Sequence[Tensor] = ()) -> Served:
    """State and version alone; some engines say so only when they know for which `tensors`.

    Raises RefitError.
    """
    inquire: Callable[[Question, float], Answer] | None = getattr(sink, "inquire", None)
    if inquire is None:
        return served(sink, tensors, timeout, fingerprints=False)
    answer = inquire(Ask(), timeout)
    if not isinstance(answer, Told):
        why = answer.reason if isinstance(answer, Refused) else type(answer).__name__
        raise RefitError(f"{tick(sink.name)} does not say where it stands: {why}")
    return Served(sink.name, answer.state, answer.version, (), (), {})


def served(sink: Sink, tensors: Sequence[Tensor], timeout: float, *, fingerprints: bool = True) -> Served:
    """Where an engine stands, with the fingerprints of `tensors` as it serves them.

    Raises RefitError where it does not answer, takes other tensors, or cannot say.
    """
    plan = make_plan(tensors, _bucket_bytes(tensors))
    with Ring(plan.bucket_bytes, 2) as ring:
        link = Link(sink)
        try:
            link.refresh(plan, ring, timeout, True)
            told = link.ask(Ask("serves" if fingerprints else "none"), Told, timeout)
        finally:
            link.drop()
    if fingerprints and len(told.fingerprints) != len(plan.tensors):
        raise RefitError(
            f"{tick(sink.name)} told of other tensors",
            expected=len(plan.tensors),
            found=len(told.fingerprints),
        )
    if any(row.tensor >= len(plan.tensors) for row in told.weaker):
        raise RefitError(f"{tick(sink.name)} told of a tensor that it was not asked for")
    return Served(
        sink.name, told.state, told.version, plan.tensors, tuple(told.fingerprints),
        {plan.tensors[row.tensor].name: row.why for row in told.weaker},
    )  # fmt: skip


def _bucket_bytes(tensors: Sequence[Tensor]) -> int:
    """Small, for nothing is sent, but enough for a large model; an engine may list anything."""
    least = sum(t.nbytes for t in tensors) // _MOST_BUCKETS
    return min(max(_BUCKET, -(-least // ALIGN) * ALIGN), _LARGEST)
