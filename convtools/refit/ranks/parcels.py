"""A bucket's bytes on their way from the ranks that hold them to the lead: a header, then one message."""

import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from convtools.errors import ConvtoolsError
from convtools.refit.bucket import checksum
from convtools.refit.errors import FrameError, RefitError
from convtools.refit.ranks import steps
from convtools.refit.ranks.group import DATA, HEADER, RankGroup
from convtools.refit.ranks.legs import Message

if TYPE_CHECKING:
    import torch

_HEADER = struct.Struct("<4sBxxxQQ16s")
HEADER_NBYTES = _HEADER.size
_MAGIC = b"cvP1"
_FAULT_MOST = 1 << 16


@dataclass(frozen=True, slots=True)
class Head:
    """What precedes the bytes."""

    index: int
    nbytes: int
    checksum: bytes
    failed: bool = False

    def pack(self) -> "torch.Tensor":
        """As bytes."""
        return as_tensor(_HEADER.pack(_MAGIC, self.failed, self.index, self.nbytes, self.checksum))


def read_head(data: "torch.Tensor", index: int, nbytes: int, whom: str) -> Head:
    """The header of bucket `index`, of `nbytes` bytes. Raises FrameError."""
    magic, failed, found, length, mark = _HEADER.unpack(data.numpy().tobytes())
    if magic != _MAGIC or found != index or (length > _FAULT_MOST if failed else length != nbytes):
        raise FrameError(
            f"{whom} sent something else", expected=f"{nbytes} bytes of bucket {index}",
            found=f"{length} of {found}",
        )  # fmt: skip
    return Head(found, length, mark, bool(failed))


def view_of(data: "torch.Tensor") -> memoryview:
    """The bytes of a tensor of the CPU, where they lie."""
    array: Any = data.numpy()
    return memoryview(array)


def as_tensor(data: bytes) -> "torch.Tensor":
    """Bytes that may be sent."""
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def check_parcel(head: Head, data: "torch.Tensor", whom: str) -> None:
    """Raises FrameError for bytes that changed on their way, the error that came in their place."""
    view = view_of(data)
    if head.failed:
        error = steps.error_of(steps.decode(bytes(view), steps.Failure))
        raise type(error)(f"{whom}: {error.what}", where=error.where, found=error.found, fix=error.fix)
    if checksum(view) != head.checksum:
        raise FrameError(f"what {whom} sent of bucket {head.index} was altered on its way")


class Parcels:
    """The lead's and the others' end; staging memory that is made once and is of a bucket at most."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._room: Any = None
        self._got: dict[int, torch.Tensor] = {}
        self._due: dict[int, Head] = {}
        """Ranks whose bytes are still to be received, straight to where they belong."""
        self._said: dict[int, float] = {}

    def _staging(self, nbytes: int) -> "torch.Tensor":
        import torch

        if self._room is None or len(self._room) < nbytes:
            self._room = torch.zeros(nbytes, dtype=torch.uint8)
        room: torch.Tensor = self._room[:nbytes]
        return room

    def ask(self, index: int, messages: Mapping[int, Message]) -> None:
        """Have every rank send its message of a bucket; those that lie together are left to `receive`.

        Raises PeerError, FrameError, and what a rank says went wrong there.
        """
        import torch

        self._got = {}
        others = {rank: m for rank, m in messages.items() if rank != self._group.rank}
        if not others:
            return
        until = time.monotonic() + self._group.timeout
        self._group.command(steps.BUCKET, index, to=list(others))
        heads = {rank: torch.zeros(HEADER_NBYTES, dtype=torch.uint8) for rank in others}
        works = {rank: self._group.expect(head, rank, HEADER) for rank, head in heads.items()}
        packed = [rank for rank, m in others.items() if m.direct is None]
        room = self._staging(sum(-(-others[rank].nbytes // 256) * 256 for rank in packed))
        at, faults, coming = 0, [], []
        for rank, message in others.items():
            self._said[rank] = time.monotonic()
            self._group.wait(works[rank], until, f"rank {rank}")
            head = read_head(heads[rank], index, message.nbytes, f"rank {rank}")
            if head.failed:
                into = torch.zeros(head.nbytes, dtype=torch.uint8)
            elif message.direct is not None:
                self._due[rank] = head
                continue
            else:
                into, at = room[at : at + message.nbytes], at + -(-message.nbytes // 256) * 256
                self._got[rank] = into
            coming.append((rank, head, into, self._group.expect(into, rank, DATA)))
        for rank, head, into, work in coming:
            self._group.wait(work, until, f"rank {rank}")
            try:
                check_parcel(head, into, f"rank {rank}")
            except ConvtoolsError as error:  # the others' bytes are received all the same
                faults.append(error)
        if faults:
            raise faults[0]

    def of(self, rank: int) -> "torch.Tensor":
        """What a rank sent of the bucket that was asked for."""
        return self._got[rank]

    def receive(self, rank: int, to: "torch.Tensor") -> None:
        """A message straight into its place. Raises PeerError, FrameError."""
        head = self._due.pop(rank)
        until = time.monotonic() + self._group.timeout
        self._group.wait(self._group.expect(to, rank, DATA), until, f"rank {rank}")
        check_parcel(head, to, f"rank {rank}")

    def drain(self) -> None:
        """Receive what is still due, and forget it: the push was given up in the middle of a bucket."""
        import torch

        for rank, head in list(self._due.items()):
            del self._due[rank]
            into = torch.zeros(head.nbytes, dtype=torch.uint8)
            self._group.wait(
                self._group.expect(into, rank, DATA), time.monotonic() + self._group.timeout, f"rank {rank}"
            )

    def keep_waiting(self, after: float) -> None:
        """Tell ranks that were told nothing for so many seconds that the lead is alive."""
        now = time.monotonic()
        silent = [
            rank for rank in range(self._group.size)
            if rank != self._group.rank and now - self._said.setdefault(rank, now) > after
        ]  # fmt: skip
        if silent:
            self._group.command(steps.ALIVE, to=silent)
            self._said |= dict.fromkeys(silent, now)

    def send(self, index: int, nbytes: int, pack: Callable[["torch.Tensor"], None], patience: float) -> None:
        """A follower's message: packed here, or the error in its place. Raises PeerError."""
        room = self._staging(nbytes)
        try:
            pack(room)
            head = Head(index, nbytes, checksum(view_of(room)))
        except ConvtoolsError as error:
            room, head = _fault(index, error)
        except (RuntimeError, MemoryError) as error:  # a device's own
            room, head = _fault(index, RefitError(f"{type(error).__name__}: {str(error)[:300]}"))
        until = time.monotonic() + patience
        works = [self._group.post(head.pack(), 0, HEADER), self._group.post(room, 0, DATA)]
        for work in works:
            self._group.wait(work, until, "rank 0")


def _fault(index: int, error: BaseException) -> tuple["torch.Tensor", Head]:
    said = steps.encode(steps.failure_of(error))[:_FAULT_MOST]
    return as_tensor(said), Head(index, len(said), b"\0" * 16, failed=True)
