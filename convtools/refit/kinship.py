"""Whether a checkpoint is of the model that an engine serves, where both config.json are at hand.

Two architectures may have tensors of the same names and shapes: a push would then succeed, and mean nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convtools.equality.canonical import Side
from convtools.errors import ConvtoolsError, UsageError, capped, tick
from convtools.refit.serving import origin
from convtools.refit.sinks.url import Found
from convtools.stores.json_file import read_json

_LARGEST = 16 << 20


def refuse_other_model(side: Side, engines: Sequence[Found], timeout: float) -> None:
    """Raise UsageError where an engine was plainly started from another architecture than `side`'s.

    That is so where both what transformers calls the class and the type of the model differ; anything less
    may be the same model under another name. Raises RefitError where an engine does not answer.
    """
    ours = side.config
    for found in engines:
        for sink in found.sinks[:1]:
            given = found.started_from or origin(sink, timeout)
            theirs = _config(given)
            if differ(ours, theirs):
                raise UsageError(
                    f"{side.name} is another architecture than what {found.url} serves",
                    expected=f"{_said(theirs)}, which it was started from at {given}", found=_said(ours),
                    fix="push a checkpoint of that model; --force pushes this one all the same",
                )  # fmt: skip


def differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two config.json name two architectures; not where one says nothing.

    >>> differ({"architectures": ["A"], "model_type": "a"}, {"architectures": ["B"], "model_type": "b"})
    True
    >>> differ({"architectures": ["A"], "model_type": "a"}, {"architectures": ["B"], "model_type": "a"})
    False
    """
    return all(
        ours and theirs and not ours & theirs
        for ours, theirs in ((_classes(one), _classes(other)), (_types(one), _types(other)))
    )


def _classes(config: Mapping[str, Any]) -> set[str]:
    named = config.get("architectures")
    return {n for n in named if isinstance(n, str)} if isinstance(named, list) else set()


def _types(config: Mapping[str, Any]) -> set[str]:
    """Of the model, and of the language model in it."""
    inner = config.get("text_config")
    found = (part.get("model_type") for part in (config, inner) if isinstance(part, Mapping))
    return {t for t in found if isinstance(t, str)}


def _config(given: str | None) -> Mapping[str, Any]:
    """That of a folder on this machine; empty where there is none to be read."""
    path = None if given is None else Path(given) / "config.json"
    try:
        if path is None or not path.is_absolute() or not path.is_file():
            return {}
        return read_json(path, _LARGEST, constants=True)[1]
    except (ConvtoolsError, OSError):
        return {}


def _said(config: Mapping[str, Any]) -> str:
    return capped(map(tick, sorted(_classes(config))), 3)


__all__ = ["differ", "refuse_other_model"]
