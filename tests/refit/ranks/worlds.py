"""Real gloo processes for tests: a function run on every rank, and what each returned or raised."""

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

DEADLINE = 60


def _run(
    rank: int, size: int, where: str, function: Callable[..., Any], args: tuple[Any, ...], out: Any
) -> None:
    import torch.distributed as dist

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{where}", rank=rank, world_size=size, timeout=timedelta(seconds=30)
        )
        out.put((rank, function(rank, *args), ""))
    except BaseException as error:
        out.put((rank, None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    out.close()
    out.join_thread()
    os._exit(0)  # gloo's own end waits for peers that may be dead


def started(size: int, function: Callable[..., Any], *args: Any, where: Path) -> tuple[list[Any], Any]:
    """The processes, and the queue of (rank, result, error)."""
    context = mp.get_context("spawn")
    out = context.Queue()
    place = where / f"store-{os.urandom(4).hex()}"
    all_args = [(rank, size, str(place), function, args, out) for rank in range(size)]
    processes = [context.Process(target=_run, args=a, daemon=True) for a in all_args]
    for process in processes:
        process.start()
    return processes, out


def collected(out: Any, count: int) -> dict[int, tuple[Any, str]]:
    """Rank -> (result, error), of so many ranks."""
    found = {}
    for _ in range(count):
        rank, result, error = out.get(timeout=DEADLINE)
        found[rank] = (result, error)
    return found


def run(size: int, function: Callable[..., Any], *args: Any, where: Path) -> list[Any]:
    """What `function(rank, *args)` gives on every rank. Fails where one raises."""
    processes, out = started(size, function, *args, where=where)
    try:
        found = collected(out, size)
    finally:
        end(processes)
    errors = [f"rank {rank}: {error}" for rank, (_, error) in sorted(found.items()) if error]
    assert not errors, "\n".join(errors)
    return [found[rank][0] for rank in range(size)]


def end(processes: list[Any]) -> None:
    """Leave none behind."""
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
