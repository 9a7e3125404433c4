"""`load_into` for a rank that cannot be: nothing is written."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from convtools.errors import ConvtoolsError
from convtools.layout.parallel import ParallelLayout, Rank, even_stages
from convtools.refit.load import load_into

CASE = Path(__file__).parents[2] / "fixtures/oracle/deepseek_v3"
LAYOUT = ParallelLayout(2, 1, 1, 2, even_stages(3, 1))
EMBEDDING = "embedding.word_embeddings.weight"


def ranks_tensors() -> dict[str, torch.Tensor]:
    return load_file(CASE / "tp2pp1ep1/state_dict/tp0_pp0_ep0.safetensors")


@pytest.mark.parametrize("axis", Rank._fields)
@pytest.mark.parametrize("at", [-1, 2, 1 << 62])
def test_a_rank_outside_the_layout(axis: str, at: int) -> None:
    live = {name: torch.full_like(tensor, 7) for name, tensor in ranks_tensors().items()}
    rank = Rank(0, 0, 0, 0)._replace(**{axis: at})
    with pytest.raises(ConvtoolsError, match=f"{axis}={at} is no rank"):
        load_into(live, CASE / "hf", LAYOUT, rank)
    assert all(bool((tensor == 7).all()) for tensor in live.values())


def test_tensors_that_cannot_be_filled() -> None:
    held = ranks_tensors()
    for odd in (torch.tensor(1.0), torch._neg_view(held[EMBEDDING]), held[EMBEDDING][:0]):
        with pytest.raises(ConvtoolsError):
            load_into(ranks_tensors() | {EMBEDDING: odd}, CASE / "hf", LAYOUT, Rank(0, 0, 0, 0))
