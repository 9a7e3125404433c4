"""The largest published model as files that are all holes: chosen in seconds, cut in little memory."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.commands import MEDIUM, ROOT
from tests.convert.small import filled, write_small_hf
from tests.nemotron_checkpoints import TINY, ULTRA, inventory, nbytes, write_hf

NANO_4B: dict[str, Any] = TINY | {
    "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-", "num_hidden_layers": 42,
    "vocab_size": 131072, "hidden_size": 3136, "num_attention_heads": 40, "num_key_value_heads": 8,
     "head_dim": 128,
    "intermediate_size": 12544, "mamba_num_heads": 96, "mamba_head_dim": 80, "n_groups": 8,
     "ssm_state_size": 128,
    "moe_latent_size": None,
}  # fmt: skip

SLICE = """
import sys
sys.argv = ["convtools", "slice", *sys.argv[1:], "--json"]
try:
    from convtools.cli.main import main
    main()
finally:
    hwm = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(*hwm, file=sys.stderr)
"""


def timed(*args: object) -> tuple[dict[str, Any], float, int]:
    """(report, seconds of wall time with starting up, peak bytes of memory) of a slice in its own process."""
    began = time.monotonic()
    command = [sys.executable, "-c", SLICE, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    took = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), took, int(done.stderr.split()[-1]) * 1024


@pytest.mark.slow
def test_ultra_is_chosen_in_seconds(tmp_path: Path) -> None:
    src = write_hf(tmp_path / "ultra", ULTRA, holes=True)
    assert sum(p.stat().st_size for p in src.iterdir()) > 1.12e12
    report, took, rss = timed(src, tmp_path / "out", "--cover", "blocks", "--dry-run")
    print(f"dry run: {took:.1f} s, {rss / 1e6:.0f} MB")
    assert [line["source"] for line in report["layers"]] == [0, 1, 7, 8]
    assert [line["kind"] for line in report["layers"]] == ["mamba", "MoE", "attention", "MoE"]
    assert report["checked"] == "every tensor is what nemotron_h expects from the new config"
    assert report["mtp_tensors"] > 0 and not (tmp_path / "out").exists()
    few, _, _ = timed(src, tmp_path / "out", "--experts", "8", "--dry-run")
    assert few["nbytes"] < 20e9 < report["nbytes"] and few["payload_nbytes"] < report["payload_nbytes"]
    assert took < 10 and rss < 100e6


@pytest.mark.slow
def test_tens_of_thousands_of_tensors_that_are_not_kept(tmp_path: Path) -> None:
    """Writing takes no more memory than opening: what is known of the other tensors is let go."""
    names = [f"model.layers.{i}.mlp.experts.{e}.up_proj.weight" for i in range(64) for e in range(800)]
    content = filled({name: ("BF16", (2, 3)) for name in names} | {"big": ("BF16", (1 << 24,))})
    src = write_small_hf(tmp_path / "src", {"num_hidden_layers": 64}, content)
    del content
    _, _, planned = timed(src, tmp_path / "out", "--layers", "0", "--dry-run")
    report, took, rss = timed(src, tmp_path / "out", "--layers", "0", "--workers", "4")
    print(f"51200 tensors: {took:.1f} s, {planned / 1e6:.0f} MB to plan, {rss / 1e6:.0f} MB")
    assert report["tensors"] == 801 and rss < 100e6 and rss < planned + 20e6


@pytest.mark.slow
def test_nano_4b(tmp_path: Path) -> None:
    src = write_hf(tmp_path / "nano", NANO_4B, holes=True)
    report, _, _ = timed(src, tmp_path / "out", "--dry-run")
    assert [line["source"] for line in report["layers"]] == [0, 1, 12, 13]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_slice(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 3e9:
        pytest.skip("not enough free disk")
    config = MEDIUM | {"n_routed_experts": 144}
    assert nbytes(inventory(config)) == pytest.approx(1e9, rel=0.05)
    src = write_hf(tmp_path / "src", config, holes=True, shard=200_000_000)
    report, took, rss = timed(src, tmp_path / "out", "--layers", "0-7")
    print(f"slice of {report['nbytes'] / 1e9:.1f} GB: {took:.1f} s, {rss / 1e6:.0f} MB")
    assert report["nbytes"] > 0.9e9
    shutil.rmtree(tmp_path / "out")
    assert rss < 100e6
