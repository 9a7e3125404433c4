"""The ranks of one refit talk here: a gloo group of their own, a deadline on every wait.

A group of its own, because gloo closes a group for good when a wait in it times out: the trainer's own
groups must live on. Bytes only, framed by us: what torch would pickle is not used.
"""

import secrets
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from convtools.errors import ConvtoolsError, UsageError, capped, tick
from convtools.refit.errors import FrameError, PeerError
from convtools.refit.framing import MAX_FRAME

if TYPE_CHECKING:
    import torch

_A = TypeVar("_A")
_MEETINGS: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(count)
CONTROL, HEADER, DATA = 71, 72, 73
"""Tags: commands, what precedes a bucket's bytes, the bytes."""
_COMMAND = struct.Struct("<4sIQ")
_MAGIC = b"cvG1"
_MAKING = 60.0
"""Seconds that ranks may be apart when they make the group: every later wait has its own deadline."""
_LAST_WORD = 3.0
"""Seconds that the others look for what the lead said last, once the group is broken."""


class RankGroup:
    """Some ranks of a torch.distributed job; rank 0 of the group leads."""

    def __init__(self, group: Any = None, timeout: float = 60.0) -> None:
        """Collective over the ranks of `group` (None: all). Raises UsageError, PeerError."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                "several ranks need torch.distributed", fix="call torch.distributed.init_process_group first"
            )
        self.timeout = timeout
        self.broken = ""
        """Why the group cannot be used any more."""
        members = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
        if dist.get_rank() not in members:
            raise UsageError("this process is no rank of the group")
        self.rank, self.size = members.index(dist.get_rank()), len(members)
        # By its members and how often they met: ranks that are in other groups too count alike.
        name = f"convtools-refit/{'-'.join(map(str, members))}/{next(_MEETINGS[members])}"
        self._group: Any = self._guarded(lambda: self._made(name), "the making of a group")
        self._words = f"convtools-refit/{self.exchange(secrets.token_bytes(8))[0].hex()}"

    def _made(self, name: str) -> Any:
        try:
            from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo
        except ImportError:
            raise UsageError("this torch has no gloo", fix="install one with torch.distributed") from None
        # Not by new_group: it is for all ranks of a job, or counts groups that not all ranks are in.
        store = PrefixStore(name, self._store())
        return ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=max(self.timeout, _MAKING)))

    @property
    def leads(self) -> bool:
        """Whether this is the rank that talks to the engines."""
        return self.rank == 0

    def exchange(self, data: bytes, timeout: float | None = None) -> list[bytes]:
        """Every rank's bytes, in order of the ranks. Raises PeerError, FrameError."""
        import torch

        until = time.monotonic() + (self.timeout if timeout is None else timeout)
        if len(data) > MAX_FRAME:
            raise FrameError("a rank has too much to say", expected=f"at most {MAX_FRAME} bytes")
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._all_gather(sizes, torch.tensor([len(data)]), until)
        lengths = [int(s) for s in sizes]
        if not all(0 <= n <= MAX_FRAME for n in lengths):
            raise FrameError("a rank has too much to say", expected=f"at most {MAX_FRAME} bytes")
        mine = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._all_gather(found, mine, until)
        return [t[:n].numpy().tobytes() for t, n in zip(found, lengths, strict=True)]

    def _all_gather(self, into: "list[torch.Tensor]", mine: "torch.Tensor", until: float) -> None:
        from torch._C._distributed_c10d import AllgatherOptions

        options = AllgatherOptions()  # gloo's own deadline as well: the end of a group waits for its threads
        options.timeout = timedelta(seconds=max(until - time.monotonic(), 0.001))
        work = self._guarded(
            lambda: self._group.allgather([into], [mine], options),
            "an exchange of all ranks",
        )
        self.wait(work, until, "an exchange of all ranks")

    def post(self, tensor: "torch.Tensor", to: int, tag: int) -> Any:
        """Begin to send; the tensor must not change until the work is over. Raises PeerError."""
        return self._guarded(lambda: self._group.send([tensor], to, tag), f"rank {to}")

    def expect(self, tensor: "torch.Tensor", of: int, tag: int) -> Any:
        """Begin to receive. Raises PeerError."""
        return self._guarded(lambda: self._group.recv([tensor], of, tag), f"rank {of}")

    def broadcast(self, tensor: "torch.Tensor", of: int = 0) -> Any:
        """Begin to send to all, or to receive from `of`. Raises PeerError."""
        from torch._C._distributed_c10d import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.timeout = of, timedelta(seconds=self.timeout)
        return self._guarded(
            lambda: self._group.broadcast([tensor], options),
            "a broadcast",
        )

    def wait(self, work: Any, until: float, whom: str) -> None:
        """Until it is over. Raises PeerError, after which the group is broken, for it is for gloo."""
        left = max(until - time.monotonic(), 0.001)
        self._guarded(lambda: work.wait(timedelta(seconds=left)), whom)

    def command(
        self, kind: int, value: int = 0, to: Sequence[int] | None = None, payload: bytes = b""
    ) -> None:
        """Tell ranks (by default all others) what to do next. Raises PeerError, FrameError."""
        import torch

        if payload:
            value = len(payload)
        head = torch.frombuffer(bytearray(_COMMAND.pack(_MAGIC, kind, value)), dtype=torch.uint8)
        until, works = time.monotonic() + self.timeout, []
        for rank in range(self.size) if to is None else to:
            if rank == self.rank:
                continue
            works.append((rank, self.post(head, rank, CONTROL)))
            if payload:
                body = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
                works.append((rank, self.post(body, rank, CONTROL)))
        for rank, work in works:
            self.wait(work, until, f"rank {rank}")

    def told(
        self, timeout: float, of: int = 0, payloads: frozenset[int] = frozenset()
    ) -> tuple[int, int, bytes]:
        """(kind, value, payload) of the next command; kinds in `payloads` bring one. Raises PeerError."""
        import torch

        until = time.monotonic() + timeout
        head = torch.zeros(_COMMAND.size, dtype=torch.uint8)
        self.wait(self.expect(head, of, CONTROL), until, f"rank {of}")
        magic, kind, value = _COMMAND.unpack(head.numpy().tobytes())
        if magic != _MAGIC or (kind in payloads and value > MAX_FRAME):
            raise FrameError("what came from a rank is no command", found=magic)
        if kind not in payloads or not value:
            return kind, value, b""
        body = torch.zeros(value, dtype=torch.uint8)
        self.wait(self.expect(body, of, CONTROL), until, f"rank {of}")
        return kind, value, body.numpy().tobytes()

    def last_word(self, number: int, word: bytes) -> None:
        """Leave an outcome where ranks find it although the group is broken."""
        with suppress(Exception):  # the others then know that it failed, and not of what
            self._store().set(f"{self._words}/{number}", word.hex())

    def find_last_word(self, number: int) -> bytes | None:
        """What the lead left; None where there is nothing."""
        try:
            store, key = self._store(), f"{self._words}/{number}"
            store.wait([key], timedelta(seconds=_LAST_WORD))
            return bytes.fromhex(store.get(key).decode())
        except (RuntimeError, ValueError, ImportError):  # no store, or nothing in it
            return None

    def _store(self) -> Any:
        from torch.distributed.distributed_c10d import _get_default_store

        return _get_default_store()

    def _guarded(self, call: Callable[[], _A], whom: str) -> _A:
        if self.broken:
            raise PeerError(
                "the process group of this refit cannot be used any more", found=self.broken, fix=_AGAIN
            )
        try:
            return call()
        except ConvtoolsError:
            raise
        except (RuntimeError, ValueError) as error:  # gloo raises RuntimeError, and DistBackendError is one
            text = " ".join(str(error).split())[:300]
            slow = "timed out" in text.lower() or "timeout" in text.lower()
            what = f"{whom} did not answer in time" if slow else f"{whom} has gone"
            self.broken = f"{what}: {text}"
            raise PeerError(
                f"{what}; the process group of this refit cannot be used any more", found=text, fix=_AGAIN
            ) from None

    def close(self) -> None:
        """Give the group up; nobody is waited for."""
        self._group = None
        self.broken = self.broken or "it was closed"

    def name(self, ranks: Sequence[int]) -> str:
        """Ranks in an error."""
        return capped(f"rank {tick(str(r))}" for r in ranks)


_AGAIN = "see which rank died or hangs, then make the group and the WeightSync anew"
