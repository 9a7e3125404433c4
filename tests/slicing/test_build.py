"""A slice on disk: the right bytes, all or nothing, and the source as it was."""

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from convtools.errors import AccountingError, ConvtoolsError, StorageError, UsageError
from convtools.inspection import inspect
from convtools.slicing.verification import verify_slice
from tests.commands import (
    MEDIUM,
    ROOT,
    SMALL,
    beside,
    files_made,
    hashes,
    refused,
    run,
    stamps,
    start,
    wait_until,
)
from tests.convert.small import filled, write_small_hf
from tests.nemotron_checkpoints import inventory, write_hf
from tests.slicing.cutting import by_hand, cut
from tests.tensors import Content, differences, read_hf

PATTERN = "MEMEM*EM*E-"
HYBRID: dict[str, Any] = SMALL | {
    "hybrid_override_pattern": PATTERN, "num_hidden_layers": len(PATTERN), "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
}  # fmt: skip
PREFIX = "backbone.layers."


@pytest.fixture(scope="module")
def content() -> Content:
    return filled(inventory(HYBRID))


@pytest.fixture
def src(tmp_path: Path, content: Content) -> Path:
    return write_small_hf(tmp_path / "src", HYBRID, content)


@pytest.mark.parametrize(
    ("options", "keep", "pattern"),
    [
        ({}, [0, 1, 5, 6, 10], "ME*E-"),
        ({"cover": "types"}, [0, 1, 5, 10], "ME*-"),
        ({"cover": "pairs"}, [0, 1, 2, 7, 8, 9, 10], "MEMM*E-"),
        ({"layers": "9-10,0"}, [9, 10, 0], "E-M"),
        ({"layers": "0-10"}, list(range(11)), PATTERN),
        ({"layers": "5,5,6,5"}, [5, 5, 6, 5], "**E*"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mtp", ["keep", "drop"])
def test_what_is_asked_is_what_is_there(
    src: Path, content: Content, dst: Path, options: dict[str, Any], keep: list[int], pattern: str, mtp: str
) -> None:
    report = cut(src, dst, mtp=mtp, **options)
    want = by_hand(content, keep, prefix=PREFIX, drop=lambda n: mtp == "drop" and n.startswith("mtp."))
    assert differences(want, read_hf(dst)) == []
    assert [line.source for line in report.layers] == keep
    config = json.loads((dst / "config.json").read_text())
    changed = {"hybrid_override_pattern": pattern, "num_hidden_layers": len(keep)}
    assert config == HYBRID | changed | ({"num_nextn_predict_layers": 0} if mtp == "drop" else {})
    assert report.tensors == len(want) and report.payload_nbytes == sum(len(v[2]) for v in want.values())
    assert report.nbytes == sum(p.stat().st_size for p in dst.iterdir() if "manifest" not in p.name)
    assert report.mtp_tensors == sum(n.startswith("mtp.") for n in want)
    gone = {name for name in content if name.startswith(PREFIX) and int(name.split(".")[2]) not in keep}
    assert report.dropped.get("of other layers", 0) == len(gone)
    assert report.checked == "every tensor is what nemotron_h expects from the new config"
    assert verify_slice(dst, str(src)).whole


def test_repeats_are_copies_b64(src: Path, content: Content, dst: Path) -> None:
    """The bytes written are those of the tensors that were chosen, each as often as it was."""
    report = cut(src, dst, layers="1,1,1")
    layer = sum(len(v[2]) for n, v in content.items() if n.startswith(f"{PREFIX}1."))
    other = sum(len(v[2]) for n, v in content.items() if not n.startswith(PREFIX))
    assert report.payload_nbytes == 3 * layer + other and report.other_nbytes == other
    assert [line.nbytes for line in report.layers] == [layer] * 3


def test_shards(src: Path, content: Content, dst: Path) -> None:
    report = cut(src, dst, layers="0-3", max_shard_size="10KB")
    index = json.loads((dst / "model.safetensors.index.json").read_text())
    assert report.files == len(set(index["weight_map"].values())) > 3
    assert differences(by_hand(content, [0, 1, 2, 3], prefix=PREFIX), read_hf(dst)) == []
    assert verify_slice(dst, str(src)).whole
    assert cut(dst, dst.with_name("again"), layers="1").source_layers == 4, "a slice can be sliced"


def test_files_beside_the_weights_come_along(src: Path, dst: Path) -> None:
    (src / "tokenizer.json").write_text("{}")
    (src / "modeling_x.py").write_text("# code")
    cut(src, dst, layers="0")
    made = sorted(p.name for p in dst.iterdir())
    assert made == [
        "config.json",
        "convtools.manifest.json",
        "model.safetensors",
        "modeling_x.py",
        "tokenizer.json",
    ]
    again = cut(dst, dst.with_name("again"), layers="0")
    assert ("convtools.manifest.json", "the source's own manifest") in again.left_out
    manifest = json.loads((dst.with_name("again") / "convtools.manifest.json").read_text())
    assert manifest["layers"] == [0] and manifest["source"]["name"] == "out"


def test_a_stack_that_the_user_names(tmp_path: Path, dst: Path) -> None:
    """Also where only the slice has two stacks of that length."""
    many = {f"model.layers.{i}.mlp.up_proj.weight": ("BF16", (2, 3)) for i in range(6)}
    for others, options in ((6, {"layer_prefix": "model.layers"}), (2, {})):
        more = {f"draft.layers.{i}.mlp.up_proj.weight": ("BF16", (2, 3)) for i in range(others)}
        content = filled(many | more)
        src = write_small_hf(tmp_path / f"src{others}", {"num_hidden_layers": 6}, content)
        cut(src, dst.with_name(f"out{others}"), layers="5,4", **options)
        out = dst.with_name(f"out{others}")
        assert differences(by_hand(content, [5, 4], prefix="model.layers."), read_hf(out)) == []
        assert verify_slice(out, str(src)).whole
        (out / "config.json").write_text('{"num_hidden_layers": 1}')
        assert [fault.tensor for fault in verify_slice(out).faults] == ["config.json"]
        manifest = json.loads((out / "convtools.manifest.json").read_text())
        del manifest["config"]
        (out / "convtools.manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ConvtoolsError):
            verify_slice(out)


@pytest.mark.parametrize("options", [{}, {"layer_prefix": "bert.encoder.layer"}])
def test_a_model_that_is_an_encoder(tmp_path: Path, dst: Path, options: dict[str, Any]) -> None:
    names = [f"bert.encoder.layer.{i}.attention.self.query.weight" for i in range(3)]
    content = filled({name: ("BF16", (2, 3)) for name in [*names, "bert.embeddings.word_embeddings.weight"]})
    config = {
        "model_type": "bert", "num_hidden_layers": 3,
        "quantization_config": {"ignore": ["bert.encoder.layer.2.attention.self.query", "encoder.layer.1"]},
    }  # fmt: skip
    src = write_small_hf(tmp_path / "src", config, content)
    cut(src, dst, layers="0,2", **options)
    assert differences(by_hand(content, [0, 2], prefix="bert.encoder.layer."), read_hf(dst)) == []
    made = json.loads((dst / "config.json").read_text())
    assert made["num_hidden_layers"] == 2
    assert made["quantization_config"] == {"ignore": ["bert.encoder.layer.1.attention.self.query"]}
    assert verify_slice(dst, str(src)).whole


def test_an_mtp_head_that_is_not_there_is_said(tmp_path: Path, dst: Path) -> None:
    content = filled({f"model.layers.{i}.mlp.up_proj.weight": ("BF16", (2, 3)) for i in range(3)})
    config: dict[str, Any] = {"model_type": "strange", "num_hidden_layers": 3}
    src = write_small_hf(tmp_path / "src", config | {"num_nextn_predict_layers": 1}, content)
    said = "`num_nextn_predict_layers` 1: the source has no tensors of an MTP head"
    for mtp, then in (("keep", "left as it says"), ("drop", "there is nothing to drop")):
        notes = cut(src, dst, mtp=mtp, dry_run=True).notes
        assert [note for note in notes if note.startswith(said) and then in note], notes
    without = write_small_hf(tmp_path / "without", config, content)
    assert "--mtp drop: the model has no MTP head" in cut(without, dst, mtp="drop", dry_run=True).notes
    assert not [note for note in cut(without, dst, dry_run=True).notes if "MTP" in note]


def test_what_is_no_longer_there_is_said(src: Path, dst: Path) -> None:
    notes = cut(src, dst, layers="0,1", dry_run=True).notes
    assert "no layer of the slice is any more: attention, dense" in notes
    assert [note for note in notes if note.startswith("the slice has no attention")]
    assert not [note for note in cut(src, dst, dry_run=True).notes if "slice" in note]


def test_options_that_would_do_nothing(src: Path, dst: Path) -> None:
    def config(**more: Any) -> None:
        (src / "config.json").write_text(json.dumps(HYBRID | more))

    with pytest.raises(UsageError, match="no list `foo`") as caught:
        cut(src, dst, not_per_layer=("foo",))
    assert "leave it out" in str(caught.value)
    config(some_scales=[1.0] * 11, inner={"other_scales": [2] * 11})
    with pytest.raises(UsageError) as caught:
        cut(src, dst, not_per_layer=("some_scale",))
    assert "expected: `some_scales`" in str(caught.value)
    cut(src, dst, layers="0,1", not_per_layer=("other_scales",))
    made = json.loads((dst / "config.json").read_text())
    assert made["some_scales"] == [1.0] * 2 and made["inner"] == {"other_scales": [2] * 11}
    notes = cut(src, dst.with_name("other"), allow_inexact=True, dry_run=True).notes
    assert [note for note in notes if note.startswith("--allow-inexact: nothing is rounded")]


def test_into_a_pipe_no_line_is_wrapped_or_filled_up(src: Path, dst: Path) -> None:
    done = run("slice", src, dst, "--cover", "pairs", "--experts", "2", "--dry-run")
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    assert max(map(len, lines)) > 80
    head = sum(name.startswith("mtp.") for name in read_hf(src))
    kept = head - sum(
        f".experts.{i}." in name and name.startswith("mtp.") for name in read_hf(src) for i in (2, 3)
    )
    assert f"outside the layers  {kept} of the tensors are the MTP head's" in done.stdout
    assert f"hybrid_override_pattern: '{PATTERN}' -> 'MEEM*E-'" in done.stdout
    assert " in 1 file of weights" in done.stdout
    rows = [line for line in lines if " before " in line]
    assert len(rows) == 7 and "the cheapest mamba before MoE;" in rows[0]
    assert [row for row in rows if "the cheapest mamba before attention, attention before MoE;" in row]


def test_a_dry_run_writes_nothing_and_says_the_same(src: Path, dst: Path) -> None:
    before = stamps(dst.parent)
    dry = cut(src, dst, dry_run=True).to_dict()
    assert stamps(dst.parent) == before and dry["dry_run"]
    wet = cut(src, dst).to_dict()
    for report in (dry, wet):
        report.pop("seconds"), report.pop("dry_run")
    assert dry == wet


@pytest.mark.parametrize("inside", [".", "out", "a/b"])
def test_the_source_is_no_place_to_write(src: Path, inside: str) -> None:
    before = stamps(src), hashes(src)
    for options in ({}, {"overwrite": True}, {"dry_run": True}):
        with pytest.raises(ConvtoolsError):
            cut(src, src / inside, **options)
    assert (stamps(src), hashes(src)) == before


def test_only_a_checkpoint_is_overwritten(src: Path, dst: Path) -> None:
    cut(src, dst, layers="0-3")
    with pytest.raises(StorageError, match="not empty"):
        cut(src, dst, layers="0")
    cut(src, dst, layers="0", overwrite=True)
    assert json.loads((dst / "config.json").read_text())["num_hidden_layers"] == 1
    other = dst.with_name("thesis")
    other.mkdir()
    (other / "text.tex").write_text("years of work")
    before = stamps(other)
    with pytest.raises(StorageError, match="not replaced"):
        cut(src, other, layers="0", overwrite=True)
    assert stamps(other) == before and beside(dst) == []


def test_the_source_is_as_it_was(src: Path, dst: Path) -> None:
    before = stamps(src), hashes(src)
    cut(src, dst)
    assert (stamps(src), hashes(src)) == before


IMPORTS = """
import sys
sys.argv = ["convtools", "slice", *sys.argv[1:]]
try:
    from convtools.cli.main import main
    main()
finally:
    print(sorted({"torch", "transformers", "safetensors", "numpy", "huggingface_hub"} & sys.modules.keys()))
"""


def imported(*args: object) -> str:
    command = [sys.executable, "-c", IMPORTS, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_torch_is_never_imported(src: Path, dst: Path) -> None:
    assert imported(src, dst, "--experts", 2) == "[]"
    megatron = ROOT / "fixtures/oracle/nemotron_mtp"
    dist = megatron / "tp2pp2ep1/torch_dist"
    assert "torch" not in imported(dist, dst.with_name("dist"), "--hf-config", megatron / "hf")


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--layers", "0-99"), 2, "no layer 99"),
        (("--layers", "0", "--cover", "blocks"), 2, "only one can choose"),
        (("--cover", "nothing"), 2, "nothing"),
        (("--mtp", "maybe"), 2, "maybe"),
        (("--experts", "0"), 2, "not a positive number"),
        (("--experts", "99"), 2, "2 to 4"),
        (("--experts", "1"), 2, "at least 2: the router takes the top 2 of each group"),
        (("--not-per-layer", "foo"), 2, "no list `foo`"),
        (("--max-shard-size", "many"), 2, "many"),
        (("--layer-prefix", "nope"), 2, "begins with `nope"),
        (("--iteration", "3"), 2, "for a Megatron source"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    src: Path, dst: Path, options: tuple[str, ...], code: int, says: str
) -> None:
    done = run("slice", src, dst, *options)
    assert done.returncode == code and says in done.stderr and "Traceback" not in done.stderr, done
    assert not dst.exists() and beside(dst) == []


def test_what_it_prints(src: Path, dst: Path) -> None:
    done = run("slice", src, dst, "--mtp", "drop", "--dry-run", env=dict(os.environ) | {"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for says in (
        "2 5 attention the cheapest attention + MoE; 1 more like it", "4 10 dense", "the only one",
         "would be written",
        "tensors of the MTP head", "hybrid_override_pattern: 'MEMEM*EM*E-' -> 'ME*E-'", "not kept",
    ):  # fmt: skip
        assert says in text, (says, text)
    done = run("slice", src, dst, "--layers", "3-4", "--json")
    report = json.loads(done.stdout)
    assert [line["source"] for line in report["layers"]] == [3, 4] and not report["dry_run"]


def test_a_source_that_is_none(tmp_path: Path, dst: Path) -> None:
    (tmp_path / "file").write_text("")
    for src in (tmp_path / "file", tmp_path / "nothing" / "here" / "at all"):
        refused(run("slice", src, dst), "neither a folder nor a repository", code=2)


def test_a_truncated_source(src: Path, dst: Path) -> None:
    path = src / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    refused(run("slice", src, dst), str(path))
    assert not dst.exists() and beside(dst) == []


def test_an_encoded_checkpoint_is_cut_as_it_is(tmp_path: Path, dst: Path) -> None:
    """FP8 weights and their scales: bytes are moved, not understood."""
    tensors = {f"model.layers.{i}.mlp.up_proj.{part}": spec for i in range(3)
               for part, spec in (("weight", ("F8_E4M3", (6, 4))), ("weight_scale_inv", ("F32", (1,
                1))))}  # fmt: skip
    content = {
        n: (d, s, bytes(range(24)) if d == "F8_E4M3" else bytes([0, 0, 128, 63]))
        for n, (d, s) in tensors.items()
    }
    config = {
        "num_hidden_layers": 3,
        "quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.2.mlp"]},
    }
    src = write_small_hf(tmp_path / "src", config, content)
    report = cut(src, dst, layers="2,0")
    assert differences(by_hand(content, [2, 0], prefix="model.layers."), read_hf(dst)) == []
    assert "encoded" in report.checked
    made = json.loads((dst / "config.json").read_text())
    assert made["quantization_config"]["modules_to_not_convert"] == ["model.layers.0.mlp"]


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("medium") / "hf", MEDIUM, shard=30_000_000)


def test_killed_in_the_middle(medium: Path, tmp_path: Path) -> None:
    dst, source = tmp_path / "out", stamps(medium)
    process = start("slice", medium, dst, "--layers", "0-7")
    wait_until(lambda: files_made(dst), process)
    process.kill()
    process.communicate()
    assert not dst.exists() and stamps(medium) == source
    for partial in beside(dst):
        with pytest.raises(ConvtoolsError):
            inspect(partial)
        with pytest.raises(ConvtoolsError):
            verify_slice(partial)
    assert run("slice", medium, dst, "--layers", "0-7").returncode == 0
    assert beside(dst) == [] and verify_slice(dst, str(medium)).whole
    shutil.rmtree(dst)


@pytest.mark.slow
def test_killed_at_random_moments(medium: Path, tmp_path: Path) -> None:
    dst, source = tmp_path / "out", stamps(medium)
    options = ("--cover", "types", "--max-shard-size", "40MB")
    began = time.monotonic()
    assert run("slice", medium, tmp_path / "want", *options).returncode == 0
    took, want = time.monotonic() - began, hashes(tmp_path / "want")
    chance, met = random.Random("slices"), Counter[str]()
    for i in range(20):
        process = start("slice", medium, dst, *options, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(took * (i + chance.random()) / 20)
        process.kill()
        process.wait()
        met["whole" if dst.exists() else "absent"] += 1
        assert stamps(medium) == source
        for partial in beside(dst):
            with pytest.raises(ConvtoolsError):
                inspect(partial)
        if dst.exists():
            assert hashes(dst) == want
            shutil.rmtree(dst)
    assert met["absent"] >= 5, met


def test_a_disk_that_is_full(medium: Path, tmp_path: Path) -> None:
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # noqa: E731
    refused(run("slice", medium, tmp_path / "out", preexec_fn=limit), "could not write", "File too large")
    assert list(tmp_path.iterdir()) == []
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2000000", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        refused(run("slice", medium, disk / "out"), "not enough room", "bytes", "free")
        assert list(disk.iterdir()) == []
        dry = run("slice", medium, disk / "out", "--dry-run")
        assert dry.returncode == 0 and "not enough room" in dry.stdout
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_nothing_at_all_to_keep_is_refused(tmp_path: Path, dst: Path) -> None:
    src = write_small_hf(
        tmp_path / "src", {"num_hidden_layers": 2}, filled({"lm_head.weight": ("BF16", (2, 3))})
    )
    with pytest.raises(AccountingError, match="unclear"):
        cut(src, dst)
