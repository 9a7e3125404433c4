"""One rank of a gloo world in which real megatron-core loads checkpoints; started by test_mcore_loads.py.

Reads a JSON list of jobs (argv[1]) and writes their results to argv[2]. The tensor-parallel ranks of a
layout are dealt to the ranks of the world, whatever its size: with one world rank a tp rank, each asks for
what it asks for in training (all its pipeline stages together).
"""

import json
import logging
import os
import re
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

# megatron-core assumes a GPU: these two are all that its load path asks of one.
torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from sharded_names import WHOLE, asks  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402


def load(job: dict[str, Any]) -> dict[str, Any]:
    """Ask for what every rank of a layout asks for, and compare with what these ranks really held."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wanted: dict[str, torch.Tensor] = {}
    parts: dict[str, list[str]] = {}
    asked: dict[str, Any] = {}
    for index, dump in enumerate(job["dumps"]):
        if _coordinates(dump)[0] % world == rank:
            for name, tensor in load_file(dump).items():
                wanted[f"{index}:{name}"] = tensor
                parts[f"{index}:{name}"] = _ask(job, *_coordinates(dump), name, tensor, asked)
    asked |= _extra_states(job, rank, asked)
    flags = {"strict": job["strict"]} if "strict" in job else {}
    try:
        found = dist_checkpointing.load(asked, job["checkpoint"], **flags)
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        return {"error": f"{type(error).__name__}: {error}"}
    different = []
    for label, tensor in wanted.items():
        got = [found[p] for p in parts[label]]
        whole = torch.cat(got) if len(got) > 1 else got[0]
        if whole.dtype != tensor.dtype or not torch.equal(_bits(whole), _bits(tensor)):
            different.append(label)
    states = [v for k, v in found.items() if "_extra_state" in k]
    filled = [k for k, v in found.items() if "_extra_state" in k and _numel(v)]
    return {"tensors": len(wanted), "states": len(states), "different": different + filled}


def _coordinates(dump: str) -> tuple[int, int, int]:
    """(tp, pp, ep) of `tp0_pp1_ep0.safetensors`."""
    tp, pp, ep = (int(part[2:]) for part in Path(dump).stem.split("_"))
    return tp, pp, ep


def _ask(
    job: dict[str, Any],
    tp: int,
    pp: int,
    ep: int,
    name: str,
    tensor: torch.Tensor,
    asked: dict[str, Any],
) -> list[str]:
    """Add what stands for one tensor to `asked`; its labels there."""
    size, config = job["tp"], job["config"]
    experts = config["n_routed_experts"]
    first = pp * config["num_hidden_layers"] // job["pp"]
    labels, at = [], 0
    copy = pp > 0 and name.startswith("embedding.")  # the last stage looks tokens up for MTP
    for ask in asks(name, config, size, first, ep * experts // job["ep"]):
        part = tensor if ask.rows is None else tensor[at : at + ask.rows]
        at += ask.rows or 0
        blank = torch.full_like(part, 7.75)  # a value that is nowhere loaded, should nothing be written
        stacked = ask.expert is not None
        cuts = [] if ask.dim == WHOLE else [(ask.dim + stacked, tp, size)]
        if ask.expert is not None:
            cuts = [(0, ask.expert, experts), *cuts]
        replica = (int(copy), tp if ask.dim == WHOLE else 0, 0 if stacked else ep)
        shard = ShardedTensor.from_rank_offsets(
            ask.key, blank, *cuts, replica_id=replica, prepend_axis_num=int(stacked)
        )
        # megatron-core lets one process ask for a part once; the first to ask is the main replica.
        labels.append(f"{ask.key} {shard.global_offset}")
        asked.setdefault(labels[-1], shard)
    return labels


def _extra_states(job: dict[str, Any], rank: int, asked: dict[str, Any]) -> dict[str, Any]:
    """The objects of the Transformer Engine modules of which this process asks for a tensor."""
    held = {
        (v.key.rpartition(".")[0], v.global_offset[0] if v.prepend_axis_num else 0) for v in asked.values()
    }
    held |= {(re.sub(r"\.weight$", "", module), shard) for module, shard in held}  # in_proj.weight.z
    out = {}
    for name in job["extra_states"]:
        module, place = name.split("._extra_state/shard_")
        shard, count = place.split("_")
        if (module, int(shard)) in held:
            out[name] = ShardedObject(
                f"{module}._extra_state", None, (int(count),), (int(shard),), replica_id=(0, rank, 0)
            )
    return out


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _numel(state: Any) -> int:
    state = state[0] if isinstance(state, list) else state
    return 0 if state is None else state.numel() if isinstance(state, torch.Tensor) else len(state.getvalue())


def listing(job: dict[str, Any]) -> dict[str, Any]:
    """Names, dtypes and global shapes, as megatron-core lists them."""
    tensors = dist_checkpointing.load_tensors_metadata(job["checkpoint"])
    everything = load_sharded_metadata(job["checkpoint"])
    objects = {
        v.unique_key: list(v.global_shape) for v in everything.values() if isinstance(v, ShardedObject)
    }
    both = {k: v for k, v in everything.items() if isinstance(v, ShardedTensor)}
    described = [{k: [str(v.dtype), *v.global_shape] for k, v in some.items()} for some in (tensors, both)]
    assert described[0] == described[1]
    return {"tensors": described[0], "objects": objects}


def common(job: dict[str, Any]) -> dict[str, Any]:
    """The common state: its types, and every value of `args` as text."""
    state = dist_checkpointing.load_common_state_dict(job["checkpoint"])
    args = state["args"]
    return {
        "args type": f"{type(args).__module__}.{type(args).__qualname__}",
        "args": {name: repr(value) for name, value in vars(args).items()},
        "is dtype": isinstance(args.params_dtype, torch.dtype),
        "state": {name: repr(value) for name, value in state.items() if name != "args"},
        "content": dist_checkpointing.load_content_metadata(preloaded_state_dict=state),
        "is torch_dist": dist_checkpointing.check_is_distributed_checkpoint(job["checkpoint"]),
    }


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    jobs = json.loads(Path(sys.argv[1]).read_text())
    run = {"load": load, "listing": listing, "common": common}
    results = [run[job["do"]](job) for job in jobs]
    Path(sys.argv[2]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # torch's and gloo's threads have nothing left to say
