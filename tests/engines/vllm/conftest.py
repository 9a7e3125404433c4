"""Engines are slow to start: each is started once, and what a fresh one answers is kept."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.checkpoints import save
from tests.engines.vllm.engine import PROMPTS, Engine, venv

LONG = [1, *[(11 * i) % 300 + 4 for i in range(400)]]
"""A prompt that fills blocks of the prefix cache."""
ASKED = [*PROMPTS, LONG]
KERNELS = {"worker_extension_cls": "nemotron_extension.NemotronExtension", "enable_prefix_caching": False}
"""For Nemotron-H; its kernels for tests keep no states amid a prompt, which a cache would need."""


@pytest.fixture(scope="session", autouse=True)
def vllm_is_there() -> None:
    """Skip, and say so, where vLLM is not installed."""
    if not (venv() / "bin" / "python").is_file():
        pytest.skip(f"NO vLLM IN {venv()}: engines/vllm/install.sh {venv()}")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`checkpoint(model, "a" or "b")`: its folder."""
    root, made = tmp_path_factory.mktemp("models"), dict[tuple[str, str], Path]()

    def get(model: str, which: str) -> Path:
        if (model, which) not in made:
            made[model, which] = save(model, ord(which), root / f"{model}-{which}")
        return made[model, which]

    return get


@pytest.fixture(scope="session")
def fresh(
    checkpoint: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """`fresh(model, which)`: what an engine without any of ours answers to `ASKED`, started on it."""
    found: dict[Any, Any] = {}
    logs = tmp_path_factory.mktemp("fresh")

    def get(model: str, which: str, env: dict[str, str] | None = None, **options: Any) -> Any:
        key = (model, which, *sorted(options.items()))
        if key not in found:
            shim = model == "nemotronh"
            with Engine(
                checkpoint(model, which), None, logs / f"{len(found)}.log", shim, env,
                **(KERNELS if shim else {}), **options,
            ) as engine:  # fmt: skip
                found[key] = engine.answers(ASKED)
        return found[key]

    return get


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the sockets of an engine."""
    where = tmp_path_factory.mktemp("refit")
    os.chmod(where, 0o700)
    return where
