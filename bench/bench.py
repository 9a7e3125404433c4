"""The benchmarks behind docs/benchmarks.md: ratios, measured side by side in one run.

    python bench/bench.py [--gb 2] [--rounds 5] [--peers] [--memory 1,2,4,8] [--scratch DIR]

Every round runs `cp -r`, then each conversion, on the same bytes with a warm page cache, and always
into a new folder, in memory that was touched before. The best of all rounds counts, and figures are
ratios to `cp -r` of that run.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from bench import peers  # noqa: E402
from tests.nemotron_checkpoints import TINY, inventory, nbytes, write_hf  # noqa: E402


def config_of(gigabytes: float) -> dict[str, object]:
    """A Nemotron-H with MoE, attention and Mamba layers of real widths, of about so many bytes."""
    base = TINY | {
        "hidden_size": 2048, "vocab_size": 65536,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64,
        "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "n_routed_experts": 32,
        "moe_intermediate_size": 1792, "moe_shared_expert_intermediate_size": 3584, "moe_latent_size": 1024,
        "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E", "intermediate_size": 8192,
    }  # fmt: skip
    pattern = "ME*E"
    while True:
        config = base | {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
        if nbytes(inventory(config)) >= gigabytes * 1e9:
            return config
        pattern += "ME*E" if len(pattern) % 8 == 0 else "MEME"


def warm(root: Path) -> None:
    """Read every file, so that all of it lies in the page cache."""
    for path in root.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as f:
                while f.read(8 << 20):
                    pass


def touch_memory(scratch: Path, nbytes: int) -> None:
    """Fill the page cache with a file and drop it, so that no run pays for memory the host gives anew.

    On virtual machines a first touch costs ten times a copy, and free memory goes back to the host
    within seconds: without this, whoever runs after a pause loses.
    """
    path, block = scratch / "touched", bytes(8 << 20)
    with open(path, "wb", buffering=0) as f:
        for _ in range(nbytes // len(block) + 1):
            f.write(block)
    path.unlink()


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """(seconds, CPU seconds of this process and its children)."""

    def cpu() -> float:
        who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, who))

    c, t = cpu(), time.perf_counter()
    run()
    return time.perf_counter() - t, cpu() - c


def convert(src: Path, dst: Path, *options: str) -> None:
    """Run the command as a user does."""
    command = [sys.executable, "-m", "convtools", "convert", str(src), str(dst), "--json", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def speed(scratch: Path, gigabytes: float, rounds: int, with_peers: bool) -> None:
    """Conversions against `cp -r` of the same bytes."""
    src, dist, tp8 = scratch / "hf", scratch / "dist", scratch / "tp8"
    write_hf(src, config_of(gigabytes))
    convert(src, dist, "--to", "torch_dist")
    convert(src, tp8, "--to", "torch_dist", "--tp", "8")
    out = scratch / "out"
    cases: dict[str, Callable[[], None]] = {
        "cp -r": lambda: subprocess.run(["cp", "-r", src, out], check=True) and None,
        "cp -r, then fsync": lambda: (
            subprocess.run(["sh", "-c", f'cp -r "{src}" "{out}" && sync -f "{out}"'], check=True) and None
        ),
        "HF -> torch_dist": lambda: convert(src, out, "--to", "torch_dist", "--no-fsync"),
        "torch_dist -> HF": lambda: convert(dist, out, "--to", "hf", "--no-fsync"),
        "HF -> torch_dist, tp8": lambda: convert(src, out, "--to", "torch_dist", "--tp", "8", "--no-fsync"),
        "torch_dist tp8 -> HF": lambda: convert(tp8, out, "--to", "hf", "--no-fsync"),
        "HF -> torch, tp2": lambda: convert(src, out, "--to", "torch", "--tp", "2", "--no-fsync"),
        "HF -> torch_dist, with fsync": lambda: convert(src, out, "--to", "torch_dist"),
    }
    if with_peers:
        cases |= {name: (lambda run=run: run(src, out)) for name, run in peers.CASES.items()}
    best: dict[str, tuple[float, float]] = {}
    size = sum(f.stat().st_size for f in src.rglob("*") if f.is_file())
    for _ in range(rounds):
        for name, run in cases.items():
            shutil.rmtree(out, ignore_errors=True)
            os.sync()
            warm(dist if name == "torch_dist -> HF" else tp8 if name.startswith("torch_dist tp8") else src)
            touch_memory(scratch, size * 5 // 4)
            best[name] = min(best.get(name, (9e9, 0.0)), timed(run))
    print(f"\n{size / 1e9:.2f} GB, best of {rounds}, warm page cache\n")
    print("| what | ratio to `cp -r` | CPU seconds a GB |\n|---|---|---|")
    for name, (seconds, cpu) in best.items():
        print(f"| {name} | {seconds / best['cp -r'][0]:.2f} | {cpu / (size / 1e9):.2f} |")


_RSS = """
import resource, runpy, sys
sys.argv = ["convtools", *sys.argv[1:]]
try:
    runpy.run_module("convtools", run_name="__main__")
finally:
    print("PEAK", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def memory(scratch: Path, sizes: list[float]) -> None:
    """Peak RSS against the size of the checkpoint."""
    print("\n| checkpoint | HF -> torch_dist | HF -> torch_dist tp8 | torch_dist -> HF |\n|---|---|---|---|")
    for gigabytes in sizes:
        src = write_hf(scratch / f"m{gigabytes}", config_of(gigabytes))
        dist, tp8, back = scratch / "d", scratch / "t", scratch / "b"
        row = []
        for a, b, extra in ((src, dist, "torch_dist"), (src, tp8, "torch_dist --tp 8"), (tp8, back, "hf")):
            command = [
                sys.executable,
                "-c",
                _RSS,
                "convert",
                str(a),
                str(b),
                "--json",
                "--to",
                *extra.split(),
            ]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            row.append(int(done.stdout.split("PEAK")[1]) * 1024 / 1e6)
            if b is dist:
                shutil.rmtree(dist)
        print(f"| {gigabytes:g} GB | " + " | ".join(f"{mb:.0f} MB" for mb in row) + " |", flush=True)
        for path in (src, tp8, back):
            shutil.rmtree(path)


def start_up(rounds: int = 10) -> None:
    """Time to import, and to print help."""
    best = {}
    for name, args in {
        "bare python": ["-c", "pass"],
        "import convtools": ["-c", "import convtools"],
        "convtools --help": ["-m", "convtools", "--help"],
    }.items():
        best[name] = min(
            timed(
                lambda args=args: (
                    subprocess.run([sys.executable, *args], check=True, stdout=subprocess.DEVNULL) and None
                )
            )[0]
            for _ in range(rounds)
        )
    print("\n" + json.dumps({name: f"{1000 * s:.0f} ms" for name, s in best.items()}))


def main() -> None:
    """Parse, run, print Markdown tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="also torch's DCP and megatron-core's own save")
    parser.add_argument("--memory", default="1,2,4,8", help="sizes in GB, or nothing")
    parser.add_argument("--scratch", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        start_up()
        speed(Path(scratch), args.gb, args.rounds, args.peers)
        if args.memory:
            memory(Path(scratch), [float(x) for x in args.memory.split(",")])


if __name__ == "__main__":
    main()
