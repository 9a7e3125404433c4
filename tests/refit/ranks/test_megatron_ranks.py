"""Each rank of a real Megatron job in a process of its own: together they push the very hf/ of their case."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from convtools.errors import ConvtoolsError
from convtools.layout.parallel import ParallelLayout, even_stages
from convtools.refit.applier import ShadowApplier
from convtools.refit.channels.local_memory import Server
from convtools.refit.ranks.holdings import MegatronPlace
from convtools.refit.ranks.source import RankedSource
from convtools.refit.receiver import Receiver
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from convtools.refit.weights import TensorWeights
from tests.refit.ranks.worlds import run
from tests.tensors import of_torch, read_hf

ORACLE = Path(__file__).parents[3] / "fixtures/oracle"
TP2PP2 = ("llama3_tied", "tp2pp2ep1", ParallelLayout(2, 2, 1, 2, even_stages(2, 2)))
TP2EP2 = ("qwen3_moe", "tp2pp1ep2", ParallelLayout(2, 1, 2, 2, even_stages(2, 1)))


def held_by(case: str, name: str, rank: tuple[int, int, int, int]) -> dict[str, torch.Tensor]:
    """What a rank of the real job held."""
    from safetensors.torch import load_file

    return load_file(ORACLE / case / name / f"state_dict/tp{rank[0]}_pp{rank[1]}_ep{rank[2]}.safetensors")


def push(rank: int, directory: str, case: str, name: str, layout: ParallelLayout) -> Any:
    place = MegatronPlace(
        layout, list(layout.ranks())[rank], json.loads((ORACLE / case / "hf/config.json").read_text())
    )
    named = held_by(case, name, place.rank)
    source = RankedSource(named, place, timeout=15)
    sinks = [LocalSink(directory)] if rank == 0 else []
    with WeightSync(source, sinks, bucket_bytes=1 << 14, timeout=15) as sync:
        report = sync.push(1)
        equal = sync.verify().equal
        messages = [source._legs.of(i) for i in range(len(sync.plan.buckets))]
        sent = sum(m.nbytes for found in messages for r, m in found.items() if r == rank)
        if rank == 3:
            next(t for n, t in sorted(named.items()) if "layernorm" in n)[0] += 1
        try:
            sync.push(2)
        except ConvtoolsError as error:
            return report.nbytes, equal, sent, str(error)
    return None


@pytest.mark.parametrize("case", [TP2PP2, TP2EP2], ids=lambda c: f"{c[0]}-{c[1]}")
def test_ranks_push_the_case(case: tuple[str, str, ParallelLayout], tmp_path: Path) -> None:
    name, layout_name, layout = case
    wanted = read_hf(ORACLE / name / "hf")
    if name == "llama3_tied":
        assert wanted.pop("lm_head.weight") == wanted["model.embed_tokens.weight"]
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    engine = {n: torch.zeros(shape, dtype=dtypes[dtype]) for n, (dtype, shape, _) in wanted.items()}
    receiver = Receiver(ShadowApplier(TensorWeights(engine)))
    with Server(receiver, tmp_path / "engine"):
        found = run(4, push, str(tmp_path / "engine"), name, layout_name, layout, where=tmp_path)
    assert {n: of_torch(t) for n, t in engine.items()} == wanted
    nbytes, equal, _, error = found[0]
    assert nbytes == sum(len(data) for _, _, data in wanted.values()) and equal
    assert max(f[2] for f in found) < 0.7 * nbytes
    assert {f[3] for f in found} == {error}
    assert "different copies of one tensor" in error and "layernorm" in error and "rank 3" in error
    assert receiver.version == 1
