"""How long the plan of the largest published model takes: 108 layers, 512 experts, no tensor made.

    python bench/refit_plan.py [--tp 8 --pp 4 --ep 32] [--engine-tp 8] [--rank N | --sender N]

A trainer in Megatron's layout TP8/PP4/EP32 (the 128 ranks of one model replica) and an engine whose ranks
hold Hugging Face tensors cut for TP8. Printed: the merging of what all ranks hold, the plan of one engine
rank (with `--sender N`: of what that rank of the trainer sends to all of them), the digest of its moves, the
same again from the cache, and the peak memory of the process.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from convtools.conversion.from_hf import model_of  # noqa: E402
from convtools.families.rank_tensors import Placement  # noqa: E402
from convtools.layout.parallel import ParallelLayout, even_stages  # noqa: E402
from convtools.layout.region import Region  # noqa: E402
from convtools.refit.ranks.holdings import (  # noqa: E402
    Holdings,
    MegatronPlace,
    cut_holdings,
    megatron_holdings,
    merge,
)
from convtools.refit.ranks.shard_plan import shard_plans  # noqa: E402
from tests.nemotron_checkpoints import ULTRA, Tensors, inventory  # noqa: E402


class _Shape:
    """A tensor without elements."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape


def trainer(tensors: Tensors, layout: ParallelLayout) -> list[Holdings]:
    """What every rank of the trainer says that it holds."""
    model = model_of(ULTRA, {name: shape for name, (_, shape) in tensors.items()})[0]
    table = model.table(model.spec.vocab)
    dtypes = {piece.a: tensors[piece.b][0] for piece in table.mapping.pieces}
    words = {"BF16": "bfloat16", "F32": "float32"}
    place = Placement(table.params.values(), layout, tied=False)
    out = []
    for rank in layout.ranks():
        held = {
            next(iter(part.names())): _Shape(words[dtypes[part.param.name]], part.shape)
            for part in place.held(rank)
        }
        out.append(megatron_holdings([held], MegatronPlace(layout, rank, ULTRA)))
    return out


def engine(tensors: Tensors, tp: int) -> list[Holdings]:
    """Ranks of an engine: columns of what is summed after, rows of the rest, norms and routers whole."""
    out = []
    for rank in range(tp):
        cuts = {}
        for name, (dtype, shape) in tensors.items():
            dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")) else 0
            whole = len(shape) < 2 or shape[dim] % tp or "gate.weight" in name or "norm" in name
            region = Region.whole(shape)
            if not whole:
                n = shape[dim] // tp
                at = tuple(rank * n if d == dim else 0 for d in range(len(shape)))
                region = Region(at, tuple(n if d == dim else s for d, s in enumerate(shape)))
            cuts[name] = (dtype, shape, region)
        out.append(cut_holdings(cuts))
    return out


def timed(what: str, call: Callable[[], Any]) -> Any:
    """Run, and print how long it took."""
    began, busy = time.perf_counter(), time.process_time()
    found = call()
    print(f"{what:48} {time.perf_counter() - began:7.2f} s, {time.process_time() - busy:7.2f} s of a core")
    return found


def main() -> None:
    """Print a line for each step, and the peak memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("tp", 8), ("pp", 4), ("ep", 32), ("engine-tp", 8), ("rank", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sender", type=int)
    parser.add_argument("--bucket-bytes", type=int, default=256 << 20)
    args = parser.parse_args()
    tensors = inventory(ULTRA)
    layout = ParallelLayout(args.tp, args.pp, args.ep, 1, even_stages(108, args.pp))
    sources = timed("what the trainer's ranks hold", lambda: trainer(tensors, layout))
    targets = timed("what the engine's ranks hold", lambda: engine(tensors, args.engine_tp))
    began, busy = time.perf_counter(), time.process_time()
    merged = timed(f"merged: {len(sources)} ranks, {len(tensors)} tensors", lambda: merge(sources))
    one = args.rank if args.sender is None else None
    plans = timed(
        "planned",
        lambda: shard_plans(merged, targets, args.bucket_bytes, target=one, sender=args.sender),
    )
    for plan in plans:
        timed(f"moves of {len(plan.plan.buckets)} buckets", plan.legs.prepare)
    made, busy = time.perf_counter() - began, time.process_time() - busy
    timed("digest of the moves", lambda: [plan.legs.digest(args.sender or 0) for plan in plans])
    began = time.perf_counter()
    for plan in plans:
        plan.legs.prepare()
    again = time.perf_counter() - began
    nbytes = sum(
        m.nbytes for plan in plans for i in range(len(plan.plan.buckets)) for m in plan.legs.of(i).values()
    )
    copies = sum(
        len(m.copies)
        for plan in plans
        for i in range(len(plan.plan.buckets))
        for m in plan.legs.of(i).values()
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"made in {made:.2f} s ({busy:.2f} s of a core), replayed in {again * 1e3:.2f} ms; "
        f"peak {peak >> 10} MiB"
    )
    print(f"{copies} copies, {nbytes / 1e9:.1f} GB")
    print(json.dumps({"made": made, "core": busy, "replayed": again, "peak": peak * 1024}))


if __name__ == "__main__":
    main()
