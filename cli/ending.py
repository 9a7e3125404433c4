"""The end of a command whose exit code is an answer: it holds also where nobody hears the words.

A pipe that is closed, or a disk that is full, says nothing about the weights, and must not read as "not
equal".
"""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

import click


def finish(code: int, show: Callable[[], None]) -> NoReturn:
    """Show what there is to show, as far as anyone takes it, and exit with `code`."""
    try:
        show()
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, SystemExit) as error:  # rich exits with 1 where a pipe is closed
        silence(sys.stdout)
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            complain(f"error: the result could not be written: {error.strerror}")
    sys.exit(code)


def complain(message: str) -> None:
    """A line on stderr, where it can be written."""
    from convtools.errors import printable

    try:
        click.echo(printable(message), err=True)
    except OSError:
        silence(sys.stderr)


def silence(stream: object) -> None:
    """Let what is left in a stream that takes nothing go nowhere: the interpreter's exit would fail on it."""
    if stream is None:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())  # type: ignore[attr-defined]
    os.close(nowhere)
