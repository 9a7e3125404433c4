"""Several processes on one conversion: `torchrun ... -m convtools convert ...`.

Each rank opens the source and makes the same plan; target files are dealt among ranks; rank 0 makes
the staging directory and publishes when all have reported. Ranks speak through the key-value store
of `torch.distributed`, by polling, so that nobody waits in a collective for a rank that has died.

Every rank beats twice a second. Rank 0 listens to all, the others to rank 0: one that is not heard
for some seconds is an error, which rank 0 passes on to all. Only one thread of a process touches the
store, for a call to it may never return; the main thread waits for that thread no longer than for a rank.
"""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from convtools.errors import ConvtoolsError, StorageError, UsageError

_LOOK = 0.02
_BEAT = 0.5
_DEAD = 5.0
_JOIN = 120.0
_LINGER = 2.0


class World:
    """This process among the ranks of a conversion; alone by default."""

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank, self.size = rank, size
        self.stop = threading.Event()
        """Set when a rank has died or failed: movers look at it between steps."""
        self._store = store
        self._fault: str | None = None
        self._failed = False
        self._outbox: deque[tuple[str, str]] = deque()
        self._inbox: dict[str, bytes | None] = {}
        self._done = threading.Event()
        self._answered = time.monotonic()
        self._messenger = threading.Thread(target=self._serve, daemon=True)
        if store is not None:
            self._messenger.start()

    def share(self, key: str, value: Any = None) -> Any:
        """Rank 0 gives `value` (plain JSON data); every rank returns it."""
        if self.size == 1:
            return value
        if self.rank == 0:
            self._outbox.append((key, json.dumps(value)))
            return value
        return json.loads(self._wait(key))

    def gather(self, key: str, value: Any) -> list[Any]:
        """Every rank gives a value; every rank returns all of them, in order of rank."""
        if self.size == 1:
            return [value]
        self._outbox.append((f"{key}/{self.rank}", json.dumps(value)))
        return [json.loads(self._wait(f"{key}/{r}")) for r in range(self.size)]

    def raise_fault(self) -> None:
        """Raise StorageError if another rank has died or failed."""
        if self._fault is not None:
            raise StorageError(
                f"another rank stopped: {self._fault}",
                fix="look at that rank's output; what the others wrote was not published",
            )

    def leave(self, error: BaseException | None) -> None:
        """Tell the others why this rank stops, or wait until rank 0 has published.

        Rank 0 may hold the store, so it goes last. Raises StorageError if rank 0 has not published.
        """
        if self.size == 1:
            return
        try:
            if error is None:
                self.share("published", True)
            else:
                self.fail(error)
        finally:
            self._outbox.append((f"out/{self.rank}", "true"))
            if self.rank == 0:
                self._linger()
            self._done.set()
            self._messenger.join(_LINGER)

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank stops; where that is another's fault, tell that one's."""
        if self.size > 1 and not self._failed:
            self._failed = True
            own = str(error) if isinstance(error, Exception) else "it was stopped"
            self._outbox.append(("fault", json.dumps(self._fault or f"rank {self.rank}: {own}")))

    def _linger(self) -> None:
        until, others = time.monotonic() + _LINGER, [f"out/{r}" for r in range(1, self.size)]
        self._inbox |= dict.fromkeys(others)
        while self._messenger.is_alive() and time.monotonic() < until:
            if all(self._inbox[key] for key in others):
                break
            time.sleep(_LOOK)

    def _wait(self, key: str) -> bytes:
        self._inbox[key] = None
        while (found := self._inbox[key]) is None:
            if time.monotonic() - self._answered > _DEAD:
                self._lost(f"rank 0 has not answered for {_DEAD:.0f} s")
            self.raise_fault()
            time.sleep(_LOOK)
        del self._inbox[key]
        return found

    def _lost(self, why: str) -> None:
        if self._fault is None:
            self._fault = why
        self.stop.set()

    def _serve(self) -> None:
        """The messenger: beats, listens, brings and fetches."""
        heard = dict.fromkeys(range(1, self.size) if self.rank == 0 else [0], (0, time.monotonic()))
        count, due = 0, 0.0
        try:
            while not self._done.is_set():
                if time.monotonic() >= due:
                    count, due = count + 1, time.monotonic() + _BEAT
                    self._store.set(f"beat/{self.rank}", str(count))
                    self._listen(heard)
                self._deliver()
                self._answered = time.monotonic()
                time.sleep(_LOOK)
            self._deliver()
        except RuntimeError as error:
            self._lost(f"rank 0 cannot be reached ({str(error).splitlines()[0]})")

    def _deliver(self) -> None:
        while self._outbox:
            self._store.set(*self._outbox.popleft())
        for key, found in list(self._inbox.items()):
            if found is None and self._store.check([key]):
                self._inbox[key] = self._store.get(key)

    def _listen(self, heard: dict[int, tuple[int, float]]) -> None:
        if self._fault is None and not self._failed and self._store.check(["fault"]):
            self._lost(json.loads(self._store.get("fault")))
        for rank, (last, when) in heard.items():
            now = int(self._store.get(f"beat/{rank}")) if self._store.check([f"beat/{rank}"]) else 0
            silent = time.monotonic() - when
            if now != last:
                heard[rank] = (now, time.monotonic())
            elif silent > (_DEAD if last else _JOIN) and not self._store.check([f"out/{rank}"]):
                self._lost(f"rank {rank} has not been heard for {silent:.0f} s")
                if self.rank == 0:
                    self._store.set("fault", json.dumps(self._fault))


@contextmanager
def joined_world() -> Iterator[World]:
    """The world that torchrun's environment describes, or a process alone. Raises UsageError."""
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if size == 1:
        yield World()
        return
    if rank >= size:
        raise UsageError(f"RANK {rank} is not below WORLD_SIZE {size}", fix="start all ranks with torchrun")
    world = World(rank, size, _store())
    try:
        yield world
    except BaseException as error:
        world.leave(error)
        if isinstance(error, ConvtoolsError):
            world.raise_fault()  # the reason, where this rank only met what another left behind
        raise
    world.leave(None)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < default:
        raise UsageError(
            f"{name}={text} in the environment", expected=f"a number from {default}", fix=f"unset {name}"
        )
    return int(text)


def _store() -> Any:
    """The key-value store of all ranks, torchrun's own or held by rank 0. Raises UsageError."""
    # the C++ side prints its stack for every lost connection; what that means is said by our errors
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        import torch.distributed
    except ImportError:
        raise UsageError("several ranks need PyTorch", fix="pip install torch") from None
    from datetime import timedelta

    dist: Any = torch.distributed
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=_JOIN)))
    except (RuntimeError, ValueError, OSError) as error:
        raise UsageError(
            "the ranks do not find each other",
            where=f"MASTER_ADDR:MASTER_PORT = {where}",
            found=str(error).splitlines()[0],
            fix="start all ranks with torchrun, or, for a single process, unset WORLD_SIZE",
        ) from error
    return dist.PrefixStore(f"convtools/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
