"""transformers, quiet, and never asking the network for anything; a Llama for tests that need no more."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.checkpoints import LONG, altered, make


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        transformers = pytest.importorskip("transformers")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        yield


@pytest.fixture(scope="session")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two Llamas of one shape and different numbers."""
    root = tmp_path_factory.mktemp("llamas")
    first = make(root / "a", "LlamaForCausalLM", 1, LONG)
    return first, altered(first, root / "b")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """transformers, and torch through it, warn of their own future."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for kind in ("FutureWarning", "DeprecationWarning", "UserWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}:transformers.*"))
