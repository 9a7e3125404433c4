"""The parts of the vLLM target that need no vLLM: what it takes, who is whole, the scheduler's channel."""

import doctest
import json
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from convtools.errors import ConvtoolsError, UsageError
from convtools.refit.channels.local_memory import dial
from convtools.refit.errors import RefitError
from convtools.refit.plan import Tensor
from convtools.refit.vllm.checkpoint import wanted_of
from convtools.refit.vllm.control import Control, ControlServer
from convtools.refit.vllm.options import (
    SCHEDULER,
    check_refittable,
    directory_of,
    drain_of,
    engine_arguments,
)
from convtools.refit.vllm.ranks import Ranks


@pytest.mark.parametrize("name", ["options", "ranks"])
def test_examples(name: str) -> None:
    result = doctest.testmod(import_module(f"convtools.refit.vllm.{name}"))
    assert result.failed == 0 and result.attempted > 0


def test_a_rank_that_is_restored_serves_what_it_did() -> None:
    ranks = Ranks(2, 5)
    before = ranks.hold(1)
    assert before == 5 and not ranks.agree and ranks.describe() == "rank 0 at version 5, rank 1 not whole"
    ranks.restore(1, before)
    assert ranks.agree and 1 in ranks and 2 not in ranks


class Holder:
    """A scheduler that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.held = False
        self.refuses = ""

    def hold(self, rank: int, policy: str, wait: float) -> None:
        self._note("hold", rank, policy, wait)
        self.held = True

    def flush(self) -> None:
        self._note("flush")

    def serve(self, rank: int, version: int) -> None:
        self._note("serve", rank, version)
        self.held = False

    def _note(self, *what: Any) -> None:
        if self.refuses:
            raise RefitError(self.refuses)
        self.asked.append(what)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    holder = Holder()
    with ControlServer(holder, tmp_path / "engine"):
        yield holder


def test_a_worker_asks_the_scheduler(holder: Holder, tmp_path: Path) -> None:
    control = Control(tmp_path / "engine", 3)
    control.hold("keep", 2.5)
    control.flush()
    assert holder.held
    control.serve(7)
    assert holder.asked == [("hold", 3, "keep", 2.5), ("flush",), ("serve", 3, 7)] and not holder.held
    control.close()


def test_what_the_scheduler_refuses_reaches_the_worker(holder: Holder, tmp_path: Path) -> None:
    control = Control(tmp_path / "engine", 0)
    holder.refuses = "a block is still in use"
    with pytest.raises(RefitError, match="a block is still in use"):
        control.flush()
    holder.refuses = ""
    control.flush()
    control.close()


def test_an_unknown_policy_ends_the_connection(holder: Holder, tmp_path: Path) -> None:
    control = Control(tmp_path / "engine", 0, timeout=2)
    with pytest.raises(RefitError, match="scheduler does not answer"):
        control.hold("stop", 1)
    assert holder.asked == []
    control.hold("drain", 1)  # on a new connection
    control.close()


def test_a_stranger_ends_its_own_connection_only(holder: Holder, tmp_path: Path) -> None:
    stranger = dial(tmp_path / "engine", 2)
    stranger.send(b"\x81\xa4type\xa4Kill", 2)
    with pytest.raises(RefitError):
        stranger.receive(2, 1 << 16)
    stranger.close()
    control = Control(tmp_path / "engine", 0)
    control.serve(1)
    assert holder.asked == [("serve", 0, 1)]
    control.close()


def test_no_scheduler_no_push(tmp_path: Path) -> None:
    with pytest.raises(RefitError, match="vLLM's scheduler does not answer: no key of an engine"):
        Control(tmp_path / "engine", 0, timeout=1).hold("drain", 0)


def test_two_workers_at_once(holder: Holder, tmp_path: Path) -> None:
    def run(rank: int) -> None:
        control = Control(tmp_path / "engine", rank)
        for version in range(20):
            control.serve(version)
        control.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(holder.asked) == sorted(("serve", r, v) for r in range(2) for v in range(20))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {"model.embed_tokens.weight": np.zeros((8, 4), "f4"), "model.norm.weight": np.zeros(4, "f4")}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return tmp_path


def test_a_tied_head_may_come_or_not(folder: Path) -> None:
    wanted = wanted_of(str(folder), tied=True)
    own = dict(wanted.tensors)
    head = Tensor("lm_head.weight", "F32", (8, 4))
    wanted.check(own)
    wanted.check(own | {head.name: head})
    wanted.check({"model.norm.weight": own["model.norm.weight"], head.name: head})
    assert wanted.own(head.name) == "model.embed_tokens.weight"
    said = r"`lm_head.weight`: the engine holds F32 \[8, 4\], the source gives F32 \[9, 4\]"
    with pytest.raises(RefitError, match=said):
        wanted.check(own | {head.name: Tensor(head.name, "F32", (9, 4))})


def test_other_tensors_are_named(folder: Path) -> None:
    wanted = wanted_of(str(folder), tied=False)
    head = Tensor("lm_head.weight", "F32", (8, 4))
    with pytest.raises(RefitError, match=r"no tensor of that name: `lm_head\.weight`"):
        wanted.check(dict(wanted.tensors) | {head.name: head})
    with pytest.raises(RefitError, match=r"does not give: `model\.norm\.weight`"):
        wanted.check({"model.embed_tokens.weight": wanted.tensors["model.embed_tokens.weight"]})


def test_a_name_of_the_hub_is_refused() -> None:
    with pytest.raises(UsageError, match="started from a name, not from a folder"):
        wanted_of("org/name", tied=False)


def test_a_tie_to_nothing_is_refused(tmp_path: Path) -> None:
    save_file({"norm.weight": np.zeros(4, "f4")}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConvtoolsError, match="not clear to what"):
        wanted_of(str(tmp_path), tied=True)


def config(**changed: Any) -> Any:
    """As much of a `VllmConfig` as is looked at."""
    parallel = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "enable_eplb": False}
    found = {
        "parallel_config": SimpleNamespace(**parallel | changed.pop("parallel", {})),
        "scheduler_config": SimpleNamespace(scheduler_cls=SCHEDULER),
        "model_config": SimpleNamespace(is_multimodal_model=False),
        "quant_config": None, "speculative_config": None, "lora_config": None, "kv_transfer_config": None,
        "additional_config": {},
    }  # fmt: skip
    return SimpleNamespace(**found | changed)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size above 1"),
        ({"parallel": {"data_parallel_size": 2}}, "data_parallel_size above 1"),
        ({"quant_config": object(), "lora_config": object()}, "quantisation, LoRA"),
        ({"scheduler_config": SimpleNamespace(scheduler_cls=None)}, "own scheduler goes on generating"),
    ],
)
def test_what_was_never_tried_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    check_refittable(config())
    with pytest.raises(UsageError, match=named):
        check_refittable(config(**changed))


def test_where_the_sockets_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CONVTOOLS_REFIT_DIR", raising=False)
    given = engine_arguments(tmp_path)["additional_config"]
    assert directory_of(config(additional_config=given)) == tmp_path
    with pytest.raises(UsageError, match="not told where its refit sockets go"):
        directory_of(config())
    monkeypatch.setenv("CONVTOOLS_REFIT_DIR", str(tmp_path / "b"))
    assert directory_of(config()) == tmp_path / "b"


def test_how_long_requests_may_take() -> None:
    assert drain_of(config()) == 30.0
    assert drain_of(config(additional_config={"convtools_refit_drain": 5})) == 5.0
    with pytest.raises(UsageError, match="in seconds"):
        drain_of(config(additional_config={"convtools_refit_drain": "5"}))
