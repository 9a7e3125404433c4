"""The examples in the docstrings of the refit modules are true."""

import doctest
from importlib import import_module

import pytest

EXAMPLES = [
    "framing",
    "groups",
    "guard",
    "hf_places",
    "packing",
    "plan",
    "refusal",
    "sinks.sglang_names",
    "sinks.sglang_server",
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    result = doctest.testmod(import_module(f"convtools.refit.{name}"))
    assert result.failed == 0 and result.attempted > 0
