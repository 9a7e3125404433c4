"""The examples in the docstrings of the layout modules are true."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import convtools.layout as layout

MODULES = sorted(f"convtools.layout.{p.stem}" for p in Path(layout.__file__).parent.glob("[a-z]*.py"))
WITH_EXAMPLES = {"convtools.layout." + m for m in ("parallel", "piece", "plan", "region", "view")}


def test_the_modules_are_found() -> None:
    assert set(MODULES) >= {*WITH_EXAMPLES, "convtools.layout.cover", "convtools.layout.mapping"}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(import_module(name))
    assert result.failed == 0
    assert result.attempted > 0 or name not in WITH_EXAMPLES
