"""Many requests, many pushes, every policy: no answer that is not one version's, or cut where it says."""

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from convtools.engine.reference import MODES, ReferenceEngine
from convtools.engine.traffic import RequestAborted
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync

PROMPTS = [[3, 1, 4], [1, 5, 9, 2], [6, 5, 35, 8, 9]]
LENGTH = 24


@pytest.fixture(scope="module")
def wanted(llamas: tuple[Path, Path]) -> list[list[Any]]:
    """What each of the two says to each prompt."""
    out = []
    for root in llamas:
        with ReferenceEngine(root) as engine:
            out.append([engine.generate(prompt, max_new_tokens=LENGTH) for prompt in PROMPTS])
    return out


@pytest.mark.parametrize("mode", MODES)
def test_no_mix_is_ever_served(mode: str, llamas: tuple[Path, Path], wanted: list[list[Any]]) -> None:
    choice, stop = random.Random(mode), threading.Event()
    whole, aborted, cut, faults = [0], [0], list[Any](), list[str]()

    def client(which: int) -> None:
        while not stop.is_set():
            try:
                answer = engine.generate(PROMPTS[which], max_new_tokens=LENGTH)
            except RequestAborted:
                aborted[0] += 1
                continue
            ids, logprobs, versions = answer.ids[0], answer.logprobs[0], answer.versions[0]
            first = versions.count(versions[0])
            right = wanted[versions[0] % 2][which]
            if (ids[:first], logprobs[:first]) != (right.ids[0][:first], right.logprobs[0][:first]):
                faults.append(f"{versions}: {ids}")
            if versions != sorted(versions):
                faults.append(f"{versions}")
            if first == LENGTH:
                whole[0] += 1
            elif len(set(versions)) == 2:
                cut.append((which, first, answer))

    with ReferenceEngine(llamas[0], mode=mode) as engine:
        clients = [threading.Thread(target=client, args=(i,)) for i in range(len(PROMPTS))]
        for thread in clients:
            thread.start()
        try:
            for version in range(1, 25):
                policy: Any = choice.choice(["drain", "abort", "keep"])
                source = str(llamas[version % 2])
                with WeightSync(source, [LocalSink(engine.refit_dir)], in_flight=policy) as sync:
                    sync.push(version)
        finally:
            stop.set()
            for thread in clients:
                thread.join(60)
        assert (engine.version, engine.state, faults) == (24, "clean", [])
    assert whole[0] and cut and aborted[0], (whole, cut, aborted)
    for which, first, answer in cut[:8]:
        with ReferenceEngine(llamas[answer.versions[0][-1] % 2]) as fresh:
            rest = fresh.generate(PROMPTS[which] + answer.ids[0][:first], max_new_tokens=LENGTH - first)
        assert answer.ids[0][first:] == rest.ids[0]
