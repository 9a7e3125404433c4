"""Megatron's ranks as the source: what their shards hold under HF names is what the engine gets."""

from pathlib import Path

import pytest
import torch

import convtools
from convtools.equality.compare import compare
from convtools.equality.live import Shards
from convtools.layout.parallel import ParallelLayout, Rank, even_stages
from convtools.refit.applier import ShadowApplier
from convtools.refit.errors import RefitError
from convtools.refit.receiver import Receiver
from convtools.refit.sinks.base import DirectSink
from convtools.refit.sync import WeightSync
from convtools.refit.weights import TensorWeights
from tests.equality.equal_pairs import LLAMA_TIED, NEMOTRON, QWEN3_MOE, Case, live, write_hf, write_megatron
from tests.tensors import read_rank


def ranks_of(root: Path, layout: ParallelLayout) -> dict[Rank, dict[str, torch.Tensor]]:
    """What each rank of a legacy checkpoint holds, read by torch."""
    out = {}
    for rank in layout.ranks():
        name = f"mp_rank_{rank.tp:02d}_{rank.pp:03d}" + (f"_{rank.ep:03d}" if layout.ep > 1 else "")
        value, _, extra = read_rank(root / "iter_0000001" / name / "model_optim_rng.pt")
        out[rank] = {n: t.clone() for n, t in value["model"].items() if n not in extra}
    return out


@pytest.mark.parametrize("case", [NEMOTRON, QWEN3_MOE, LLAMA_TIED], ids=lambda c: c.name)
def test_ranks_push_what_they_hold(case: Case, tmp_path: Path) -> None:
    sizes = dict(case.sizes)
    hf = write_hf(case, tmp_path / "hf")
    saved = write_megatron(case, hf, tmp_path / "torch", "torch")
    stages = even_stages(convtools.open_source(hf).model.spec.num_layers, 2)
    layout = ParallelLayout(2, 2, sizes.get("ep", 1), sizes.get("etp", 2), stages)
    held = ranks_of(saved, layout)
    engine = {n: torch.zeros_like(t) for n, t in live(case.content()).items()}
    if case is LLAMA_TIED:
        engine["lm_head.weight"] = engine["model.embed_tokens.weight"]
    receiver = Receiver(ShadowApplier(TensorWeights(engine)))
    shards = Shards(held, layout, case.config)
    with WeightSync(shards, [DirectSink(receiver)], bucket_bytes=32768, finite=False) as sync:
        sync.push(1)
        assert sync.verify().equal
        assert compare(engine, hf).equal is True or case is LLAMA_TIED
        rank, name = next((r, n) for r in held for n in held[r] if n.endswith("linear_proj.weight"))
        for other in (r for r in held if (r.tp, r.pp) == (rank.tp, rank.pp)):
            held[other][name][0, 0] = 0.75  # the trainer's next step, in place, in every replica
        before = {n: t.clone() for n, t in engine.items()}
        sync.push(2)
        changed = {
            n for n, t in engine.items() if not torch.equal(t.view(torch.int16), before[n].view(torch.int16))
        }
        assert len(changed) == 1 and next(iter(changed)).endswith("o_proj.weight")


def test_replicas_that_differ_are_refused(tmp_path: Path) -> None:
    hf = write_hf(QWEN3_MOE, tmp_path / "hf")
    layout = ParallelLayout(2, 2, 2, 2, even_stages(4, 2))
    held = ranks_of(write_megatron(QWEN3_MOE, hf, tmp_path / "torch", "torch"), layout)
    engine = {n: torch.zeros_like(t) for n, t in live(QWEN3_MOE.content()).items()}
    receiver = Receiver(ShadowApplier(TensorWeights(engine)))
    held[Rank(1, 0, 1, 1)]["decoder.layers.0.mlp.router.weight"][2, 3] += 1
    shards = Shards(held, layout, QWEN3_MOE.config)
    with (
        WeightSync(shards, [DirectSink(receiver)], bucket_bytes=32768, finite=False) as sync,
        pytest.raises(RefitError, match=r"different copies of one tensor\n.*router\.weight"),
    ):
        sync.push(1)
    assert receiver.version == 0
