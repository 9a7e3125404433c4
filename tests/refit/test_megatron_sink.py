"""A Megatron directory as a sink: what is there afterwards is the source, whole, or what was there before."""

import json
import os
from pathlib import Path

import pytest

import convtools
from convtools.equality.compare import compare
from convtools.errors import UsageError
from convtools.refit.errors import RefitError
from convtools.refit.sinks.checkpoint import NOTE, CheckpointSink
from convtools.refit.sinks.side_files import beside
from convtools.refit.sinks.url import connect
from convtools.refit.sync import WeightSync
from tests.commands import hashes
from tests.equality.equal_pairs import (
    LLAMA_TIED,
    NEMOTRON,
    QWEN3_MOE_FUSED,
    QWEN3_NEXT,
    Case,
    live,
    write_hf,
    write_megatron,
)  # fmt: skip

OPTIONS = {"make_vocab_size_divisible_by": 8, "workers": 1}


def options(case: Case, to: str = "torch_dist") -> convtools.Options:
    return convtools.Options(to=to, **OPTIONS, **dict(case.sizes))  # type: ignore[arg-type]


@pytest.mark.parametrize("to", ["torch_dist", "torch"])
@pytest.mark.parametrize("case", [NEMOTRON, LLAMA_TIED, QWEN3_MOE_FUSED, QWEN3_NEXT], ids=lambda c: c.name)
def test_each_push_replaces_the_checkpoint(case: Case, to: str, tmp_path: Path) -> None:
    hf, dst = write_hf(case, tmp_path / "hf"), tmp_path / "out"
    sink = CheckpointSink(dst, beside(hf), options=options(case, to), fsync=False)
    with WeightSync(str(hf), [sink], bucket_bytes=4096, finite=False) as sync:
        for version in (3, 4):
            assert sync.push(version).sinks[0].version == version
            found = compare(hf, dst)
            assert found.equal is True and "every byte the same" in found.verdict
            assert json.loads((dst / NOTE).read_text())["version"] == version
        assert sync.verify().equal and not sync.verify().weaker
        check = sync.check()
        assert check.ok and check.canaries and not check.faults
        assert compare(hf, dst).equal is True
    assert sorted(os.listdir(tmp_path)) == ["hf", "out"]
    assert CheckpointSink(dst, beside(hf), options=options(case, to)).receiver.version == 4
    back = tmp_path / "back"
    convtools.convert(dst, back, convtools.Options(to="hf", fsync=False))
    assert compare(hf, back).equal is True


def test_live_tensors_become_a_checkpoint_that_loads(tmp_path: Path) -> None:
    hf, dst = write_hf(NEMOTRON, tmp_path / "hf"), tmp_path / "out"
    tensors = live(NEMOTRON.content())
    name = "backbone.layers.2.mixer.q_proj.weight"
    tensors[name][0, 0] = 0.5
    with WeightSync(
        tensors, [CheckpointSink(dst, beside(hf), options=options(NEMOTRON), fsync=False)], finite=False
    ) as sync:
        sync.push(1)
    found = compare(hf, dst)
    assert [r.name for r in found.tensors if r.faulty] == [name]
    assert compare(tensors, dst).equal is True


def test_weights_of_another_model_leave_the_old_checkpoint(tmp_path: Path) -> None:
    hf, dst = write_hf(NEMOTRON, tmp_path / "hf"), tmp_path / "out"
    files = beside(hf)
    with WeightSync(
        str(hf), [CheckpointSink(dst, files, options=options(NEMOTRON), fsync=False)], finite=False
    ) as sync:
        sync.push(1)
    before = hashes(dst)
    tensors = live(NEMOTRON.content())
    del tensors["backbone.layers.0.mixer.D"]
    sink = CheckpointSink(dst, files, options=options(NEMOTRON), fsync=False)
    with WeightSync(tensors, [sink], finite=False) as sync:
        with pytest.raises(RefitError, match=r"missing: `backbone.layers.0.mixer.D`"):
            sync.push(2)
        assert (sink.receiver.state, sink.receiver.version) == ("clean", 1)
    assert hashes(dst) == before and sorted(os.listdir(tmp_path)) == ["hf", "out"]


def test_it_is_one_process_under_torchrun_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's rank pushes; its other ranks know nothing of it."""
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "4"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    hf, dst = write_hf(NEMOTRON, tmp_path / "hf"), tmp_path / "out"
    with WeightSync(
        str(hf), [CheckpointSink(dst, beside(hf), options=options(NEMOTRON), fsync=False)], finite=False
    ) as sync:
        sync.push(1)
    assert compare(hf, dst).equal is True


def test_a_checkpoint_that_no_push_wrote_is_not_replaced(tmp_path: Path) -> None:
    hf = write_hf(NEMOTRON, tmp_path / "hf")
    dst = write_megatron(NEMOTRON, hf, tmp_path / "out", "torch_dist")
    before = hashes(dst)
    sink = CheckpointSink(dst, beside(hf), options=options(NEMOTRON), fsync=False)
    with (
        WeightSync(str(hf), [sink], finite=False) as sync,
        pytest.raises(RefitError, match="was not written by a push"),
    ):
        sync.push(1)
    assert hashes(dst) == before


def test_by_url_also_from_a_megatron_checkpoint(tmp_path: Path) -> None:
    hf = write_hf(NEMOTRON, tmp_path / "hf")
    (hf / "tokenizer.json").write_text("{}")
    source = write_megatron(NEMOTRON, hf, tmp_path / "mg", "torch")
    url = f"file://{tmp_path}/out?to=torch_dist&tp=2&pp=2&ep=2&make_vocab_size_divisible_by=8&iteration=7"
    plain = f"file://{tmp_path}/plain"
    with WeightSync(
        str(source), [s for u in (url, plain) for s in connect(u, source=source)], finite=False
    ) as sync:
        sync.push(1)
    assert (tmp_path / "out/iter_0000007").is_dir()
    assert compare(hf, tmp_path / "out").equal is True
    assert compare(hf, tmp_path / "plain").equal is True
    assert (tmp_path / "plain/tokenizer.json").read_text() == "{}"
    assert (
        json.loads((tmp_path / "plain/config.json").read_text())["hidden_size"]
        == NEMOTRON.config["hidden_size"]
    )


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    files = {"config.json": b"{}"}
    for wrong in (
        convtools.Options(to="torch_dist", dry_run=True), convtools.Options(to="torch_dist", hf_config="x"),
        convtools.Options(to="torch_dist", tp=0),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            CheckpointSink(tmp_path / "out", files, options=wrong)
    with pytest.raises(UsageError, match="needs a config"):
        CheckpointSink(tmp_path / "out", {}, options=convtools.Options(to="torch_dist"))
