"""Run the real command line, and look at what it left."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.nemotron_checkpoints import TINY

ROOT = Path(__file__).resolve().parents[1]

SMALL: dict[str, Any] = TINY | {"vocab_size": 256, "n_groups": 4, "num_key_value_heads": 4, "head_dim": 8}
"""A few kB: takes no time, and splits at tp 4."""

MEDIUM: dict[str, Any] = TINY | {
    "hybrid_override_pattern": "MEME*-ME",
    "num_hidden_layers": 8,
    "vocab_size": 1000,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 4096,
    "mamba_num_heads": 32,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 64,
    "n_routed_experts": 16,
    "moe_intermediate_size": 1024,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_latent_size": 512,
}
"""200 MB: a conversion takes long enough to be hit in the middle."""


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "convtools", *map(str, args)]


def start(*args: object, **options: Any) -> "subprocess.Popen[str]":
    options["env"] = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | options.pop(
        "env", {}
    )
    usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return subprocess.Popen(command(*args), **usual | options)


def run(*args: object, **options: Any) -> "subprocess.CompletedProcess[str]":
    process = start(*args, **options)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def refused(done: "subprocess.CompletedProcess[str]", *words: str, code: int = 1) -> None:
    """It ended with an error of ours that says all of `words`."""
    assert done.returncode == code, done
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr, done.stderr
    assert [w for w in words if w not in done.stderr] == [], done.stderr


def hashes(root: Path) -> dict[str, str]:
    """Path -> hash of its bytes, for every file below."""
    found = {}
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            found[str(path.relative_to(root))] = hashlib.file_digest(file, "blake2b").hexdigest()
    return found


def stamps(root: Path) -> dict[str, tuple[int, int, int]]:
    """Path -> size, time of change and inode, for every file and folder below."""
    found = {}
    for path in [root, *root.rglob("*")]:
        stat = path.stat()
        found[str(path.relative_to(root))] = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
    return found


def beside(dst: Path) -> list[Path]:
    """What lies next to `dst` in its name."""
    return sorted(p for p in dst.parent.iterdir() if p.name.startswith(f".{dst.name}."))


def files_made(dst: Path) -> bool:
    """Whether a run has made the first of its files, none of them published yet."""
    return any(p.is_file() for partial in beside(dst) for p in (partial / "data").rglob("*"))


def wait_until(true: Callable[[], bool], process: "subprocess.Popen[str]", seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert process.poll() is None and time.monotonic() < until, "it did not come to that"
        time.sleep(0.0005)
