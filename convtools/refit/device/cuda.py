"""Memory of an NVIDIA GPU that another process can open, by the driver's own calls.

Blocks come from `cuMemAlloc` and from no allocator of torch: expandable segments and pools of virtual
memory, which cannot be exported so, have no part in them, and a handle shows nothing but staging buffers.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from convtools.errors import UsageError
from convtools.refit.device.memory import CUDA, HANDLE_NBYTES, ID_NBYTES, Block, Counts
from convtools.refit.errors import PeerError, RefitError

_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1
_MIG = "a MIG instance cannot share memory between processes"


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_NBYTES),)


_POINTER, _SIZE, _INT = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int
_CONTEXT, _OUT = ctypes.c_void_p, ctypes.c_void_p
_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (_OUT, _INT),
    "cuDeviceGetUuid": (_OUT, _INT),
    "cuDeviceGetUuid_v2": (_OUT, _INT),
    "cuDevicePrimaryCtxRetain": (_OUT, _INT),
    "cuCtxPushCurrent_v2": (_CONTEXT,),
    "cuCtxPopCurrent_v2": (_OUT,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (_OUT, _SIZE),
    "cuMemFree_v2": (_POINTER,),
    "cuMemGetAddressRange_v2": (_OUT, _OUT, _POINTER),
    "cuIpcGetMemHandle": (_OUT, _POINTER),
    "cuIpcOpenMemHandle_v2": (_OUT, IpcHandle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_POINTER,),
    "cuGetErrorName": (_INT, _OUT),
}


class Driver:
    """The calls that are needed, of the device with that index; each either works or raises RefitError."""

    def __init__(self, index: int, library: str = _LIBRARY) -> None:
        """Raises UsageError where there is no driver, RefitError where it has no such device."""
        try:
            self._library = ctypes.CDLL(library)
            for name, arguments in _CALLS.items():
                call = getattr(self._library, name)
                call.argtypes, call.restype = arguments, _INT
        except (OSError, AttributeError) as error:
            raise UsageError("no CUDA driver of 11.4 or later", found=str(error)) from None
        self.call("cuInit", 0)
        device, context = _INT(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), index)
        self.uuid, part = self._uuid("cuDeviceGetUuid", device), self._uuid("cuDeviceGetUuid_v2", device)
        if part != self.uuid:  # the first names the whole GPU, the second what of it this process has
            raise UsageError(_MIG, expected="a whole GPU", found=f"MIG-{part.hex()} of GPU-{self.uuid.hex()}")
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)  # for life: it is torch's
        self._context = context

    def call(self, name: str, *arguments: Any) -> None:
        """Raises RefitError, with the driver's own name for what went wrong."""
        code = getattr(self._library, name)(*arguments)
        if code:
            said = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(said))
            raise RefitError(f"{name}: {(said.value or b'unknown error').decode()}", found=f"code {code}")

    def _uuid(self, name: str, device: ctypes.c_int) -> bytes:
        made = ctypes.create_string_buffer(ID_NBYTES)
        self.call(name, made, device)
        return made.raw

    @contextmanager
    def _current(self) -> Iterator[None]:
        """The device's primary context, whatever this thread had."""
        self.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def allocate(self, nbytes: int) -> int:
        """Address of a block of its own."""
        made = _POINTER()
        with self._current():
            self.call("cuMemAlloc_v2", ctypes.byref(made), nbytes)
        return made.value

    def free(self, address: int) -> None:
        """Give it back."""
        with self._current():
            self.call("cuMemFree_v2", address)

    def export(self, address: int) -> bytes:
        """Its handle."""
        made = IpcHandle()
        with self._current():
            self.call("cuIpcGetMemHandle", ctypes.byref(made), address)
        return bytes(made)

    def open(self, handle: bytes, nbytes: int) -> int:
        """Address, here, of a block of at least `nbytes` of another process."""
        made, size = _POINTER(), _SIZE()
        with self._current():
            given = IpcHandle.from_buffer_copy(handle)
            self.call("cuIpcOpenMemHandle_v2", ctypes.byref(made), given, _LAZY_PEER_ACCESS)
            try:
                self.call("cuMemGetAddressRange_v2", None, ctypes.byref(size), made)
                if size.value < nbytes:
                    raise PeerError("the ring is of another size", expected=nbytes, found=size.value)
            except RefitError:
                self.call("cuIpcCloseMemHandle", made)
                raise
        return made.value

    def close(self, address: int) -> None:
        """Let go of what was opened."""
        with self._current():
            self.call("cuIpcCloseMemHandle", address)

    def settle(self) -> None:
        """Wait for all streams."""
        with self._current():
            self.call("cuCtxSynchronize")


class _OnDevice:
    """Memory as torch takes it over."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2, "strides": None,
        }  # fmt: skip


class CudaMemory:
    """Blocks on one GPU."""

    kind, others_only = CUDA, True

    def __init__(self, index: int) -> None:
        """Raises UsageError where there is no such GPU, or it cannot share memory."""
        import torch

        if torch.version.hip is not None or not torch.cuda.is_available():
            raise UsageError("no CUDA device here", fix="leave `device` out: buckets go through the host")
        if not 0 <= index < torch.cuda.device_count():
            raise UsageError(f"no device cuda:{index}", found=f"{torch.cuda.device_count()} devices")
        if " MIG " in (name := torch.cuda.get_device_name(index)):
            raise UsageError(_MIG, expected="a whole GPU", found=name)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.counts, self._device, self._driver = Counts(), torch.device(CUDA, index), Driver(index)
        self.uuid = self._driver.uuid

    def _block(self, address: int, nbytes: int) -> Block:
        import torch

        tensor = torch.as_tensor(_OnDevice(address, nbytes), device=self._device)
        if tensor.data_ptr() != address:
            raise RefitError("torch copied the staging memory instead of using it")
        return Block(tensor, address)

    def allocate(self, nbytes: int) -> Block:
        """By `cuMemAlloc`."""
        address = self._driver.allocate(nbytes)
        self.counts.allocated += 1
        return self._block(address, nbytes)

    def export(self, block: Block) -> tuple[bytes, int]:
        """Its IPC handle."""
        handle = self._driver.export(block.held)
        self.counts.exported += 1
        return handle, -1

    def open(self, handle: bytes, fd: int | None, nbytes: int) -> Block:
        """By the handle."""
        if fd is not None:
            os.close(fd)
            raise PeerError("a descriptor came with memory of a GPU")
        address = self._driver.open(handle, nbytes)
        self.counts.opened += 1
        return self._block(address, nbytes)

    def close(self, block: Block) -> None:
        """After whatever still reads it."""
        self._driver.settle()
        self._driver.close(block.held)
        self.counts.closed += 1

    def free(self, block: Block) -> None:
        """By `cuMemFree`."""
        self._driver.settle()
        self._driver.free(block.held)
        self.counts.freed += 1

    def settle(self) -> None:
        """Wait for all streams of the device."""
        self._driver.settle()
