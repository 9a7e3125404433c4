"""How the CUDA driver is called, against a library with the same calls over malloc: there is no GPU in it.

It shows that arguments are passed as cuda.h declares them, that every context that is pushed is popped, and
that errors are told by name. What a driver and a GPU really do only `pytest -m gpu` shows.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from convtools.errors import UsageError
from convtools.refit.device.cuda import Driver
from convtools.refit.errors import PeerError, RefitError


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of the driver")
    made = tmp_path_factory.mktemp("driver") / "libstub.so"
    source = Path(__file__).with_name("stub_driver.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    return str(made)


def counter(library: str, name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(ctypes.CDLL(library), name)


def test_a_block_goes_round(library: str) -> None:
    driver = Driver(0, library)
    assert driver.uuid == bytes([40]) * 16
    address = driver.allocate(4096)
    handle = driver.export(address)
    assert len(handle) == 64 and counter(library, "stub_live").value == 1
    opened = driver.open(handle, 4096)
    assert opened == address and counter(library, "stub_open").value == 1
    ctypes.memset(opened, 1, 4096)
    driver.settle()
    with pytest.raises(RefitError, match="cuMemFree_v2"):  # somebody has it open
        driver.free(address)
    driver.close(opened)
    driver.free(address)
    assert [counter(library, f"stub_{n}").value for n in ("live", "open", "depth")] == [0, 0, 0]


def test_what_goes_wrong_has_the_drivers_name(library: str) -> None:
    driver = Driver(0, library)
    with pytest.raises(RefitError, match=r"cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_HANDLE"):
        driver.open(bytes(64), 4096)
    address = driver.allocate(4096)
    with pytest.raises(PeerError, match="the ring is of another size"):
        driver.open(driver.export(address), 4097)
    assert counter(library, "stub_open").value == 0
    fail = counter(library, "stub_fail")
    for code, name in (
        (2, "CUDA_ERROR_OUT_OF_MEMORY"),
        (801, "CUDA_ERROR_NOT_SUPPORTED"),
        (77, "unknown error"),
    ):
        fail.value = code
        try:
            with pytest.raises(RefitError, match=f"cuMemAlloc_v2: {name}"):
                driver.allocate(1)
            with pytest.raises(RefitError, match=f"cuIpcGetMemHandle: {name}"):
                driver.export(address)
        finally:
            fail.value = 0
    driver.free(address)
    assert [counter(library, f"stub_{n}").value for n in ("live", "open", "depth")] == [0, 0, 0]
    with pytest.raises(RefitError, match="cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"):
        Driver(1, library)


def test_a_part_of_a_gpu_is_refused(library: str) -> None:
    mig = counter(library, "stub_mig")
    mig.value = 1
    try:
        with pytest.raises(UsageError, match="MIG"):
            Driver(0, library)
    finally:
        mig.value = 0


def test_where_there_is_no_driver() -> None:
    with pytest.raises(UsageError, match=r"no CUDA driver of 11\.4"):
        Driver(0, "libnothing.so.1")
    with pytest.raises(UsageError, match=r"no CUDA driver of 11\.4"):
        Driver(0, "libc.so.6")
