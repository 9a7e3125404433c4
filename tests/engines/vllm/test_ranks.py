"""Two tensor-parallel ranks: pushed as one, and no step runs between the commit of one and of the other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from convtools.refit.protocol import Commit, Question
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sinks.url import connect
from convtools.refit.sync import WeightSync
from tests.engines.vllm.conftest import ASKED
from tests.engines.vllm.engine import PROMPTS, Engine

pytestmark = pytest.mark.vllm
TWO = {"tensor_parallel_size": 2}
BIND = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def test_two_ranks(checkpoint: Callable[[str, str], Path], fresh: Callable[..., Any], tmp_path: Path) -> None:
    wanted = fresh("llama", "b", env=BIND, **TWO)
    directory = tmp_path / "refit"
    directory.mkdir(mode=0o700)
    seen: list[Any] = []

    class Between(LocalSink):
        """The second rank's sink: looks around before its commit."""

        def send(self, question: Question, timeout: float) -> None:
            if isinstance(question, Commit) and not seen:
                seen.append(engine.states())
                engine.ask("start", PROMPTS[:1], 16)
                seen.append(engine.ask("done", 2))
            super().send(question, timeout)

    with Engine(checkpoint("llama", "a"), directory, tmp_path / "log", env=BIND, **TWO) as engine:
        before = engine.answers(ASKED)
        sinks = [LocalSink(directory / "rank-0"), Between(directory / "rank-1")]
        with WeightSync(str(checkpoint("llama", "b")), sinks, bucket_bytes=1 << 16) as sync:
            sync.push(version=1)
            assert seen == [[("clean", 1), ("updating", 0)], None]
            found = engine.ask("done", 30)[0]
            assert (found["tokens"], found["logprobs"]) == tuple(wanted[0])
            assert engine.answers(ASKED) == wanted and engine.states() == [("clean", 1)] * 2
            assert sync.verify().equal and sync.check().ok
        with WeightSync(
            str(checkpoint("llama", "a")), connect(f"unix://{directory}"), bucket_bytes=1 << 16
        ) as sync:
            assert len(sync.push(version=2).sinks) == 2
        assert engine.answers(ASKED) == before
