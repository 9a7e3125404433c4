import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found; they learn the same as one process that is given both ranks' batches."""
    meet = tmp_path_factory.mktemp("ranks") / "meet"
    environment = os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "tests/training/two_ranks.py"]
    started = [
        subprocess.Popen([*command, str(rank), f"file://{meet}"], cwd=ROOT, env=environment)
        for rank in range(2)
    ]
    try:
        assert [process.wait(200) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [json.loads(meet.with_name(f"meet.{rank}").read_text()) for rank in range(2)]


def test_the_norm_is_that_of_the_whole_gradient(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["norms"] == ranks[1]["norms"] and len(ranks[0]["norms"]) == 3
    assert ranks[0]["norms"] == pytest.approx(ranks[0]["expected_norms"], rel=1e-4)
    assert ranks[0]["norms"][0] > 1.0  # so that it was clipped


def test_replicas_count_once(ranks: list[dict[str, Any]]) -> None:
    """On a mesh with a dim of replicas, as on one without."""
    for rank in ranks:
        assert rank["by_ranks"] == pytest.approx([rank["expected_norms"][0]] * 2, rel=1e-4)


def test_two_ranks_learn_what_one_process_learns(ranks: list[dict[str, Any]]) -> None:
    assert [r["apart"] < 1e-5 for r in ranks] == [True, True]


def test_checkpoint_tensors_are_dtensors_over_the_ranks_own_memory(ranks: list[dict[str, Any]]) -> None:
    bias = "mixer.gate.e_score_correction_bias"
    for rank in ranks:
        assert rank["copied"] == []
        assert rank["plain"] == [f"backbone.layers.1.{bias}", f"mtp.layers.1.{bias}", f"mtp.layers.3.{bias}"]


def test_a_nan_of_one_rank_is_refused_on_both(ranks: list[dict[str, Any]]) -> None:
    assert [r["refused"] for r in ranks] == ["the gradient is not finite; the weights are unchanged"] * 2


def test_experts_cut_by_expert_are_refused(ranks: list[dict[str, Any]]) -> None:
    what = "the experts of `model.layers.1.mixer.experts.up_proj` are cut across ranks where"
    assert [r["by_expert"].startswith(what) for r in ranks] == [True, True]


def test_parameters_that_nobody_would_average_are_refused(ranks: list[dict[str, Any]]) -> None:
    what = "parameters that are not distributed as the others are: `extra.weight`, `extra.bias`"
    assert [r["mixed"] for r in ranks] == [what] * 2
