"""How fast `compare` is, side by side in one run on a warm page cache, and what memory it takes.

    python bench/compare.py [--gb 1] [--rounds 5] [--legacy] [--scratch DIR]

`cmp` and `memcmp` compare the same bytes: `cmp` the files of two Hugging Face folders one after the other,
`memcmp` the same number of bytes that already lie in memory, and the files themselves, mapped.
"""

import argparse
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from bench.bench import config_of, convert, warm  # noqa: E402
from tests.nemotron_checkpoints import write_hf  # noqa: E402

_COMPARE = """
import json, re, sys, time
from convtools import CompareOptions, compare
best = 9e9
for _ in range(2):  # the first imports what the formats need
    began = time.perf_counter()
    found = compare(sys.argv[1], sys.argv[2], CompareOptions(workers=int(sys.argv[3])))
    best = min(best, time.perf_counter() - began)
    assert found.equal is True, found.verdict
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())
print(json.dumps([best, int(peak[1]) * 1024]))
"""


def compared(a: Path, b: Path, workers: int) -> tuple[float, int]:
    """(seconds of `compare`, peak RSS) in a process of its own."""
    command = [sys.executable, "-c", _COMPARE, str(a), str(b), str(workers)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=HERE.parent)
    seconds, peak = json.loads(done.stdout)
    return seconds, peak


def cmp_files(a: Path, b: Path) -> float:
    """Seconds of `cmp`, file by file."""
    began = time.perf_counter()
    for path in sorted(a.glob("*.safetensors")):
        subprocess.run(["cmp", path, b / path.name], check=True)
    return time.perf_counter() - began


class InMemory:
    """Two buffers of the checkpoint's size, compared by `memcmp` on threads."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = min(nbytes, 1 << 30)
        self.a, self.b = bytearray(os.urandom(1 << 20)) * (self.nbytes >> 20), bytearray()
        self.b = bytearray(self.a)
        self.scale = nbytes / len(self.a)
        self.at = [ctypes.addressof(ctypes.c_char.from_buffer(x)) for x in (self.a, self.b)]
        self.memcmp = ctypes.CDLL(None).memcmp
        self.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def run(self, workers: int) -> float:
        """Seconds for as many bytes as the checkpoint has."""
        part = len(self.a) // workers
        began = time.perf_counter()
        with ThreadPoolExecutor(workers) as pool:
            jobs = [
                pool.submit(self.memcmp, self.at[0] + i * part, self.at[1] + i * part, part)
                for i in range(workers)
            ]
            assert not any(job.result() for job in jobs)
        return (time.perf_counter() - began) * self.scale


def mapped(a: Path, b: Path) -> float:
    """Seconds of `memcmp` of the files, mapped."""
    began = time.perf_counter()
    for path in sorted(a.glob("*.safetensors")):
        with open(path, "rb") as one, open(b / path.name, "rb") as two:
            left, right = (mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE) for f in (one, two))
            at = [ctypes.addressof(ctypes.c_char.from_buffer(x)) for x in (left, right)]
            memcmp = ctypes.CDLL(None).memcmp
            memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
            assert memcmp(*at, len(left)) == 0
            del at, left, right
    return time.perf_counter() - began


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--legacy", action="store_true")
    parser.add_argument("--scratch", type=Path)
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(dir=options.scratch))
    try:
        measure(scratch, options.gb, options.rounds, options.legacy)
    finally:
        shutil.rmtree(scratch)


def measure(scratch: Path, gigabytes: float, rounds: int, with_legacy: bool) -> None:
    """All cases in turn, the best of all rounds."""
    a, b, dist, legacy = (scratch / name for name in ("a", "b", "dist", "legacy"))
    write_hf(a, config_of(gigabytes))
    shutil.copytree(a, b)
    convert(a, dist, "--to", "torch_dist", "--tp", "2", "--pp", "2", "--ep", "2", "--no-fsync")
    others = [("HF and HF", b), ("HF and torch_dist tp2 pp2 ep2", dist)]
    if with_legacy:
        convert(a, legacy, "--to", "torch", "--tp", "2", "--pp", "2", "--ep", "2", "--no-fsync")
        others.append(("HF and torch tp2 pp2 ep2", legacy))
    nbytes = sum(path.stat().st_size for path in a.glob("*.safetensors"))
    memory = InMemory(nbytes)
    cores = os.cpu_count() or 1
    peaks: dict[str, int] = {}

    def measured(name: str, other: Path, workers: int) -> Callable[[], float]:
        def run() -> float:
            seconds, peak = compared(a, other, workers)
            peaks[name] = max(peaks.get(name, 0), peak)
            return seconds

        return run

    cases: dict[str, Callable[[], float]] = {
        "cmp, file by file": lambda: cmp_files(a, b),
        "memcmp of the mapped files, 1 thread": lambda: mapped(a, b),
        "memcmp in memory, 1 thread": lambda: memory.run(1),
        f"memcmp in memory, {cores} threads": lambda: memory.run(cores),
    }
    for workers in dict.fromkeys((1, cores)):
        for name, other in others:
            label = f"{name}, {workers} thread{'s' if workers > 1 else ''}"
            cases[label] = measured(label, other, workers)
    best: dict[str, float] = {}
    for root in (a, b, dist, legacy):
        warm(root)
    for _ in range(rounds):
        for name, run in cases.items():
            best[name] = min(best.get(name, 9e9), run())
    print(f"\n{nbytes / 1e9:.2f} GB a side, best of {rounds}, warm page cache\n")
    print("| what | GB/s a side | times as fast as `cmp` | of `memcmp` in memory | of HF and HF | peak RSS |")
    print("|---|---|---|---|---|---|")
    for name, seconds in best.items():
        threads = 1 if name.endswith("1 thread") or name.startswith("cmp") else cores
        memcmp = best["memcmp in memory, 1 thread" if threads == 1 else f"memcmp in memory, {cores} threads"]
        hf = best["HF and HF, 1 thread" if threads == 1 else f"HF and HF, {cores} threads"]
        took = f"{seconds / hf:.2f}" if name.startswith("HF") else ""
        rss = f"{peaks[name] / 1e6:.0f} MB" if name in peaks else ""
        print(
            f"| {name} | {nbytes / seconds / 1e9:.2f} | {best['cmp, file by file'] / seconds:.2f} "
            f"| {memcmp / seconds:.2f} | {took} | {rss} |"
        )


if __name__ == "__main__":
    main()
