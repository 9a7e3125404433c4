"""Reading a model config: required and optional fields, two spellings of one thing, nested text configs."""

import reprlib
from collections.abc import Mapping
from typing import Any

from convtools.errors import ConfigError, capped

Config = Mapping[str, Any]

MISSING = object()

_SHORT = reprlib.Repr()  # a hostile value is long or deep: never all of it in a message


class Fields:
    """A config being read; collects what is missing or ill-typed, so that one error names it all."""

    def __init__(self, config: Config, where: str = "config.json") -> None:
        self.config = config
        self.where = where
        self.problems: list[str] = []

    def get(self, *names: str, default: Any = MISSING) -> Any:
        """The value under the first of `names` that is there and not null; all that are must agree."""
        given = {n: self.config[n] for n in names if self.config.get(n) is not None}
        values = list(given.values())
        if any(v != values[0] for v in values):
            spelled = ", ".join(f"{n}={_SHORT.repr(v)}" for n, v in given.items())
            self.problems.append(f"contradiction: {spelled}")
        if values:
            return values[0]
        if default is MISSING:
            self.problems.append(
                f"`{names[0]}` is missing" + (f" (also as {capped(names[1:])})" if names[1:] else "")
            )
        return None if default is MISSING else default

    def size(self, *names: str, default: Any = MISSING, least: int = 1, most: int = 2**40 - 1) -> int:
        """A whole number of at least `least` and at most `most`."""
        value = self.get(*names, default=default)
        if value is None:
            return least
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            upper = f", at most {most}" if isinstance(value, int) and value > most else ""
            self.problems.append(
                f"`{names[0]}` is {_SHORT.repr(value)}, expected a whole number of at least {least}{upper}"
            )
            return least
        return value

    def flag(self, *names: str, default: bool) -> bool:
        """True or false."""
        value = self.get(*names, default=default)
        if not isinstance(value, bool):
            self.problems.append(f"`{names[0]}` is {_SHORT.repr(value)}, expected true or false")
            return default
        return value

    def refuse(self, problem: str) -> None:
        """Note a problem."""
        self.problems.append(problem)

    def done(self) -> None:
        """Raise ConfigError with all that was noted."""
        if self.problems:
            raise ConfigError(
                f"{self.where} does not describe a model that can be converted: "
                + "; ".join(self.problems[:20]),
                where=self.where,
                fix="correct the config; a published checkpoint's own config.json has these fields",
            )
