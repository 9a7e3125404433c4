"""What docs/training.md says of labels is true."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/training.md"


def test_the_page_runs() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.failed == 0 and result.attempted == 5
