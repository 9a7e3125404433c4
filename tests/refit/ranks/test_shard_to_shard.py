"""The trainer's shards into an engine's shards of another layout, point to point, on real gloo ranks."""

import json
from pathlib import Path
from typing import Any

import torch

from convtools.errors import ConvtoolsError
from convtools.layout.parallel import ParallelLayout, Rank, even_stages
from convtools.refit.applier import ShadowApplier
from convtools.refit.load import load_into
from convtools.refit.ranks.holdings import MegatronPlace, megatron_holdings
from convtools.refit.ranks.shard_end import ShardTarget
from convtools.refit.ranks.shard_sync import ShardSync
from convtools.refit.ranks.source import RankedSource
from convtools.refit.receiver import Receiver
from convtools.refit.weights import TensorWeights
from tests.refit.ranks.worlds import run

CASE = Path(__file__).parents[3] / "fixtures/oracle/deepseek_v3"
TRAINER = ParallelLayout(2, 1, 1, 2, even_stages(3, 1))
ENGINE = ParallelLayout(1, 1, 2, 1, even_stages(3, 1))


def expected(place: MegatronPlace) -> dict[str, torch.Tensor]:
    """What an engine rank must hold, loaded from the case's hf/: shapes come from what it says is missing."""
    from convtools.conversion.api import open_source
    from convtools.families.rank_tensors import Placement

    source = open_source(CASE / "hf")
    table = source.model.table(source.model.spec.vocab)
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    by_param = {piece.a: source.dtypes()[piece.b] for piece in table.mapping.pieces}
    held = list(Placement(table.params.values(), place.layout, tied=False).held(place.rank))
    tensors = {
        next(iter(h.names())): torch.zeros(h.shape, dtype=dtypes[by_param[h.param.name]]) for h in held
    }
    load_into(tensors, CASE / "hf", place.layout, place.rank)
    return tensors


def shard_to_shard(rank: int) -> Any:
    import torch.distributed as dist

    trainers = dist.new_group([0, 1])
    config = json.loads((CASE / "hf/config.json").read_text())
    if rank >= 2:
        place = MegatronPlace(ENGINE, Rank(0, 0, rank - 2, 0), config)
        wanted = expected(place)
        served = {name: torch.zeros_like(t) for name, t in wanted.items()}
        receiver = Receiver(ShadowApplier(TensorWeights(served)))
        ShardTarget(receiver, megatron_holdings([served], place), timeout=10).serve()
        differ = [n for n, t in wanted.items() if not torch.equal(t, served[n])]
        return receiver.state, receiver.version, differ, sum(t.nbytes for t in served.values())
    from safetensors.torch import load_file

    place = MegatronPlace(TRAINER, Rank(rank, 0, 0, rank), config)
    named = load_file(CASE / f"tp2pp1ep1/state_dict/tp{rank}_pp0_ep0.safetensors")
    source = RankedSource(named, place, group=trainers, timeout=10)
    sync = ShardSync(source, bucket_bytes=1 << 13, timeout=10)
    first = sync.push(1)
    equal = sync.verify().equal
    said = []
    norm = next(n for n in sorted(named) if n.endswith("linear_proj.weight"))
    kept = named[norm].clone()
    if rank == 1:
        named[norm][0, 0] = float("inf")
    try:
        sync.push(2)
    except ConvtoolsError as error:
        said.append(str(error))
    named[norm].fill_(0.25)
    sync.push(2)
    other = sync.verify().equal
    named[norm].copy_(kept)
    other = other and not sync.verify().equal
    sync.push(3)
    sync.close()
    return first.nbytes, equal, other, said, repr(first)


def test_tp2_into_ep2(tmp_path: Path) -> None:
    zero, one, *engines = run(4, shard_to_shard, where=tmp_path)
    assert zero == one, "the same reports and errors on both"
    nbytes, equal, other, said, _ = zero
    assert equal and other
    assert "linear_proj.weight` holds NaN or infinity" in said[0] and said[0].startswith(
        "version 2 was not pushed: rank 1"
    )
    assert "`engine rank 2` clean at version 1, `engine rank 3` clean at version 1" in said[0]
    assert [e[:3] for e in engines] == [("clean", 3, [])] * 2
    assert nbytes == sum(e[3] for e in engines)
