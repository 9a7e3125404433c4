"""Several processes on one conversion: `torchrun ... -m convtools convert ...`.

Each rank opens the source and makes the same plan; target files are dealt among ranks; rank 0 makes
the staging directory and publishes when all have reported. Ranks speak through the key-value store
of `torch.distributed`, by polling, so that nobody waits in a collective for a rank that has died:
every rank beats twice a second, and one that has not been heard for some seconds is an error.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from convtools.errors import ConvtoolsError, StorageError, UsageError

_BEAT = 0.5
_DEAD = 5.0
_JOIN = 120.0


class World:
    """This process among the ranks of a conversion; alone by default."""

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank, self.size = rank, size
        self.stop = threading.Event()
        """Set when a rank has died or failed: movers look at it between steps."""
        self._store = store
        self._fault: str | None = None
        self._done = threading.Event()

    def share(self, key: str, value: Any = None) -> Any:
        """Rank 0 gives `value` (plain JSON data); every rank returns it."""
        if self.size == 1:
            return value
        if self.rank == 0:
            self._store.set(key, json.dumps(value))
            return value
        return json.loads(self._wait(key))

    def gather(self, key: str, value: Any) -> list[Any]:
        """Every rank gives a value; every rank returns all of them, in order of rank."""
        if self.size == 1:
            return [value]
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(self._wait(f"{key}/{r}")) for r in range(self.size)]

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank stops."""
        if self.size > 1 and self._fault is None:
            with suppress(RuntimeError):
                self._store.set("fault", json.dumps(f"rank {self.rank}: {error}"))

    def raise_fault(self) -> None:
        """Raise StorageError if another rank has died or failed."""
        if self._fault is not None:
            raise StorageError(
                f"another rank stopped: {self._fault}",
                fix="look at that rank's output; nothing was published",
            )

    def _wait(self, key: str) -> bytes:
        while True:
            self.raise_fault()
            try:
                if self._store.check([key]):
                    found: bytes = self._store.get(key)
                    return found
            except RuntimeError as error:
                self._lost(f"rank 0 cannot be reached ({str(error).splitlines()[0]})")
            time.sleep(0.05)

    def _lost(self, why: str) -> None:
        if self._fault is None:
            self._fault = why
        self.stop.set()

    def _beat(self) -> None:
        heard = {r: (0, time.monotonic()) for r in range(self.size) if r != self.rank}
        count = 0
        while not self._done.wait(_BEAT):
            count += 1
            try:
                self._store.set(f"beat/{self.rank}", str(count))
                if self._store.check(["fault"]):
                    self._lost(json.loads(self._store.get("fault")))
                for r, (last, when) in heard.items():
                    now = int(self._store.get(f"beat/{r}")) if self._store.check([f"beat/{r}"]) else 0
                    if now != last:
                        heard[r] = (now, time.monotonic())
                    elif time.monotonic() - when > (_DEAD if last else _JOIN) and now >= 0:
                        self._lost(f"rank {r} has not been heard for {_DEAD:.0f} s")
            except RuntimeError as error:
                self._lost(f"rank 0 cannot be reached ({str(error).splitlines()[0]})")
                return

    def leave(self, *, together: bool) -> None:
        """Stop beating. After success all ranks leave together, rank 0 (who holds the store) last."""
        if self.size == 1:
            return
        with suppress(ConvtoolsError, RuntimeError):
            if together:
                self.gather("left", True)
                self._store.set(f"out/{self.rank}", "1")
                if self.rank == 0:
                    deadline = time.monotonic() + _DEAD
                    keys = [f"out/{r}" for r in range(self.size)]
                    while not self._store.check(keys) and time.monotonic() < deadline:
                        time.sleep(0.02)
        self._done.set()


@contextmanager
def joined_world() -> Iterator[World]:
    """The world that torchrun's environment describes, or a process alone. Raises UsageError."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size == 1:
        yield World()
        return
    try:
        import torch.distributed as dist
    except ImportError:
        raise UsageError("several ranks need PyTorch", fix="pip install 'convtools[torch]'") from None
    from datetime import timedelta

    dist.init_process_group("gloo", timeout=timedelta(seconds=_JOIN))
    store = dist.PrefixStore("convtools", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    world = World(rank, size, store)
    beat = threading.Thread(target=world._beat, daemon=True)
    beat.start()
    ok = False
    try:
        yield world
        ok = True
    except BaseException as error:
        world.fail(error)
        raise
    finally:
        world.leave(together=ok)
        beat.join(timeout=_DEAD)
        if ok:
            dist.destroy_process_group()
