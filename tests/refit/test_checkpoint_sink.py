"""A directory as a sink: each push replaces it whole, and a push that fails leaves it as it was."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from convtools.equality.compare import compare
from convtools.errors import UsageError
from convtools.refit.errors import RefitError
from convtools.refit.sinks.checkpoint import NOTE, CheckpointSink
from convtools.refit.sync import WeightSync
from tests.equality.equal_pairs import LLAMA_TIED, NEMOTRON, QWEN3_NEXT, Case, write_hf, write_megatron
from tests.refit.engines import model, refill

CONFIG = {"config.json": b'{"model_type": "none"}'}


def tensors_in(dst: Path) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    return {n: t for file in sorted(dst.glob("*.safetensors")) for n, t in load_file(file).items()}


@pytest.mark.parametrize("shard", [5_000_000_000, 4000])
def test_each_push_replaces_the_directory(dst: Path, shard: int) -> None:
    source = model(1)
    sink = CheckpointSink(dst, CONFIG, max_shard_size=shard, fsync=False)
    with WeightSync(source, [sink], bucket_bytes=4096) as sync:
        for version in (1, 2):
            refill(source, version)
            assert sync.push(version).sinks[0].version == version
            found = tensors_in(dst)
            assert found.keys() == source.keys()
            assert all(np.array_equal(found[n], t) and found[n].dtype == t.dtype for n, t in source.items())
            assert json.loads((dst / NOTE).read_text())["version"] == version
            assert (dst / "config.json").read_bytes() == CONFIG["config.json"]
            assert sync.verify().equal
        assert sync.check().ok
    assert os.listdir(dst.parent) == [dst.name]
    assert CheckpointSink(dst, CONFIG).receiver.version == 2


def test_a_push_that_fails_leaves_the_old_directory(dst: Path) -> None:
    source = model(1)
    with WeightSync(source, [CheckpointSink(dst, CONFIG, fsync=False)], bucket_bytes=4096) as sync:
        sync.push(1)
        refill(source, 2)
        source["layers.2.norm"][0] = np.nan
        with pytest.raises(RefitError, match="holds NaN"):
            sync.push(2)
        assert {float(t.flat[0]) for t in tensors_in(dst).values()} == {1.0}
        assert os.listdir(dst.parent) == [dst.name]


def test_a_disk_that_is_full(dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from convtools import disk

    with WeightSync(model(1), [CheckpointSink(dst, CONFIG, fsync=False)], bucket_bytes=4096) as sync:
        with monkeypatch.context() as patched:
            patched.setattr(disk, "_free", lambda path: 10)
            with pytest.raises(RefitError, match="not enough room"):
                sync.push(1)
        assert not dst.exists() and os.listdir(dst.parent) == []
        assert sync.push(1).version == 1


def test_only_what_a_push_wrote_is_replaced(dst: Path) -> None:
    dst.mkdir()
    (dst / "precious").write_text("x")
    with (
        WeightSync(model(1), [CheckpointSink(dst, CONFIG, fsync=False)], bucket_bytes=4096) as sync,
        pytest.raises(RefitError, match="it was not written by a push"),
    ):
        sync.push(1)
    assert os.listdir(dst) == ["precious"]
    with pytest.raises(UsageError, match=r"config\.json"):
        CheckpointSink(dst, {})


@pytest.mark.parametrize("case", [NEMOTRON, QWEN3_NEXT, LLAMA_TIED], ids=lambda c: c.name)
def test_a_checkpoint_of_any_layout_is_pushed_as_its_hf_tensors(
    dst: Path, tmp_path: Path, case: Case
) -> None:
    """Nemotron-H, zero-centred norms and a tied head, from torch_dist at TP2 PP2: equal bit for bit."""
    hf = write_hf(case, tmp_path / "hf")
    dist = write_megatron(case, hf, tmp_path / "dist", "torch_dist")
    files = {"config.json": json.dumps(case.config).encode()}
    for source in (hf, dist):
        with WeightSync(
            source, [CheckpointSink(dst, files, fsync=False)], bucket_bytes=65536, finite=False
        ) as sync:
            assert sync.push(1, force=True).nbytes > 0 and sync.verify().equal
            assert sync.push(2).version == 2
        assert compare(hf, dst).equal
        with (
            WeightSync(source, [CheckpointSink(dst, files, fsync=False)], bucket_bytes=65536) as sync,
            pytest.raises(RefitError, match="holds NaN"),
        ):
            sync.push(3)
