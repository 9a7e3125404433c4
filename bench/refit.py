"""How fast a refit between two processes of one machine is, beside memcpy and what else could carry it.

    python bench/refit.py [--gb 1] [--rounds 5] [--bucket-mb 8]

A trainer's tensors go into buffers that the engine's process keeps: by a push with all its checks, by a
`multiprocessing` queue, and by gloo's broadcast; each way in turn in each round, and the best of all
rounds counts. memcpy is one warm copy in one process: a push copies twice, through the ring.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import numpy as np  # noqa: E402

from convtools.refit.applier import InPlaceApplier, ShadowApplier  # noqa: E402
from convtools.refit.channels.local_memory import Server  # noqa: E402
from convtools.refit.receiver import Receiver  # noqa: E402
from convtools.refit.report import PushReport  # noqa: E402
from convtools.refit.sinks.local import LocalSink  # noqa: E402
from convtools.refit.sync import WeightSync  # noqa: E402
from convtools.refit.weights import TensorWeights  # noqa: E402

FORK = multiprocessing.get_context("fork")
Tensors = dict[str, np.ndarray[Any, Any]]


def tensors(gigabytes: float, value: int) -> Tensors:
    """Layers of two large matrices and a small vector in bf16's width, finite numbers all."""
    wide, layers = 4096, max(1, round(gigabytes * 1e9 / (2 * 2 * 4096 * 4096)))
    out: Tensors = {}
    for i in range(layers):
        for name in ("up", "down"):
            out[f"layers.{i}.{name}.weight"] = np.full((wide, wide), value, "f2")
        out[f"layers.{i}.norm.weight"] = np.full(wide, value, "f2")
    return out


def engine(where: str, gigabytes: float, mode: str, ready: Any, stop: Any) -> None:
    """Serves until it is told to stop."""
    weights = TensorWeights(tensors(gigabytes, 1))
    applier = ShadowApplier(weights) if mode == "shadow" else InPlaceApplier(weights)
    with Server(Receiver(applier), where):
        ready.set()
        stop.wait()


def queue_engine(gigabytes: float, queue: Any, done: Any) -> None:
    """Copies what comes through a queue to where it belongs."""
    into = tensors(gigabytes, 1)
    done.put(None)
    while (item := queue.get()) is not None:
        for name, array in item:
            np.copyto(into[name], array)
        done.put(None)


def gloo_engine(gigabytes: float, path: str, done: Any, rounds: int) -> None:
    """Receives every tensor of every round by broadcast."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=1, world_size=2)
    into = {n: torch.from_numpy(t) for n, t in tensors(gigabytes, 1).items()}
    for _ in range(rounds):
        for tensor in into.values():
            dist.broadcast(tensor, 0)
        done.put(None)
    dist.destroy_process_group()


def timed(run: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    """Parse, run, print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mb", type=int, default=8)
    args = parser.parse_args()
    source = tensors(args.gb, 2)
    copy = tensors(args.gb, 1)
    nbytes = sum(t.nbytes for t in source.values())
    scratch = tempfile.mkdtemp()
    stop = FORK.Event()
    children = []
    for mode in ("in place", "shadow"):
        ready = FORK.Event()
        children.append(FORK.Process(target=engine, args=(f"{scratch}/{mode}", args.gb, mode, ready, stop)))
        children[-1].start()
        assert ready.wait(60)
    queue, done, told = FORK.SimpleQueue(), FORK.Queue(), FORK.Queue()
    children.append(FORK.Process(target=queue_engine, args=(args.gb, queue, done)))
    gloo = FORK.Process(target=gloo_engine, args=(args.gb, f"{scratch}/gloo", told, args.rounds))
    for child in (children[-1], gloo):
        child.start()
    done.get()

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/gloo", rank=0, world_size=2)
    live = {n: torch.from_numpy(t) for n, t in source.items()}

    def memcpy() -> None:
        for name, tensor in source.items():
            np.copyto(copy[name], tensor)

    def by_queue() -> None:
        queue.put(list(source.items()))
        done.get()

    def by_gloo() -> None:
        for tensor in live.values():
            dist.broadcast(tensor, 0)
        told.get()

    reports: list[PushReport] = []
    bucket_bytes = args.bucket_mb << 20
    syncs = {
        f"push, {mode}": WeightSync(source, [LocalSink(f"{scratch}/{mode}")], bucket_bytes=bucket_bytes)
        for mode in ("in place", "shadow")
    }
    syncs["push, in place, no fingerprints"] = WeightSync(
        source, [LocalSink(f"{scratch}/in place")], bucket_bytes=bucket_bytes, fingerprints=False
    )

    def push(name: str) -> None:
        reports.append(syncs[name].push(len(reports) + 1, force=True))

    ways: dict[str, Callable[[], object]] = {"memcpy": memcpy}
    ways |= {name: lambda name=name: push(name) for name in syncs}
    ways |= {"gloo broadcast": by_gloo, "multiprocessing queue": by_queue}
    best: dict[str, float] = {}
    shown: PushReport | None = None
    for _ in range(args.rounds):
        for name, run in ways.items():
            seconds = timed(run)
            if seconds < best.get(name, 1e9):
                best[name] = seconds
                shown = reports[-1] if name == "push, in place" else shown
    assert all(sync.verify().equal for sync in syncs.values())
    for sync in syncs.values():
        sync.close()
    queue.put(None)
    stop.set()
    dist.destroy_process_group()
    for child in (*children, gloo):
        child.join(20)
    print(f"\n{nbytes / 1e9:.2f} GB, buckets of {args.bucket_mb} MiB, best of {args.rounds}\n")
    print("| what | GB/s | ratio to memcpy |\n|---|---|---|")
    for name, seconds in best.items():
        print(f"| {name} | {nbytes / seconds / 1e9:.2f} | {best['memcpy'] / seconds:.2f} |")
    assert shown is not None
    print(
        f"\nthe best push in place: {shown.seconds:.3f} s, of which gather {shown.gather_seconds:.3f}, pack "
        f"{shown.pack_seconds:.3f}, wait {shown.wait_seconds:.3f}, commit {shown.commit_seconds:.3f}; the "
        f"engine consumed for {shown.sinks[0].consume_seconds:.3f}; {shown.buckets} buckets; staging "
        f"{shown.staging_bytes >> 20} MiB"
    )


if __name__ == "__main__":
    main()
