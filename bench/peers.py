"""The same job by the tools that are used today: torch's DCP, and megatron-core's `dist_checkpointing`.

Both load every tensor into memory and save it unchanged, without the rearrangement that a
conversion does: the least that a script built on them could do.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_DCP = """
import glob, sys, torch, torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
state = {}
for file in sorted(glob.glob(sys.argv[1] + "/*.safetensors")):
    state |= load_file(file)
dcp.save(state, checkpoint_id=sys.argv[2], no_dist=True)
"""

_MCORE = """
import glob, os, sys, torch
torch.cuda.synchronize = lambda *a: None  # megatron-core's save assumes a GPU
torch.cuda.current_device = lambda: "cpu"
os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531", RANK="0", WORLD_SIZE="1")
torch.distributed.init_process_group("gloo")
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from safetensors.torch import load_file
state = {}
for file in sorted(glob.glob(sys.argv[1] + "/*.safetensors")):
    state |= load_file(file)
os.makedirs(sys.argv[2])
dist_checkpointing.save({k: ShardedTensor.from_rank_offsets(k, v) for k, v in state.items()}, sys.argv[2])
torch.distributed.destroy_process_group()
"""


def _script(text: str) -> Callable[[Path, Path], None]:
    def run(src: Path, out: Path) -> None:
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", text, str(src), str(out)], check=True, capture_output=True
        )

    return run


CASES = {"torch DCP save": _script(_DCP), "megatron-core save": _script(_MCORE)}
