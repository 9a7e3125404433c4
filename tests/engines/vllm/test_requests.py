"""Requests while weights change: none is answered by a mix, nor by a cache of old weights."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from convtools.refit.errors import RefitError
from convtools.refit.sinks.url import connect
from convtools.refit.sync import WeightSync
from tests.engines.vllm.conftest import ASKED, LONG
from tests.engines.vllm.engine import PROMPTS, REPO, Engine

pytestmark = pytest.mark.vllm
PROMPT, MANY = PROMPTS[0], 1200
TRAINER = Path(__file__).with_name("dying_trainer.py")


@pytest.fixture(scope="module")
def engine(
    checkpoint: Callable[[str, str], Path], fresh: Callable[..., Any], directory: Path, tmp_path_factory: Any
) -> Iterator[Engine]:
    fresh("llama", "b")  # before: one engine at a time
    log = tmp_path_factory.mktemp("log") / "log"
    with Engine(checkpoint("llama", "a"), directory, log) as running:
        yield running


@pytest.fixture
def push(checkpoint: Callable[[str, str], Path], directory: Path, engine: Engine) -> Callable[..., Any]:
    def run(which: str, **how: Any) -> Any:
        sinks = connect(f"unix://{directory}")
        with WeightSync(str(checkpoint("llama", which)), sinks, bucket_bytes=1 << 16, **how) as sync:
            return sync.push(engine.states()[0][1] + 1)

    return run


def test_the_prefix_cache_is_emptied(
    engine: Engine, push: Callable[..., Any], fresh: Callable[..., Any]
) -> None:
    push("a")
    assert [engine.ask("generate", [LONG], 4)[0]["cached"] for _ in range(2)] == [0, 384]
    push("b")
    found = engine.ask("generate", [LONG], 16)[0]
    assert found["cached"] == 0
    assert (found["tokens"], found["logprobs"]) == tuple(fresh("llama", "b")[ASKED.index(LONG)])


def test_a_push_may_leave_the_cache_and_says_so(engine: Engine, push: Callable[..., Any]) -> None:
    push("a")
    engine.ask("generate", [LONG], 4)
    report = push("b", flush=False)
    assert report.sinks[0].flushed is False and "flush" in report.unchecked
    assert engine.ask("generate", [LONG], 4)[0]["cached"] == 384


def test_drain(engine: Engine, push: Callable[..., Any], fresh: Callable[..., Any]) -> None:
    push("a")
    wanted = engine.ask("generate", [PROMPT], 300)[0]["tokens"]
    engine.ask("start", [PROMPT], 300)
    push("b", in_flight="drain")
    found = engine.ask("done", 0.5)[0]
    assert found["tokens"] == wanted and found["reason"] == "length"
    assert engine.answers(ASKED) == fresh("llama", "b")


@pytest.fixture
def met(checkpoint: Callable[[str, str], Path], directory: Path, engine: Engine) -> Callable[..., Any]:
    def run(policy: str, old: list[int]) -> list[dict[str, Any]]:
        """What becomes of a long request that a push of other weights meets; it may be over too soon."""
        seen = []
        with ExitStack() as opened:
            a, b = (  # connected before, so that the push begins at once
                opened.enter_context(
                    WeightSync(
                        str(checkpoint("llama", which)), connect(f"unix://{directory}"),
                        bucket_bytes=1 << 16, in_flight=policy,  # type: ignore[arg-type]
                    )
                )
                for which in "ab"
            )  # fmt: skip
            b.push(engine.states()[0][1] + 1)
            for wait in (0.3, 0.2, 0.1, 0.4, 0.05, 0.02, 0.6, 0.3):
                version = engine.states()[0][1] + 1
                a.push(version, force=True)
                engine.ask("start", [PROMPT], MANY)
                if engine.ask("done", wait) is not None:
                    seen.append((wait, "over"))
                    continue
                b.push(version + 1, force=True)
                found: list[dict[str, Any]] = engine.ask("done", 60)
                tokens = found[0]["tokens"]
                at = len(tokens) if policy == "abort" else switch(old, tokens)
                if 0 < at < MANY - 32:
                    return found
                seen.append((wait, f"from token {at} on"))
        pytest.fail(f"no push met the request while it was answered: {seen}")

    return run


def switch(old: list[int], tokens: list[int]) -> int:
    """From which token on they are not what the old weights said."""
    return next((i for i, (x, y) in enumerate(zip(old, tokens, strict=True)) if x != y), MANY)


def test_abort(engine: Engine, met: Callable[..., Any], fresh: Callable[..., Any]) -> None:
    found = met("abort", [])[0]
    assert found["reason"] == "abort" and 0 < len(found["tokens"]) < MANY
    assert engine.answers(ASKED) == fresh("llama", "b")


def test_keep(engine: Engine, push: Callable[..., Any], met: Callable[..., Any]) -> None:
    """The request goes on under the new weights, as if they had computed all of it."""
    push("a")
    old = engine.ask("generate", [PROMPT], MANY)[0]["tokens"]
    found = met("keep", old)[0]
    assert found["reason"] == "length" and len(found["tokens"]) == MANY
    switched = switch(old, found["tokens"])
    again = engine.ask("generate", [PROMPT + found["tokens"][:switched]], 32)[0]["tokens"]
    assert again == found["tokens"][switched : switched + 32]


def test_a_trainer_that_dies(
    engine: Engine, push: Callable[..., Any], fresh: Callable[..., Any], checkpoint: Any, directory: Path
) -> None:
    push("a")
    version = engine.states()[0][1]
    command = [sys.executable, str(TRAINER), str(checkpoint("llama", "b")), str(directory), str(version + 1)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(REPO)}
    ) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "in the middle\n"
        assert engine.states() == [("updating", version)]
        trainer.send_signal(signal.SIGKILL)
    for _ in range(50):
        if engine.states() == [("poisoned", version)]:
            break
    assert engine.states() == [("poisoned", version)]
    engine.ask("start", [PROMPT], 16)
    assert engine.ask("done", 3) is None  # it does not answer
    with WeightSync(
        str(checkpoint("llama", "b")), connect(f"unix://{directory}"), bucket_bytes=1 << 16
    ) as sync:
        sync.push(version + 1)
    found = engine.ask("done", 30)[0]
    assert (found["tokens"], found["logprobs"]) == tuple(fresh("llama", "b")[0])
    assert engine.states() == [("clean", version + 1)] and engine.answers(ASKED) == fresh("llama", "b")


def test_another_model_is_refused_and_nothing_is_touched(
    engine: Engine, push: Callable[..., Any], fresh: Callable[..., Any], checkpoint: Any, directory: Path
) -> None:
    push("b")
    version = engine.states()[0][1]
    sinks = connect(f"unix://{directory}")
    with (
        WeightSync(str(checkpoint("qwen3", "a")), sinks, bucket_bytes=1 << 16) as sync,
        pytest.raises(RefitError, match=re.escape("the engine has other tensors")),
    ):
        sync.push(version + 1)
    assert engine.states() == [("clean", version)] and engine.answers(ASKED) == fresh("llama", "b")
