"""Our labels are those that real Megatron makes of its own, rolled once more at each depth."""

import pytest
import torch

from convtools.training.mtp_labels import IGNORE, mtp_inputs, mtp_labels

TOKENS = torch.tensor([[5, 3, 8, 1, 9, 2, 7, 4]])


@pytest.mark.oracle
@pytest.mark.parametrize("lengths", [[8], [5, 3], [2, 5, 1]])
def test_labels_and_inputs_are_megatrons(lengths: list[int]) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    packed = PackedSeqParams(cu_seqlens_q=ends, cu_seqlens_kv=ends) if len(lengths) > 1 else None
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]

    def rolled(tensor: torch.Tensor) -> torch.Tensor:
        out, _ = roll_tensor(tensor.clone(), shifts=-1, dims=-1, packed_seq_params=packed)
        return out  # type: ignore[no-any-return]

    labels, mask, inputs = rolled(TOKENS), rolled(torch.ones_like(TOKENS)), TOKENS
    for depth in range(4):
        labels, mask, inputs = rolled(labels), rolled(mask), rolled(inputs)
        ours = mtp_labels(TOKENS, depth, segments=segments)
        assert torch.equal(ours, labels.where(mask == 1, IGNORE))
        assert torch.equal(mtp_inputs(TOKENS, depth)[mask == 1], inputs[mask == 1])
