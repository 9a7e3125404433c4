"""What every test shares: a place to publish, repeatable Hypothesis, and who may skip."""

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

IN_CI = bool(os.environ.get("CI"))

settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, database=None)
settings.load_profile("ci" if IN_CI else "dev")


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    """Where a test publishes: absent, in a directory of its own."""
    return tmp_path / "out"


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Skip what cannot run here, and say why. In CI nothing but a missing GPU is an excuse."""
    has_gpu: bool | None = None
    for item in items:
        if item.get_closest_marker("gpu"):
            has_gpu = _has_gpu() if has_gpu is None else has_gpu
            if not has_gpu:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("oracle") and not IN_CI and not importlib.util.find_spec("megatron"):
            item.add_marker(
                pytest.mark.skip(reason="megatron-core is not installed: pip install -e '.[megatron]'")
            )


def _has_gpu() -> bool:
    if not importlib.util.find_spec("torch"):
        return False
    import torch

    return torch.cuda.is_available()
