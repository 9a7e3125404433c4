"""megatron-core's own DDP with an overlapped gather: refused by name until its parameters are gathered."""

from pathlib import Path
from typing import Any

import pytest
import torch

from convtools.refit.errors import RefitError
from convtools.refit.ranks.gathering import check_gathered, pending_gathers
from tests.refit.ranks.worlds import run

pytestmark = pytest.mark.oracle


def steps(rank: int) -> Any:
    """Two steps of training with the distributed optimizer's buckets, and what is pending after each part."""
    import torch.distributed as dist
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment,return-value]
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=False, bucket_size=None
    )
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    ddp = DistributedDataParallel(config, ddp_config, model)
    dist.barrier()
    names = sorted(name for name, _ in ddp.named_parameters())
    out: list[Any] = [sorted(pending_gathers(ddp)) == names]
    ddp.start_param_sync(force_sync=True)
    out.append(pending_gathers([ddp]))
    ddp.zero_grad_buffer()
    ddp(torch.ones(2, 8)).sum().backward()
    out.append(pending_gathers(ddp))
    ddp.finish_grad_sync()  # which every step begins with: from here on only a rank's own part is new
    try:
        check_gathered(ddp)
    except RefitError as error:
        out.append(str(error))
    ddp.start_param_sync()  # dispatched, not waited for
    out.append(sorted(pending_gathers(ddp)) == names)
    ddp.start_param_sync(force_sync=True)
    check_gathered(ddp)
    return out


def test_an_overlapped_gather_is_seen(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    ((at_first, forced, after_forward, refused, dispatched),) = run(1, steps, where=tmp_path)
    assert at_first and forced == [] and after_forward == [] and dispatched
    assert refused.startswith("parameters are still to be gathered (overlap_param_gather)")
    assert "`module.0.weight`" in refused and "start_param_sync(force_sync=True)" in refused


def test_what_is_no_ddp_has_nothing_to_gather() -> None:
    assert pending_gathers({"w": torch.zeros(1)}) == [] and pending_gathers(torch.nn.Linear(1, 1)) == []
