"""The examples in the docstrings of the training modules are true."""

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize("name", ["mtp_labels", "reinforce"])
def test_examples(name: str) -> None:
    result = doctest.testmod(import_module(f"convtools.training.{name}"))
    assert result.failed == 0 and result.attempted > 0
