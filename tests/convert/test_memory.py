"""Memory does not grow with the checkpoint."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import MEDIUM, ROOT
from tests.nemotron_checkpoints import inventory, nbytes, write_hf

CONVERT = """
import sys
import convtools
src, dst, to, tp = sys.argv[1:]
convtools.convert(src, dst, convtools.Options(to=to, tp=int(tp) or None, fsync=False))
print(*(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak(src: Path, dst: Path, to: str, tp: int) -> int:
    """Bytes of memory a conversion takes in a process of its own; mapped pages count."""
    command = [sys.executable, "-c", CONVERT, str(src), str(dst), to, str(tp)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return int(done.stdout) * 1024


@pytest.mark.slow
def test_a_checkpoint_four_times_as_large_takes_no_more(tmp_path: Path) -> None:
    peaks = []
    for experts, size in ((24, 0.25e9), (144, 1.0e9)):
        config = MEDIUM | {"n_routed_experts": experts}
        assert nbytes(inventory(config)) == pytest.approx(size, rel=0.05)
        hf = write_hf(tmp_path / "hf", config, shard=200_000_000)
        there = peak(hf, tmp_path / "megatron", "torch_dist", 8)
        back = peak(tmp_path / "megatron", tmp_path / "back", "hf", 0)
        legacy = peak(hf, tmp_path / "legacy", "torch", 8)
        peaks.append((there, back, legacy))
        for path in list(tmp_path.iterdir()):
            shutil.rmtree(path)
    print("peak MB at 0.25 GB and 1 GB:", [[round(x / 1e6) for x in row] for row in peaks])
    assert max(peaks[1]) < 200e6
    assert max(large - little for little, large in zip(*peaks, strict=True)) < 40e6
