"""vLLM's own reload leaves stale packed weights on a CPU: the self-test says so, and tokens are wrong."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from convtools.refit.errors import RefitError
from convtools.refit.sinks.url import connect
from convtools.refit.sync import WeightSync
from tests.engines.vllm.conftest import ASKED
from tests.engines.vllm.engine import Engine

pytestmark = pytest.mark.vllm
UNMENDED = {"worker_extension_cls": "unmended.Unmended", "weight_transfer_config": {"backend": "unmended"}}


@pytest.fixture
def unmended(checkpoint: Callable[[str, str], Path], tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """`unmended(model)`: an engine started on a, and a trainer that holds b."""
    directory = tmp_path / "refit"
    directory.mkdir(mode=0o700)
    with ExitStack() as stack:

        def start(model: str) -> tuple[Engine, WeightSync]:
            engine = Engine(checkpoint(model, "a"), directory, tmp_path / "log", **UNMENDED)
            stack.enter_context(engine)
            sinks = connect(f"unix://{directory}")
            sync = WeightSync(str(checkpoint(model, "b")), sinks, bucket_bytes=1 << 16)
            return engine, stack.enter_context(sync)

        yield start


def test_a_stale_tied_head(unmended: Callable[[str], Any], fresh: Callable[..., Any]) -> None:
    """Every parameter's own bytes are right."""
    wanted = fresh("qwen3", "b")
    engine, sync = unmended("qwen3")
    stale, before = "lm_head.weight#packed", engine.digests()[0]
    sync.push(version=1)
    assert sync.verify().equal and engine.digests()[0]["lm_head.weight"] != before["lm_head.weight"]
    assert engine.answers(ASKED) != wanted and engine.digests()[0][stale] == before[stale]
    checked = sync.check()
    assert not checked.ok
    assert any(f"`{stale}` did not change" in fault for fault in checked.faults), checked.faults


def test_experts_that_were_not_packed(unmended: Callable[[str], Any]) -> None:
    engine, sync = unmended("qwen3moe")
    with pytest.raises(RefitError, match="vLLM was given tensors and holds others") as caught:
        sync.check(version=1)
    assert "`model.layers.0.mlp.experts.0.gate_proj.weight`" in str(caught.value)
    assert engine.states() == [("poisoned", 0)]
