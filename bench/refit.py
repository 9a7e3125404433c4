"""How fast a refit between two processes of one machine is, beside memcpy and what else could carry it.

    python bench/refit.py [--gb 1] [--rounds 5] [--bucket-mb 4]

A trainer's tensors go into buffers that the engine's process keeps: by a push with all its checks, by a
handover of the memory in which they lie, by a `multiprocessing` queue, and by gloo's broadcast; each way in
turn in each round, and the best of all rounds counts. memcpy is one warm copy in one process; a push copies
twice, through the ring, and a handover once. It takes about eight times `--gb` of memory.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from convtools.equality.fingerprint import path_used  # noqa: E402
from convtools.refit.applier import InPlaceApplier, ShadowApplier  # noqa: E402
from convtools.refit.arena import Arena  # noqa: E402
from convtools.refit.channels.local_memory import Server  # noqa: E402
from convtools.refit.receiver import Receiver  # noqa: E402
from convtools.refit.report import PushReport  # noqa: E402
from convtools.refit.sinks.local import LocalSink  # noqa: E402
from convtools.refit.sync import WeightSync  # noqa: E402
from convtools.refit.weights import TensorWeights  # noqa: E402

FORK = multiprocessing.get_context("fork")
UNCHECKED = {"finite": False, "fingerprints": False, "checksums": False}
SMALL = 64 << 10
Tensors = dict[str, torch.Tensor]


def tensors(gigabytes: float, value: float) -> Tensors:
    """Layers of two large matrices and a small vector, in bf16."""
    wide, layers = 4096, max(1, round(gigabytes * 1e9 / (2 * 2 * 4096 * 4096)))
    out: Tensors = {}
    for i in range(layers):
        for name in ("up", "down"):
            out[f"layers.{i}.{name}.weight"] = torch.full((wide, wide), value, dtype=torch.bfloat16)
        out[f"layers.{i}.norm.weight"] = torch.full((wide,), value, dtype=torch.bfloat16)
    return out


def engine(where: str, gigabytes: float, mode: str, ready: Any, stop: Any) -> None:
    """Serves until it is told to stop."""
    weights = TensorWeights(tensors(gigabytes, 1))
    applier = ShadowApplier(weights) if mode == "shadow" else InPlaceApplier(weights)
    with Server(Receiver(applier), where):
        ready.set()
        stop.wait()


def arrays(named: Tensors) -> dict[str, np.ndarray[Any, Any]]:
    """The same memory, as numpy sees it."""
    return {name: tensor.view(torch.int16).numpy() for name, tensor in named.items()}


def queue_engine(gigabytes: float, queue: Any, done: Any) -> None:
    """Copies what comes through a queue to where it belongs."""
    into = arrays(tensors(gigabytes, 1))
    done.put(None)
    while (item := queue.get()) is not None:
        if not item:
            done.put(None)
            continue
        np.copyto(into[item[0]], item[1])


def gloo_engine(gigabytes: float, path: str, done: Any, rounds: int) -> None:
    """Receives every tensor of every round by broadcast."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=1, world_size=2)
    into = tensors(gigabytes, 1)
    for _ in range(rounds):
        for tensor in into.values():
            dist.broadcast(tensor, 0)
        done.put(None)
    dist.destroy_process_group()


class Engines:
    """Child processes that keep buffers, and a way to each."""

    def __init__(self, gigabytes: float, rounds: int, scratch: str) -> None:
        self.stop, self.children, self.scratch = FORK.Event(), [], scratch
        for mode, size in (("in place", gigabytes), ("shadow", gigabytes), ("small", 0.07)):
            ready = FORK.Event()
            self.start(engine, f"{scratch}/{mode}", size, mode, ready, self.stop)
            assert ready.wait(120)
        self.queue, self.done, self.told = FORK.SimpleQueue(), FORK.Queue(), FORK.Queue()
        self.start(queue_engine, gigabytes, self.queue, self.done)
        self.start(gloo_engine, gigabytes, f"{scratch}/gloo", self.told, rounds)
        self.done.get()
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{scratch}/gloo", rank=0, world_size=2)

    def start(self, run: Callable[..., None], *args: Any) -> None:
        """One more."""
        self.children.append(FORK.Process(target=run, args=args))
        self.children[-1].start()

    def by_queue(self, source: Tensors) -> None:
        """Every tensor through a `multiprocessing` queue."""
        for item in arrays(source).items():
            self.queue.put(item)
        self.queue.put(())
        self.done.get()

    def by_gloo(self, source: Tensors) -> None:
        """Every tensor by broadcast."""
        for tensor in source.values():
            dist.broadcast(tensor, 0)
        self.told.get()

    def end(self) -> None:
        """Stop them all."""
        self.queue.put(None)
        self.stop.set()
        dist.destroy_process_group()
        for child in self.children:
            child.join(20)


def timed(run: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    """Parse, run, print a Markdown table and the same as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mb", type=int, default=4)
    args = parser.parse_args()
    with ExitStack() as closing:
        scratch = closing.enter_context(tempfile.TemporaryDirectory())
        engines = Engines(args.gb, args.rounds, scratch)
        closing.callback(engines.end)
        measure(args.gb, args.rounds, args.bucket_mb << 20, engines, closing)


def measure(gigabytes: float, rounds: int, bucket_bytes: int, engines: Engines, closing: ExitStack) -> None:
    """Each way in each round."""
    source = tensors(gigabytes, 2)
    copy, given = arrays(tensors(gigabytes, 1)), arrays(source)
    nbytes = sum(t.nbytes for t in given.values())
    arena = closing.enter_context(Arena.like(source))

    def sync(to: str, of: Any, **options: Any) -> WeightSync:
        sink = LocalSink(f"{engines.scratch}/{to}")
        return closing.enter_context(WeightSync(of, [sink], **({"bucket_bytes": bucket_bytes} | options)))

    syncs = {
        "push, in place": sync("in place", source),
        "push, shadow": sync("shadow", source),
        "push, in place, no fingerprints": sync("in place", source, fingerprints=False),
        "zero-copy, all checks": sync("in place", arena),
        "zero-copy, no checksums": sync("in place", arena, checksums=False),
        "zero-copy, checks off": sync("in place", arena, **UNCHECKED),
    }
    small = sync("small", tensors(0.07, 2), bucket_bytes=SMALL)
    reports: dict[str, PushReport] = {}

    def push(name: str, of: WeightSync) -> None:
        reports[name] = of.push(1, force=True)

    ways: dict[str, Callable[[], object]] = {
        "memcpy": lambda: [np.copyto(copy[name], array) for name, array in given.items()]
    }
    ways |= {name: lambda name=name, of=of: push(name, of) for name, of in syncs.items()}
    ways |= {
        "gloo broadcast": lambda: engines.by_gloo(source),
        "multiprocessing queue": lambda: engines.by_queue(source),
        "small buckets": lambda: push("small buckets", small),
    }
    best: dict[str, float] = {}
    shown: dict[str, PushReport] = {}
    for _ in range(rounds):
        for name, run in ways.items():
            seconds = timed(run)
            if seconds < best.get(name, 1e9):
                best[name] = seconds
                if name in reports:
                    shown[name] = reports[name]
    assert all(one.verify().equal for one in syncs.values())
    show(nbytes, bucket_bytes, rounds, best, shown)


def show(
    nbytes: int, bucket_bytes: int, rounds: int, best: dict[str, float], shown: dict[str, PushReport]
) -> None:
    """The table."""
    overhead = best.pop("small buckets") / shown["small buckets"].buckets
    print(
        f"\n{nbytes / 1e9:.2f} GB, buckets of {bucket_bytes >> 20} MiB, best of {rounds}, fingerprints "
        f"{path_used()}\n"
    )
    print("| what | GB/s | ratio to memcpy |\n|---|---|---|")
    for name, seconds in best.items():
        print(f"| {name} | {nbytes / seconds / 1e9:.2f} | {best['memcpy'] / seconds:.2f} |")
    push = shown["push, in place"]
    print(
        f"\nthe best push in place: {push.seconds:.3f} s, of which gather {push.gather_seconds:.3f}, pack "
        f"{push.pack_seconds:.3f}, wait {push.wait_seconds:.3f}, commit {push.commit_seconds:.3f}; the "
        f"engine consumed for {push.sinks[0].consume_seconds:.3f}; {push.buckets} buckets; staging "
        f"{push.staging_bytes >> 20} MiB; a bucket of {SMALL >> 10} KiB takes {1e6 * overhead:.0f} us; not "
        f"checked by the handover with checks off: {', '.join(shown['zero-copy, checks off'].unchecked)}"
    )
    ratios = {name: round(best["memcpy"] / seconds, 3) for name, seconds in best.items()}
    print("\n" + json.dumps({
        "ratio_to_memcpy": ratios, "memcpy_gb_s": round(nbytes / best["memcpy"] / 1e9, 2),
        "microseconds_a_small_bucket": round(1e6 * overhead), "staging_bytes": push.staging_bytes,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
