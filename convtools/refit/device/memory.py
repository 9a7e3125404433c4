"""Memory of a device that another process can open: all that the channel knows about the device.

Two kinds: a GPU's (cuda.py), and the CPU's (`HostMemory`), by which everything else is tested without one.
"""

import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from convtools.errors import UsageError
from convtools.refit.bucket import Ring, RingView
from convtools.refit.errors import PeerError

if TYPE_CHECKING:
    import torch

CUDA, HOST = "cuda", "host"
HANDLE_NBYTES, ID_NBYTES = 64, 16


@dataclass
class Counts:
    """What was done in this process."""

    allocated: int = 0
    freed: int = 0
    exported: int = 0
    """Handles given to a reader."""
    opened: int = 0
    closed: int = 0


class Block(NamedTuple):
    """One allocation, or one that another process made and this one opened."""

    tensor: "torch.Tensor"
    """Its bytes."""
    held: Any
    """By which it is given back."""


class DeviceMemory(Protocol):
    """Memory of one device."""

    kind: str
    uuid: bytes
    """Of the device, 16 bytes: an index means another device in another process."""
    others_only: bool
    """Whether a process cannot open what it made itself."""
    counts: Counts

    def allocate(self, nbytes: int) -> Block:
        """A block of its own, in no pool. Raises RefitError."""

    def export(self, block: Block) -> tuple[bytes, int]:
        """(handle of 64 bytes, descriptor that goes with it or -1). Raises RefitError."""

    def open(self, handle: bytes, fd: int | None, nbytes: int) -> Block:
        """What another process exported; takes `fd`. Raises RefitError."""

    def close(self, block: Block) -> None:
        """Let go of what was opened."""

    def free(self, block: Block) -> None:
        """Give back what was allocated; nobody has it open any more."""

    def settle(self) -> None:
        """Wait until all that was asked of the device is done."""


class _One(Ring):
    least = 1


class _Bytes:
    """Memory as numpy sees it. Torch warns of what is read-only, and only ever reads this."""

    def __init__(self, address: int, nbytes: int, held: Any) -> None:
        self.__array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip
        self.held = held


def as_tensor(data: Any) -> "torch.Tensor":
    """Bytes as a torch tensor over the same memory; it must not be written where `data` cannot be."""
    import numpy as np
    import torch

    if isinstance(data, torch.Tensor):
        return data
    array = np.frombuffer(data, "u1") if not isinstance(data, np.ndarray) else data
    if not array.size:
        return torch.empty(0, dtype=torch.uint8)
    lies = _Bytes(int(array.__array_interface__["data"][0]), array.size, array)
    return torch.from_numpy(np.asarray(lies))


class HostMemory:
    """Sealed memory of the CPU, as torch tensors."""

    kind, others_only = HOST, False

    def __init__(self, uuid: bytes = b"convtools' host\0") -> None:
        self.uuid, self.counts = uuid, Counts()

    def allocate(self, nbytes: int) -> Block:
        """A memfd."""
        ring = _One(nbytes, 1)
        self.counts.allocated += 1
        return Block(as_tensor(ring.slot(0, nbytes)), ring)

    def export(self, block: Block) -> tuple[bytes, int]:
        """Its descriptor."""
        self.counts.exported += 1
        return bytes(HANDLE_NBYTES), block.held.fd

    def open(self, handle: bytes, fd: int | None, nbytes: int) -> Block:
        """Map it, to read."""
        if fd is None:
            raise PeerError("no descriptor came with the plan")
        view = RingView(fd, nbytes, 1)
        self.counts.opened += 1
        return Block(as_tensor(view.slot(0, nbytes)), view)

    def close(self, block: Block) -> None:
        """Unmap it."""
        self.counts.closed += 1
        block.held.close()

    def free(self, block: Block) -> None:
        """Unmap it."""
        self.counts.freed += 1
        block.held.close()

    def settle(self) -> None:
        """The CPU is done when it says so."""


def memory_of(device: Any) -> DeviceMemory:
    """Of `cuda`, `cuda:1`, a torch device, or as given. Raises UsageError where there is no such device."""
    if hasattr(device, "allocate"):
        given: DeviceMemory = device
        return given
    import torch

    try:
        named = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"no such device: {device!r}", found=str(error).splitlines()[0]) from None
    if named.type == "cpu":
        return HostMemory()
    if named.type != CUDA:
        raise UsageError("no buckets on such a device", expected="cuda", found=str(device))
    from convtools.refit.device.cuda import CudaMemory

    return CudaMemory(torch.cuda.current_device() if named.index is None else named.index)


_process: tuple[int, bytes] = (0, b"")


def process_id() -> bytes:
    """16 bytes that no other process has: pids repeat between containers."""
    global _process
    if _process[0] != os.getpid():
        _process = (os.getpid(), secrets.token_bytes(ID_NBYTES))
    return _process[1]
