"""Names and values that came out of a file: how a message shows them, and which can be written.

They are hostile until checked: long, deep, or full of control characters that would redraw a terminal.
"""

from convtools.errors import tick

__all__ = ["is_unicode", "tick"]


def is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8; JSON escapes and file names can smuggle in what cannot."""
    return text.isprintable() or not any("\ud800" <= char <= "\udfff" for char in text)
