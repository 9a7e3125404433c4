"""The example of docs/refit.md runs."""

from tests.test_docs import ROOT, run


def test_the_example_runs() -> None:
    assert run(ROOT / "docs/refit.md")["report"].version == 1
