"""A push while requests are being answered: what becomes of them is the trainer's choice, and holds."""

from pathlib import Path
from typing import Any

import pytest

from convtools.engine.reference import MODES, ReferenceEngine
from convtools.engine.traffic import RequestAborted
from convtools.refit.errors import RefitError
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from tests.engine.checkpoints import tensors
from tests.engine.running import Running, slowed

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def push(engine: ReferenceEngine, source: Path, policy: str, version: int = 1) -> Any:
    with WeightSync(str(source), [LocalSink(engine.refit_dir)], bucket_bytes=4096, in_flight=policy) as sync:
        report = sync.push(version)
        assert sync.verify().equal
        return report


@pytest.fixture(scope="module")
def wanted(llamas: tuple[Path, Path]) -> list[Any]:
    """What engines that nobody disturbs say, under the old and the new weights."""
    out = []
    for root in llamas:
        with ReferenceEngine(root) as engine:
            out.append(engine.generate(PROMPT, max_new_tokens=60))
    assert out[0].ids != out[1].ids
    return out


@pytest.mark.parametrize("mode", MODES)
def test_drain_answers_it_all_under_the_old_weights(
    mode: str, llamas: tuple[Path, Path], wanted: list[Any]
) -> None:
    with ReferenceEngine(llamas[0], mode=mode) as engine, slowed(engine) as wait:
        request = Running(engine, PROMPT, max_new_tokens=60)
        wait(10)
        push(engine, llamas[1], "drain")
        assert request.join().answer == wanted[0]
        after = engine.generate(PROMPT, max_new_tokens=60)
        assert (after.ids, after.versions) == (wanted[1].ids, [[1] * 60])


@pytest.mark.parametrize("mode", MODES)
def test_abort_ends_it_and_says_why(mode: str, llamas: tuple[Path, Path], wanted: list[Any]) -> None:
    with ReferenceEngine(llamas[0], mode=mode) as engine, slowed(engine) as wait:
        request = Running(engine, PROMPT, max_new_tokens=2000)
        wait(10)
        assert push(engine, llamas[1], "abort").seconds < 5
        error = request.join().error
        assert isinstance(error, RequestAborted) and "takes over new weights" in str(error)
        assert engine.generate(PROMPT, max_new_tokens=60).ids == wanted[1].ids


@pytest.mark.parametrize("mode", MODES)
def test_keep_goes_on_under_the_new_weights(mode: str, llamas: tuple[Path, Path]) -> None:
    """What was read under the old ones is read again: the rest is what a fresh engine would say."""
    with ReferenceEngine(llamas[0], mode=mode) as engine, slowed(engine) as wait:
        request = Running(engine, PROMPT, max_new_tokens=100)
        wait(10)
        assert push(engine, llamas[1], "keep", 4).seconds < 5
        answer = request.join().answer
    ids, versions = answer.ids[0], answer.versions[0]
    old = versions.count(0)
    assert versions == [0] * old + [4] * (100 - old) and 10 <= old < 100
    with ReferenceEngine(llamas[0]) as first, ReferenceEngine(llamas[1]) as fresh:
        begun = first.generate(PROMPT, max_new_tokens=old)
        ended = fresh.generate(PROMPT + ids[:old], max_new_tokens=100 - old)
    assert ids == begun.ids[0] + ended.ids[0]
    assert answer.logprobs[0] == begun.logprobs[0] + ended.logprobs[0]


def test_several_prompts_of_one_request_are_kept(llamas: tuple[Path, Path]) -> None:
    prompts = [PROMPT, PROMPT[:4], PROMPT[::-1]]
    with ReferenceEngine(llamas[0]) as engine, slowed(engine) as wait:
        request = Running(engine, prompts, max_new_tokens=40)  # type: ignore[arg-type]
        wait(20)
        push(engine, llamas[1], "keep")
        answer = request.join().answer
    assert [v.count(1) for v in answer.versions][1] == 40, "its turn came after the push"
    assert all(v == sorted(v) and len(v) == 40 for v in answer.versions)
    assert answer.versions[0] == answer.versions[2] and 0 in answer.versions[0]


def test_a_push_that_is_given_up_is_not_noticed(llamas: tuple[Path, Path], wanted: list[Any]) -> None:
    """In place with an undo log: the gate closes, weights change, come back, and the request goes on."""
    import torch

    with ReferenceEngine(llamas[0], mode="in-place-undo") as engine, slowed(engine) as wait:
        source = tensors(llamas[1])
        with WeightSync(source, [LocalSink(engine.refit_dir)], bucket_bytes=4096, in_flight="keep") as sync:
            source["lm_head.weight"][-1, -1] = torch.nan
            request = Running(engine, PROMPT, max_new_tokens=60)
            wait(10)
            with pytest.raises(RefitError, match="lm_head"):
                sync.push(1)
        assert request.join().answer == wanted[0]
        assert (engine.state, engine.version) == ("clean", 0)


def test_a_request_waits_for_a_push_or_says_that_it_did(llamas: tuple[Path, Path]) -> None:
    with ReferenceEngine(llamas[0], mode="in-place-undo", wait=0.3) as engine:
        engine.receiver.gate.close(1)
        request = Running(engine, PROMPT, max_new_tokens=1).join()
        assert request.answer is None and "is taking over new weights" in str(request.error)
        request = Running(engine, PROMPT, max_new_tokens=1)
        engine.receiver.gate.open()
        assert request.join().answer is not None
