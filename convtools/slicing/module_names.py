"""Names of modules inside a config (`quantization_config`): renumbered and cut with the layers.

An entry is a name, the beginning of one, a glob or a regular expression (`re:...`). `layers.1` is
layer 1 and never 10: numbers are compared as numbers.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from convtools.errors import ConfigError
from convtools.slicing.layers import Layers, other_stack

_MAX_PATTERN = 1 << 16
_COSTLY = re.compile(r"\)[*+{]|(?:[*+}].*){5}")
"""What can take for ever to match: a repeated group, or many open ends. The pattern comes from a file."""


def renumber_modules(
    value: Any, layers: Layers, keep: Sequence[int], names: Sequence[str], *, drop_mtp: bool = False
) -> Any:
    """A quantization config with every per-layer name in it, as key or as entry of a list, made to fit."""
    rewrite = _Rewriter(layers, keep, names, drop_mtp)

    def walk(part: Any) -> Any:
        if isinstance(part, dict):
            out: dict[str, Any] = {}
            for key, inner in part.items():
                for new in rewrite(key):
                    out[new] = walk(inner)
            return out
        if isinstance(part, list):
            made: list[Any] = []
            for entry in part:
                made += rewrite(entry) if isinstance(entry, str) else [walk(entry)]
            return made
        return part

    return walk(value)


def _compiled(entry: str) -> re.Pattern[str]:
    """The regular expression of a `re:` entry. Raises ConfigError where it is damaged or too costly."""
    try:
        if len(entry) > _MAX_PATTERN or _COSTLY.search(entry):
            raise re.error("it may take for ever to match")
        return re.compile(entry[3:])
    except re.error as error:
        raise ConfigError(
            f"`quantization_config` holds a pattern that cannot be renumbered: {error}",
            where="config.json",
            found=entry[:200],
            fix="write the modules' names in its place",
        ) from None


class _Rewriter:
    """Entry of the source -> entries of the slice: none where it spoke of layers that are gone."""

    def __init__(self, layers: Layers, keep: Sequence[int], names: Sequence[str], drop_mtp: bool) -> None:
        self._layers, self._drop_mtp = layers, drop_mtp
        self._new: dict[int, list[int]] = {}
        for new, old in enumerate(keep):
            self._new.setdefault(old, []).append(new)
        for i in range(len(layers.tail)):
            self._new[layers.count + i] = [] if drop_mtp else [len(keep) + i]
        word = layers.prefix.rstrip(".").rpartition(".")[2]
        # at the start of the entry, or behind a dot or a star; in a pattern only what ends there for certain
        start = rf"((?:^|(?<=[.*:^])){re.escape(word)}\\?\.)(\d{{1,6}})"
        self._plain = re.compile(start + r"(?=\.|$)")
        self._pattern = re.compile(start + r"(?=\\\.|\$|\.(?![*+?{]))")
        self._layered = re.compile(rf"(?:^|[.*:^]){re.escape(word)}\\?\.")
        self._modules = tuple(dict.fromkeys(name.rpartition(".")[0] for name in names))
        inside = re.compile(re.escape(layers.prefix) + r"\d+\.")
        self._outside = [name for name in self._modules if not inside.match(name)]

    def __call__(self, entry: str) -> list[str]:
        if self._drop_mtp and re.match(r"(?:re:\^?)?mtp(\\?\.|\*|$)", entry):
            return []
        found = None
        if not entry.startswith("re:"):
            found = self._plain.search(entry)
        elif not re.search(r"[|(\[]", entry):
            found = self._pattern.search(entry)
        before = re.sub(r"^re:\^?", "", entry[: found.start(2)]).replace("\\", "") if found else ""
        if other_stack(before) and not self._layers.prefix.endswith(before.lstrip(".*")):
            return [entry]
        if found:
            targets = self._new.get(int(found[2]), [])
            return [f"{entry[: found.start(2)]}{new}{entry[found.end(2) :]}" for new in targets]
        matches = self._matcher(entry)
        if matches is None:
            return [entry]
        return self._resolved(entry, matches)

    def _matcher(self, entry: str) -> Callable[[str], bool] | None:
        """How a pattern matches a module; None where it is no pattern, or not understood but of no layer."""
        if entry.startswith("re:"):
            try:
                pattern = _compiled(entry)
            except ConfigError:
                if self._layered.search(entry) or re.search(r"\d", entry):
                    raise
                return None
            return lambda name: pattern.match(name) is not None
        if any(c in entry for c in "*?["):
            return lambda name: fnmatch.fnmatchcase(name, entry)
        return None

    def _resolved(self, entry: str, matches: Callable[[str], bool]) -> list[str]:
        """The pattern as it is where it means the same of the new numbers, else the modules by name."""
        pairs = list(self._pairs())
        wanted = [new for old, new in pairs if matches(old)]
        outside = [name for name in self._outside if matches(name)]
        if wanted == [new for _, new in pairs if matches(new)]:
            gone = not wanted and not outside and any(matches(name) for name in self._modules)
            return [] if gone else [entry]
        return [*wanted, *outside]

    def _pairs(self) -> Iterable[tuple[str, str]]:
        """(module of the source, its name in the slice) of every layer that is kept."""
        prefix = self._layers.prefix
        for name in self._modules:
            if not name.startswith(prefix):
                continue
            number, _, rest = name[len(prefix) :].partition(".")
            for new in self._new.get(int(number), []) if number.isdecimal() else ():
                yield name, f"{prefix}{new}.{rest}"
