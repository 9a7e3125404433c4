"""Ranks that lie about what they hold, and engine ranks that must not be left at two versions."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file

from convtools.equality.compare import compare
from convtools.equality.live import Shards
from convtools.errors import AccountingError, ConvtoolsError
from convtools.layout.parallel import ParallelLayout, Rank, even_stages
from convtools.layout.region import Region
from convtools.refit.applier import ShadowApplier
from convtools.refit.channels.local_memory import Server
from convtools.refit.errors import FrameError, RefitError
from convtools.refit.ranks.holdings import (
    HeldRow,
    Holdings,
    MegatronPlace,
    cut_holdings,
    decode_holdings,
    encode_holdings,
    megatron_holdings,
    merge,
)
from convtools.refit.ranks.shard_end import ShardTarget
from convtools.refit.ranks.shard_plan import shard_plans
from convtools.refit.ranks.shard_sync import ShardSync
from convtools.refit.ranks.source import RankedSource
from convtools.refit.receiver import Receiver
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from convtools.refit.weights import TensorWeights
from tests.refit.ranks.worlds import run

CASE = Path(__file__).parents[3] / "fixtures/oracle/deepseek_v3"


@pytest.mark.parametrize(
    "row",
    [
        HeldRow("w", "F32", (4, 4), (0,), (4, 4)),
        HeldRow("w", "F32", (4, 4), (0, 0), (4,)),
        HeldRow("w", "F32", (4,), (0, 0), (4, 4)),
        HeldRow("w", "F32", (), (0,), ()),
        HeldRow("w", "F32", (4, 4)),
    ],
)
def test_a_region_has_the_dims_of_its_tensor(row: HeldRow) -> None:
    with pytest.raises(FrameError, match="`w`"):
        decode_holdings(encode_holdings(Holdings([row])))


def one_engine_refuses(rank: int, who: int) -> Any:
    import torch
    import torch.distributed as dist

    trainers = dist.new_group([0])
    half = torch.zeros(4, 6)
    if rank:
        cut = {"w": ("F32", (8, 6), Region((4 * rank - 4, 0), (4, 6)))}
        faults = [rank == who]

        def flush() -> None:
            if faults[0] and half.max() == 2:
                faults[0] = False
                raise ValueError("no cache could be emptied")

        receiver = Receiver(ShadowApplier(TensorWeights({"w": half})), flush=flush)
        ShardTarget(receiver, cut_holdings(cut), timeout=10).serve()
        return receiver.version, half.unique().tolist()
    trained = {"w": torch.full((8, 6), 1.0)}
    sync = ShardSync(RankedSource(trained, group=trainers, timeout=10), timeout=10)
    sync.push(1)
    trained["w"].fill_(2)
    try:
        sync.push(2)
    except ConvtoolsError as error:
        said = str(error)
    states = [(link.state, link.version) for link in sync._links]
    trained["w"].fill_(3)
    sync.push(3)
    equal = sync.verify().equal
    sync.close()
    return said, states, equal


@pytest.mark.parametrize("who", [1, 2])
def test_where_the_first_engine_rank_cannot_commit_none_does(who: int, tmp_path: Path) -> None:
    (said, states, equal), *engines = run(3, one_engine_refuses, who, where=tmp_path)
    assert "no cache could be emptied" in said and equal
    if who == 1:
        assert states == [("clean", 1), ("clean", 1)], "ranks of one engine at two versions are a mix"
    else:
        assert states == [("clean", 2), ("clean", 1)] and "not committed everywhere" in said
    assert engines == [(3, [3.0])] * 2


def megatron(layout: dict[str, Any], places: list[tuple[int, int, int, int]]) -> list[Holdings]:
    text = json.dumps(layout).encode()
    return [Holdings([HeldRow("x", "F32", (4,))], place, text, b"{}") for place in places]


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 1, "pp": 1, "ep": 1, "etp": 1, "stages": [[0]], "vpp": 1 << 40},
        {"tp": 1, "pp": 1 << 40, "ep": 1, "etp": 1, "stages": [[0]]},
        {"tp": 1, "pp": 1 << 20, "ep": 1, "etp": 1, "stages": [[0]], "vpp": 1 << 20},
    ],
)
def test_a_layout_of_more_stages_than_it_lists(layout: dict[str, Any]) -> None:
    with pytest.raises(FrameError, match="stages"):
        merge(megatron(layout, [(0, 0, 0, 0)]))


@pytest.mark.parametrize("axis", ["tp", "ep", "etp"])
def test_a_layout_of_ranks_that_nobody_could_count(axis: str) -> None:
    layout = {"tp": 1, "pp": 1, "ep": 1, "etp": 1, "stages": [[0]]} | {axis: 1 << 40}
    with pytest.raises(AccountingError, match="no tensors of rank"):
        merge(megatron(layout, [(0, 0, 0, 0)]))


def test_a_rank_that_the_layout_does_not_have_is_not_passed_over() -> None:
    config = json.loads((CASE / "hf/config.json").read_text())
    layout = ParallelLayout(2, 1, 1, 2, even_stages(3, 1))
    ranks = [Rank(0, 0, 0, 0), Rank(1, 0, 0, 1), Rank(1, 0, 1, 1)]
    held = {rank: load_file(CASE / f"tp2pp1ep1/state_dict/tp{rank.tp}_pp0_ep0.safetensors") for rank in ranks}
    with pytest.raises(AccountingError, match=r"the layout has no rank \(1, 0, 1, 1\)"):
        merge([megatron_holdings([held[r]], MegatronPlace(layout, r, config)) for r in ranks])
    with pytest.raises(AccountingError, match=r"the layout has no rank \(1, 0, 1, 1\)"):
        compare(CASE / "hf", Shards(held, layout, config))


def two_ranks() -> list[Holdings]:
    config = json.loads((CASE / "hf/config.json").read_text())
    layout = ParallelLayout(2, 1, 1, 2, even_stages(3, 1))
    held = [load_file(CASE / f"tp2pp1ep1/state_dict/tp{r}_pp0_ep0.safetensors") for r in (0, 1)]
    return [megatron_holdings([held[r]], MegatronPlace(layout, Rank(r, 0, 0, r), config)) for r in (0, 1)]


@pytest.mark.parametrize("config", [b"", b"\xff", b"null", b"[1]", b"[" * 100_000, b'"x"', b"5"])
def test_a_config_that_is_none(config: bytes) -> None:
    lies = [replace(one, config=config) for one in two_ranks()]
    with pytest.raises(FrameError, match="config"):
        merge(lies)
    with pytest.raises(ConvtoolsError):
        shard_plans(merge(two_ranks()), lies, 256)


def test_a_tensor_that_a_rank_lists_twice() -> None:
    one, _ = two_ranks()
    with pytest.raises(FrameError, match="is there twice"):
        decode_holdings(encode_holdings(replace(one, rows=[*one.rows, one.rows[3]])))


@pytest.mark.parametrize("rank", [0, 1])
def test_replicas_of_two_dtypes_of_one_width(rank: int) -> None:
    ranks = two_ranks()
    norm = "decoder.layers.1.self_attention.linear_q_up_proj.layer_norm_weight"
    rows = [replace(row, dtype="F16") if row.name == norm else row for row in ranks[rank].rows]
    ranks[rank] = replace(ranks[rank], rows=rows)
    with pytest.raises(RefitError, match=f"different dtypes\n.*`{norm}`"):
        merge(ranks)


@pytest.mark.parametrize("shape", [(), (0, 64), (1, 64)])
def test_an_embedding_that_is_none(shape: tuple[int, ...]) -> None:
    rows = [
        replace(row, shape=shape) if row.name == "embedding.word_embeddings.weight" else row
        for row in two_ranks()[0].rows
    ]
    lies = [replace(one, rows=rows) for one in two_ranks()]
    for act in (lambda: merge(lies), lambda: shard_plans(merge(two_ranks()), lies, 256)):
        with pytest.raises(ConvtoolsError):
            act()


def stalls(rank: int, directory: str) -> Any:
    import torch

    sinks = [LocalSink(directory, "engine")] if rank == 0 else []
    sync = WeightSync(
        RankedSource({"w": torch.ones(9)}, timeout=2), sinks, timeout=2,
        before_read=lambda: time.sleep(14 * rank * calls[0]),
    )  # fmt: skip
    calls = [0]
    sync.push(1)
    calls[0], began = 1, time.monotonic()
    try:
        sync.push(2)
    except ConvtoolsError as error:
        return str(error), time.monotonic() - began
    return "pushed", 0.0


def test_a_rank_that_stalls_holds_nobody_past_the_deadline(tmp_path: Path) -> None:
    """The end of a gloo group waits for what is under way in it, for as long as that itself may take."""
    import torch

    receiver = Receiver(ShadowApplier(TensorWeights({"w": torch.zeros(9)})))
    with Server(receiver, tmp_path / "engine"):
        (said, seconds), _ = run(2, stalls, str(tmp_path / "engine"), where=tmp_path)
    assert "did not answer in time" in said and seconds < 8
    assert (receiver.state, receiver.version) == ("clean", 1)
