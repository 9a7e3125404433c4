"""How fast fingerprints are, beside memcpy and other hashes, in one run.

    python bench/fingerprint.py [--gb 1] [--rounds 7] [--scratch DIR]

In memory: one core, warm buffers. On files: the same checkpoint as a Hugging Face folder and as
torch_dist at TP2, from a warm page cache. Every way in turn in each round, and the best of all rounds
counts. Time is that of the CPU, of all threads: on a shared machine the clock on the wall tells how much
others do, and it tells so most about what takes longest.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # numpy's matrix product would take all cores
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import numpy as np  # noqa: E402
import xxhash  # noqa: E402

from bench.bench import config_of, convert, warm  # noqa: E402
from convtools.equality.fingerprint import Fingerprint, fingerprint_bytes, paths  # noqa: E402
from convtools.equality.fingerprint_store import fingerprint  # noqa: E402
from convtools.layout.plan import Move, Stride  # noqa: E402
from tests.nemotron_checkpoints import write_hf  # noqa: E402


def best(cases: dict[str, tuple[int, Callable[[], object]]], rounds: int) -> dict[str, float]:
    """Bytes a CPU second of each case, the best of all rounds."""
    rates: dict[str, float] = {}
    for _ in range(rounds):
        for name, (nbytes, run) in cases.items():
            began = time.process_time()
            run()
            rates[name] = max(rates.get(name, 0.0), nbytes / (time.process_time() - began))
    return rates


def table(rates: dict[str, float], base: str) -> None:
    print(f"\n| what | ratio to {base} | GB a CPU second |\n|---|---|---|")
    for name, rate in rates.items():
        print(f"| {name} | {rate / rates[base]:.2f} | {rate / 1e9:.2f} |")


def in_memory(nbytes: int, rounds: int) -> None:
    """Bytes in warm buffers, on one core."""
    data = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    copy = np.ones_like(data)
    small = data[: nbytes // 10]

    def columns(path: str) -> object:
        """A column-parallel half: runs of 2 KiB, every other 2 KiB of the tensor."""
        part = small if path == "numpy" else data
        made = Fingerprint(path)
        rows = len(part) // 2048
        made.add_move(Move(0, 0, (Stride(rows, 4096, 2048),), 2048), 1, part)
        return made.value

    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "memcpy": (nbytes, lambda: np.copyto(copy, data)),
        "xxh3-128": (nbytes, lambda: xxhash.xxh3_128_digest(data.data)),
        "sha256": (len(small), lambda: hashlib.sha256(small.data).digest()),
    }
    for path in paths():
        part = small if path == "numpy" else data
        cases[f"fingerprint, {path}"] = (len(part), lambda p=path, d=part: fingerprint_bytes(d, path=p))
        cases[f"fingerprint, {path}, column shard"] = (len(part), lambda p=path: columns(p))
    if "compiled" in paths():
        from convtools.equality import fingerprint_kernel

        def plain() -> None:
            before = fingerprint_kernel.vector(0)
            fingerprint_bytes(data, path="compiled")
            fingerprint_kernel.vector(before)

        cases["fingerprint, compiled, no vectors"] = (nbytes, plain)
    table(best(cases, rounds), "memcpy")


_PEAK = """
import runpy, sys
sys.argv = ["convtools", *sys.argv[1:]]
try:
    runpy.run_module("convtools", run_name="__main__")
finally:
    print("PEAK", open("/proc/self/status").read().split("VmHWM:")[1].split()[0], file=sys.stderr)
"""


def on_files(scratch: Path, gigabytes: float, rounds: int) -> None:
    """A checkpoint in two formats, and reading its files alone."""
    hf, tp2 = write_hf(scratch / "hf", config_of(gigabytes)), scratch / "tp2"
    convert(hf, tp2, "--to", "torch_dist", "--tp", "2", "--no-fsync")
    size = sum(f.stat().st_size for f in hf.rglob("*.safetensors"))
    buffer = bytearray(1 << 20)

    def read() -> None:
        for path in sorted(hf.glob("*.safetensors")):
            with open(path, "rb", buffering=0) as f:
                while f.readinto(buffer):
                    pass

    def xxh3() -> None:
        for path in sorted(hf.glob("*.safetensors")):
            state = xxhash.xxh3_128()
            with open(path, "rb", buffering=0) as f:
                while n := f.readinto(buffer):
                    state.update(memoryview(buffer)[:n])

    warm(hf)
    warm(tp2)
    hashes = [{n: t.hashes for n, t in fingerprint(root).tensors.items()} for root in (hf, tp2)]
    assert hashes[0] == hashes[1]
    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "reading the files": (size, read),
        "xxh3-128 of the files": (size, xxh3),
        "fingerprint of the HF folder": (size, lambda: fingerprint(hf, workers=2)),
        "fingerprint of torch_dist TP2": (size, lambda: fingerprint(tp2, workers=2)),
    }
    rates = best(cases, rounds)
    print(f"\n{size / 1e9:.2f} GB, best of {rounds}, warm page cache; both formats have the same hashes")
    table(rates, "reading the files")
    for root in (hf, tp2):
        command = [
            sys.executable,
            "-c",
            _PEAK,
            "fingerprint",
            str(root),
            "-o",
            str(scratch / "m.json"),
            "--overwrite",
            "--json",
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(f"\npeak RSS, {root.name}: {int(done.stderr.split('PEAK')[1]) * 1024 / 1e6:.0f} MB")
    print(f"manifest: {(scratch / 'm.json').stat().st_size / 1e3:.0f} kB")


def main() -> None:
    """Parse, run, print Markdown tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scratch", type=Path)
    args = parser.parse_args()
    in_memory(int(args.gb * 1e9) // 4096 * 4096, args.rounds)
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        on_files(Path(scratch), args.gb, args.rounds)


if __name__ == "__main__":
    main()
