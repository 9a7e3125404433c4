"""Names and values that came out of a file: how a message shows them, and which can be written.

They are hostile until checked: long, deep, or full of control characters that would redraw a terminal.
"""

import reprlib

_MAX_SHOWN = 160
_SHORT = reprlib.Repr()  # hostile values are deep or long: never all of them in a message
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 12


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


def is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8; JSON escapes and file names can smuggle in what cannot."""
    return text.isprintable() or not any("\ud800" <= char <= "\udfff" for char in text)
