"""The ring of buckets on a device: allocated once, opened once by each engine, closed before it is freed."""

import os
import time
import warnings
from typing import Any

from convtools.refit.bucket import Ring, check_ring, check_slot
from convtools.refit.channels.connection import Connection
from convtools.refit.device.memory import Block, DeviceMemory, process_id
from convtools.refit.errors import PeerError, RefitError
from convtools.refit.protocol import Agree, DeviceRow

CLOSE_SECONDS = 10.0
"""How long readers may take to close their mapping once they are told to."""


class DeviceRing(Ring):
    """The trainer's end. A slot is a torch tensor of bytes."""

    def __init__(self, bucket_bytes: int, slots: int, memory: DeviceMemory) -> None:
        """Raises UsageError for sizes that cannot be, RefitError where there is no memory for it."""
        check_ring(bucket_bytes, slots, self.least)
        self.bucket_bytes, self.slots, self.fd = bucket_bytes, slots, -1
        self.device = memory
        self._readers: list[Connection] = []
        self._scratch = bytearray()
        self._block: Block | None = memory.allocate(bucket_bytes * slots)

    def slot(self, i: int, nbytes: int) -> Any:
        """The first `nbytes` of buffer `i`. Raises RefitError where there is no such buffer."""
        check_slot(self, i, nbytes)
        return self._open().tensor[i * self.bucket_bytes : i * self.bucket_bytes + nbytes]

    def _open(self) -> Block:
        if self._block is None:
            raise RefitError("this memory was given back")
        return self._block

    def scratch(self, nbytes: int) -> memoryview:
        """Memory of the host, for a source that gathers there; made when it is first asked for."""
        if not self._scratch:
            self._scratch = bytearray(self.bucket_bytes)
        return memoryview(self._scratch)[:nbytes]

    @property
    def staging_bytes(self) -> int:
        """The buffers on the device, and the one on the host where the source needs it."""
        return self.nbytes + len(self._scratch)

    def export(self) -> DeviceRow:
        """What a reader must know; its descriptor is then `fd`. Raises RefitError."""
        handle, self.fd = self.device.export(self._open())
        return DeviceRow(self.device.kind, self.device.uuid, handle, self.nbytes, process_id())

    def hold(self, reader: Connection) -> None:
        """The connection of a reader that may still have it open, told to let go."""
        reader.finish()
        self._readers = [r for r in self._readers if not r.ended(0)]
        self._readers.append(reader)

    def close(self) -> None:
        """Free the memory after its last reader has closed it; what a reader keeps is kept here too."""
        block, self._block, self.fd = self._block, None, -1
        readers, self._readers = self._readers, []
        until = time.monotonic() + CLOSE_SECONDS
        kept = [reader for reader in readers if not reader.ended(max(0.0, until - time.monotonic()))]
        if block is None:
            return
        if kept:  # to free what another process has open is undefined
            for reader in kept:
                reader.close()
            warnings.warn(
                f"{len(kept)} engines did not let go of staging memory: it is freed when this process ends",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip
            _never_freed.append(block)
            return
        self.device.free(block)


_never_freed: list[Block] = []


class DeviceView:
    """The engine's end."""

    def __init__(self, block: Block, bucket_bytes: int, slots: int, memory: DeviceMemory) -> None:
        self.bucket_bytes, self.slots, self._memory = bucket_bytes, slots, memory
        self._block: Block | None = block

    def slot(self, i: int, nbytes: int) -> Any:
        """The first `nbytes` of buffer `i`. Raises RefitError where there is no such buffer."""
        check_slot(self, i, nbytes)
        if self._block is None:
            raise RefitError("this memory was given back")
        return self._block.tensor[i * self.bucket_bytes : i * self.bucket_bytes + nbytes]

    def close(self) -> None:
        """Once."""
        block, self._block = self._block, None
        if block is not None:
            self._memory.close(block)


def open_view(message: Agree, row: DeviceRow, fd: int | None, memory: DeviceMemory | None) -> DeviceView:
    """Open a trainer's ring; takes `fd`. Raises PeerError, RefitError before anything is opened for a lie."""
    try:
        _check(message, row, memory)
    except PeerError:
        if fd is not None:
            os.close(fd)
        raise
    assert memory is not None
    return DeviceView(memory.open(row.handle, fd, row.nbytes), message.bucket_bytes, message.slots, memory)


def _check(message: Agree, row: DeviceRow, memory: DeviceMemory | None) -> None:
    if memory is None:
        raise PeerError("this engine takes no buckets on a device", fix="give its Server the `device`")
    if row.kind != memory.kind:
        raise PeerError("the buckets lie on another kind of device", expected=memory.kind, found=row.kind)
    if row.device != memory.uuid:
        raise PeerError(
            "the buckets lie on another device",
            expected=f"GPU-{memory.uuid.hex()}", found=f"GPU-{row.device.hex()}",
            fix="give the trainer and this engine the same GPU, or push through the host",
        )  # fmt: skip
    if row.nbytes != message.bucket_bytes * message.slots:
        raise PeerError(
            "the ring is of another size", expected=message.bucket_bytes * message.slots, found=row.nbytes
        )
    if memory.others_only and row.process == process_id():
        raise PeerError(
            "the trainer is in the engine's own process, which cannot open its own memory",
            fix="use a DirectSink",
        )
