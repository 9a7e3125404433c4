"""Names out of hostile files, as messages show them."""

import doctest

import pytest

from convtools import errors
from convtools.stores.names import is_unicode, tick


def test_names_in_messages_are_short_and_printable() -> None:
    assert tick("model.w") == "`model.w`"
    assert tick("a\x1b[2J\nb") == "`a\\x1b[2J\\nb`"
    assert len(tick("x" * 10**6)) < 200
    assert len(tick([[0] * 10**6])) < 200


def test_the_examples_are_true() -> None:
    assert doctest.testmod(errors).failed == 0


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "`None`"),
        (["a", 1], "`['a', 1]`"),
        ("", "``"),
        ("é\u202eb", "`\\xe9\\u202eb`"),
        ("w\ud800", "`w\\ud800`"),
        pytest.param(10**5000, "`a number of thousands of digits`", id="digits"),
    ],
)
def test_values_that_are_no_plain_names(value: object, shown: str) -> None:
    assert tick(value) == shown


def test_deep_values_are_cut() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    assert tick(deep) == "`[[[[[[[...]]]]]]]`"


def test_what_utf_8_cannot_hold_is_no_name() -> None:
    assert is_unicode("é\n\U0001f600")
    assert not is_unicode("w\ud800")
    assert not is_unicode("\udcff")
