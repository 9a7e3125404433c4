"""Every error of convtools, one tree.

    ConvtoolsError
    ├── UsageError          the request cannot be understood or served
    │   └── ParallelError   tp/pp/ep/etp do not divide what they must divide
    ├── ConfigError         a config.json (or Megatron's args) lacks or contradicts something
    ├── CheckpointError     a file is damaged, lies about itself, or misses a part
    │   ├── UnsafePickle    a pickle refers to code that must not run
    │   └── UnsupportedEncoding   quantised or adapter weights: recognised, never read as plain numbers
    ├── MappingError        two layouts do not describe the same elements
    ├── AccountingError     a tensor is missing, left over, or differs in shape or dtype
    └── StorageError        the destination exists, is full, or could not be written

Each says what is wrong, where, what was expected, what was found, and what to do.
"""

import reprlib
from collections.abc import Iterable

_MAX_SHOWN = 160
_SHORT = reprlib.Repr()  # hostile values are deep or long: never all of them in a message
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 12


class ConvtoolsError(Exception):
    """Something a user can act on.

    `what` is one sentence; the other parts are printed on lines of their own when given.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        expected: object = None,
        found: object = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.fix = fix
        lines = [what]
        parts = (("where", where), ("expected", expected), ("found", found), ("what to do", fix))
        lines += [f"  {label}: {value}" for label, value in parts if value is not None]
        super().__init__("\n".join(lines))


class UsageError(ConvtoolsError):
    """The request cannot be understood or served as it stands."""

    exit_code = 2


class ParallelError(UsageError):
    """A parallel size does not divide what it must divide; names both numbers."""


class ConfigError(ConvtoolsError):
    """A model config lacks a field, or two of its fields contradict each other."""


class CheckpointError(ConvtoolsError):
    """A checkpoint file is damaged, lies about itself, or misses a part."""


class UnsafePickle(CheckpointError):
    """A pickle refers to code that must not run. Nothing of it was run."""


class UnsupportedEncoding(CheckpointError):
    """The tensors are quantised or are adapters: recognised, and never read as plain numbers."""


class MappingError(ConvtoolsError):
    """Two layouts do not describe the same elements."""


class AccountingError(ConvtoolsError):
    """A tensor is missing, left over, or differs from what the model's table says."""


class StorageError(ConvtoolsError):
    """The destination exists, is full, or could not be written."""


def printable(text: str, limit: int = 2000) -> str:
    r"""Text that is safe on a terminal: control characters escaped, lines cut at `limit` characters.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    lines = []
    for line in text.split("\n"):
        shown = (
            line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
        )
        lines.append(shown if len(shown) <= limit else f"{shown[:limit]}... ({len(shown) - limit} more)")
    return "\n".join(lines)


def tick(name: object) -> str:
    """`name` in backticks for a message: one line, printable, not too long.

    >>> tick("a" * 200 + chr(10))[-20:]
    'aaaaaaaaaaaaaaaa...`'
    """
    try:
        text = name if isinstance(name, str) else _SHORT.repr(name)
    except ValueError:  # Python's limit on the digits of an integer
        text = "a number of thousands of digits"
    text = text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
    return f"`{text}`" if text.isprintable() else f"`{ascii(text)[1:-1]}`"


def capped(items: Iterable[object], limit: int = 8) -> str:
    """Join `items` with commas, naming at most `limit` of them.

    >>> capped(["a", "b", "c"], limit=2)
    'a, b ... and 1 more'
    """
    listed = [str(item) for item in items]
    text = ", ".join(listed[:limit])
    return text if len(listed) <= limit else f"{text} ... and {len(listed) - limit} more"


def together(kind: type[ConvtoolsError], problems: list[str], *, fix: str | None = None) -> ConvtoolsError:
    """One error of `kind` that lists every problem found (at most 20 of them) at once."""
    shown = problems[:20] + ([f"... and {len(problems) - 20} more"] if len(problems) > 20 else [])
    head = problems[0] if len(problems) == 1 else f"{len(problems)} problems:\n  " + "\n  ".join(shown)
    return kind(head, fix=fix)
