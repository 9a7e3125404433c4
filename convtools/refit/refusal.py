"""Errors of a push: what an engine said, in its parts, and what it means for what is served."""

from collections.abc import Sequence

from convtools.errors import ConvtoolsError, UsageError, capped, tick
from convtools.refit.errors import RefitError

_LABELS = {"  where": "where", "  expected": "expected", "  found": "found", "  what to do": "fix"}
_AGAIN = "push again"


def unfolded(text: str) -> tuple[str, dict[str, str]]:
    r"""An error's text as its sentence and its other parts, as `ConvtoolsError` takes them.

    >>> unfolded("too late\n  found: 2\n  what to do: wait")
    ('too late', {'found': '2', 'fix': 'wait'})
    """
    what: list[str] = []
    parts: dict[str, list[str]] = {}
    lines = what
    for line in text.split("\n"):
        label, colon, value = line.partition(": ")
        part = _LABELS.get(label) if colon else None
        if part is not None and part not in parts:
            lines = parts[part] = [value]
        else:
            lines.append(line)
    return "\n".join(what), {part: "\n".join(said) for part, said in parts.items()}


def refusal_of(name: str, reason: str) -> RefitError:
    """What the engine `name` answered instead."""
    what, parts = unfolded(reason)
    return RefitError(
        f"{tick(name)} refused: {what}", where=parts.get("where"), expected=parts.get("expected"),
        found=parts.get("found"), fix=parts.get("fix"),
    )  # fmt: skip


def not_pushed(version: int | None, error: ConvtoolsError, healed: str, states: str) -> ConvtoolsError:
    """The same error, with what it means for the sinks; without `version` it says that itself."""
    wrongly = isinstance(error, UsageError)  # then once more is as wrong
    kind = UsageError if wrongly else RefitError
    return kind(
        error.what if version is None else f"version {version} was not pushed: {error.what}",
        where=error.where, expected=error.expected, found=_joined(error.found, healed, f"now {states}"),
        fix=error.fix or (None if wrongly else _AGAIN),
    )  # fmt: skip


def committed_nowhere(version: int, error: RefitError, whole: bool, states: str) -> RefitError:
    """The first sink refused to; `whole`: all are as they were."""
    unchanged = ", and nothing was changed" if whole else ""
    return RefitError(
        f"version {version} was committed nowhere{unchanged}: {error.what}", where=error.where,
        expected=error.expected, found=_joined(error.found, f"now {states}"), fix=error.fix or _AGAIN,
    )  # fmt: skip


def committed_in_part(version: int, failed: Sequence[RefitError], sinks: int, states: str) -> RefitError:
    """Some of several did, or it is not known of the only one."""
    said = capped(error.what for error in failed)
    if sinks == 1:
        what = f"version {version} was prepared, and it is not known whether it was committed: {said}"
        fix = "push again: that ends it either way"
        return RefitError(what, found=_joined(failed[0].found, f"now {states}"), fix=fix)
    return RefitError(
        f"version {version} was prepared everywhere and not committed everywhere",
        found=f"{said}; now {states}", fix="each sink serves one whole version or none; push again",
    )  # fmt: skip


def _joined(*parts: object) -> str:
    return "; ".join(str(part) for part in parts if part)
