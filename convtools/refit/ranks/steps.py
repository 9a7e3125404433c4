"""What the lead of several ranks says to the others, and how they all learn the same outcome."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from convtools import errors as base_errors
from convtools.errors import ConvtoolsError
from convtools.refit import errors as refit_errors
from convtools.refit.errors import FrameError, RefitError
from convtools.refit.protocol import wire_text
from convtools.refit.ranks.group import RankGroup
from convtools.refit.report import CheckReport, PushReport, VerifyReport

CALL, BEGIN, BUCKET, END, ALIVE, DONE, VALUES = range(1, 8)
"""A call begins; a pass over the source begins; a bucket is wanted; a pass is over; the lead is busy; the
call's outcome; fingerprints are wanted."""
WITH_PAYLOAD = frozenset({CALL, BEGIN, DONE})

_REPORTS: dict[str, type] = {"push": PushReport, "verify": VerifyReport, "check": CheckReport}
_T = TypeVar("_T")


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the lead was asked to do: every rank must have been asked the same."""

    what: str
    args: tuple[int | bool | str | None, ...]
    patience: float
    """Seconds in which the lead will surely say something more."""

    def __str__(self) -> str:
        return f"{self.what}({', '.join(map(str, self.args))})"


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error, told to the others."""

    kind: str
    parts: tuple[str | None, str | None, str | None, str | None, str | None]


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A report or an error."""

    what: str
    report: bytes = b""
    failure: Failure | None = None


def failure_of(error: BaseException) -> Failure:
    """An error in words."""
    if not isinstance(error, ConvtoolsError):
        error = RefitError(f"rank 0 was interrupted: {type(error).__name__}: {error}")
    said = (error.what, error.where, error.expected, error.found, error.fix)
    texts = tuple(None if part is None else wire_text(part) for part in said)
    return Failure(type(error).__name__, texts)  # type: ignore[arg-type]  # five parts


def error_of(failure: Failure) -> ConvtoolsError:
    """The same error again."""
    kind: Any = getattr(refit_errors, failure.kind, None) or getattr(base_errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, ConvtoolsError)):
        kind = RefitError
    what, where, expected, found, fix = failure.parts
    return kind(what or "", where=where, expected=expected, found=found, fix=fix)  # type: ignore[no-any-return]


def encode(message: Any) -> bytes:
    """As msgpack."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[_T]) -> _T:
    """Raises FrameError."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FrameError("what a rank said is not of the schema", found=str(error)[:200]) from None


def outcome_of(what: str, report: Any) -> Outcome:
    """A call that went well."""
    return Outcome(what, msgspec.msgpack.encode(report))


def report_of(outcome: Outcome) -> Any:
    """The report, or the error raised. Raises what the lead raised."""
    if outcome.failure is not None:
        raise error_of(outcome.failure)
    return decode(outcome.report, _REPORTS[outcome.what])


def agreed(group: RankGroup, step: Callable[[], bytes]) -> list[bytes]:
    """What a step gives on each rank. Where it fails on one, all raise the same error."""
    try:
        said = b"\0" + step()
    except ConvtoolsError as error:
        said = b"\1" + encode(failure_of(error))
    except Exception as error:  # the caller's own may raise anything: the others wait for us
        said = b"\1" + encode(failure_of(RefitError(f"{type(error).__name__}: {error}")))
    found = group.exchange(said)
    for rank, data in enumerate(found):
        if data[:1] != b"\0":
            fault = error_of(decode(data[1:], Failure))
            raise type(fault)(
                f"rank {rank}: {fault.what}",
                where=fault.where, expected=fault.expected, found=fault.found, fix=fault.fix,
            )  # fmt: skip
    return [data[1:] for data in found]
