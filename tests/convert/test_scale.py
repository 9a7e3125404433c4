"""The largest published model of the family, as files that are all holes: 1.1 TB planned, nothing moved."""

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.commands import ROOT
from tests.nemotron_checkpoints import ULTRA, inventory, nbytes, write_hf

DRY_RUN = """
import json, sys
import convtools
options = convtools.Options(to="torch_dist", tp=8, pp=4, ep=32, dry_run=True)
report = convtools.convert(sys.argv[1], sys.argv[2], options)
hwm = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps(report.to_dict() | {"rss": int(hwm[0]) * 1024}))
"""


@pytest.mark.slow
def test_ultra_is_planned_in_seconds(tmp_path: Path) -> None:
    tensors = inventory(ULTRA)
    src = write_hf(tmp_path / "ultra", ULTRA, tensors, holes=True)
    assert sum(p.stat().st_size for p in src.iterdir()) > 1.12e12
    began = time.monotonic()
    command = [sys.executable, "-c", DRY_RUN, str(src), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    took = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    print(f"dry run of {len(tensors)} tensors: {took:.1f} s, {report['rss'] / 1e6:.0f} MB")
    assert report["hf_tensors"] == len(tensors) == 51_023
    assert report["parameters"] == 560_524_603_904
    assert report["nbytes"] > report["payload_nbytes"] >= nbytes(tensors)
    assert report["layout"] == {"tp": 8, "pp": 4, "ep": 32, "etp": 8}
    assert report["left_out"] == [] and report["casts"] == [] and report["duplicates"] == 0
    pattern = Counter(report["pattern"].partition("/")[0])
    assert pattern == Counter(ULTRA["hybrid_override_pattern"])
    experts = {b["block"]: b["tensors"] for b in report["blocks"] if ".experts." in b["block"]}
    assert experts["backbone.layers.*.mixer.experts.*.up_proj.weight"] == pattern["E"] * 512
    assert [p.name for p in tmp_path.iterdir()] == ["ultra"]
    assert report["rss"] < 2e9
    assert took < 60
