"""The commands as a user runs them: errors in words with their exit codes, JSON, dry runs, `inspect`."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.commands import SMALL, refused, run, stamps
from tests.nemotron_checkpoints import TINY, inventory, nbytes, write_hf

TENSORS = inventory(SMALL)
LAYOUT = ("--tp", "4", "--pp", "2", "--ep", "2")

REPORT = {
    "source", "source_format", "target", "target_format", "family", "pattern", "iteration", "layout",
    "padded_vocab", "hf_tensors", "parameters", "files", "nbytes", "payload_nbytes", "peak_nbytes", "casts",
    "shifts", "left_out", "duplicates", "padding", "notes", "blocks", "dry_run", "seconds",
}  # fmt: skip
INSPECTION = {
    "path", "format", "family", "architectures", "pattern", "layers", "tensors", "parameters", "nbytes",
    "dtypes", "iteration", "layout", "encodings", "left_out", "notes",
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("small") / "hf", SMALL)


@pytest.fixture(scope="module", params=["torch_dist", "torch"])
def megatron(small: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    dst = tmp_path_factory.mktemp("megatron") / str(request.param)
    done = run("convert", small, dst, "--to", request.param, *LAYOUT)
    assert done.returncode == 0, done.stderr
    return dst


def parsed(*args: object) -> dict[str, Any]:
    """What a command with `--json` printed, and nothing else."""
    done = run(*args, "--json")
    assert done.returncode == 0 and done.stderr == "", done
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("command", [("inspect",), ("convert", "--to", "hf")], ids=["inspect", "convert"])
def test_what_is_no_checkpoint(command: tuple[str, ...], tmp_path: Path) -> None:
    name, *options = command
    dst = [tmp_path / "out"] if options else []
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("text")
    refused(run(name, tmp_path / "missing", *dst, *options), "missing` is not a directory", code=2)
    refused(run(name, tmp_path / "file", *dst, *options), "file` is not a directory", code=2)
    refused(run(name, tmp_path / "empty", *dst, *options), "an empty folder", str(tmp_path / "empty"))
    refused(run(name, tmp_path / "notes", *dst, *options), "no `config.json`", "`a.txt`")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["hf", "torch_dist", "torch"])
def test_a_partial_directory_is_no_checkpoint(small: Path, tmp_path: Path, format: str) -> None:
    partial = tmp_path / ".out.partial-0123456789abcdef"
    assert run("convert", small, tmp_path / "out", "--to", format).returncode == 0
    partial.mkdir()
    (tmp_path / "out").rename(partial / "data")
    (partial / "owner.json").write_text("{}")
    refused(run("inspect", partial), str(partial))
    refused(run("convert", partial, tmp_path / "new", "--to", "hf"), str(partial))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--to", "hf", "--tp", "2"], ["no parallel layout", "--tp"]),
        (["--to", "torch_dist", "--tp", "0"], ["--tp 0 is not a positive number"]),
        (["--to", "torch_dist", "--tp", "-1"], ["--tp -1"]),
        (["--to", "torch_dist", "--tp", "9" * 30], ["--tp 999"]),
        (["--to", "torch_dist", "--tp", "3"], ["tp=3 does not divide", "what to do"]),
        (["--to", "torch_dist", "--pp", "3"], ["pp=3 does not divide", "4"]),
        (["--to", "torch", "--ep", "3"], ["ep=3 does not divide", "4"]),
        (["--to", "torch_dist", "--padded-vocab-size", "255"], ["--padded-vocab-size 255", "256"]),
        (["--to", "torch_dist", "--iteration", "0"], ["--iteration 0"]),
        (["--to", "torch_dist", "--iteration", "latest"], ["--iteration latest", "release"]),
        (["--to", "torch_dist", "--iteration", "9" * 15], ["--iteration 999"]),
        (["--to", "torch_dist", "--iteration", "9" * 5000], ["--iteration 999"]),
        (["--to", "torch", "--mcore-version", "new"], ["--mcore-version new", "0.16"]),
        (["--to", "hf", "--max-shard-size", "huge"], ["`huge` is not a size", "5GB"]),
        (["--to", "hf", "--max-shard-size", "0"], ["less than a byte"]),
        (["--to", "hf", "--workers", "0"], ["--workers 0"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_what_cannot_be_served(small: Path, tmp_path: Path, options: list[str], words: list[str]) -> None:
    refused(run("convert", small, tmp_path / "out", *options), *words, code=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["convert"], "Missing argument 'SRC'"),
        (["convert", "a", "b"], "Missing option '--to'"),
        (["convert", "a", "b", "--to", "gguf"], "'gguf' is not one of 'hf', 'torch_dist', 'torch'"),
        (["convert", "a", "b", "--to", "hf", "--tp", "two"], "'two' is not a valid integer"),
        (["convert", "a", "b", "--to", "hf", "--hf-config", "nowhere"], "'nowhere' does not exist"),
        (["inspect"], "Missing argument 'PATH'"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_line_that_is_not_understood(args: list[str], word: str) -> None:
    done = run(*args)
    assert done.returncode == 2 and word in done.stderr and "Traceback" not in done.stderr, done


def test_where_nothing_can_be_written(small: Path, tmp_path: Path) -> None:
    options = ("--to", "torch_dist")
    src = tmp_path / "src"
    shutil.copytree(small, src)
    (tmp_path / "file").touch()
    before = stamps(src)
    refused(
        run("convert", src, tmp_path / "no/parent", *options),
        "is not a directory",
        f"mkdir -p {tmp_path / 'no'}",
    )
    refused(run("convert", src, src / "in/side", *options), "lies inside the source")
    refused(run("convert", src, src, *options, "--overwrite"), "is the source itself")
    refused(run("convert", src, tmp_path, *options, "--overwrite"), "lies inside `")
    refused(run("convert", src, tmp_path / "file", *options), "file` is not a directory")
    refused(run("convert", src, tmp_path / ("n" * 300), *options), "cannot be written: File name too long")
    (tmp_path / "link").symlink_to(src)
    refused(run("convert", src, tmp_path / "link", *options, "--overwrite"), "is the source itself")
    assert stamps(src) == before and {p.name for p in tmp_path.iterdir()} == {"src", "file", "link"}


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    done = run("inspect", os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    refused(done, "is not a directory", code=2)


def test_a_reader_that_hangs_up(small: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = run("inspect", small, "--tensors", stdout=write)
    os.close(write)
    assert done.returncode in (1, 141) and "Traceback" not in done.stderr, done


@pytest.mark.parametrize("to", ["torch_dist", "torch", "hf"])
def test_a_dry_run_writes_nothing_and_says_what_would_be(small: Path, tmp_path: Path, to: str) -> None:
    before = stamps(small.parent), stamps(tmp_path)
    options = ("--to", to, *(() if to == "hf" else LAYOUT))
    planned = parsed("convert", small, tmp_path / "out", *options, "--dry-run")
    text = run("convert", small, tmp_path / "out", *options, "--dry-run").stdout
    assert (stamps(small.parent), stamps(tmp_path)) == before
    assert planned["dry_run"] is True and "would be converted" in text
    done = parsed("convert", small, tmp_path / "out", *options)
    assert set(planned) == set(done) == REPORT
    assert {k for k in REPORT if planned[k] != done[k]} <= {"dry_run", "seconds"}
    written = [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert (len(written), sum(p.stat().st_size for p in written)) == (planned["files"], planned["nbytes"])


def test_the_report_as_json(small: Path, tmp_path: Path) -> None:
    report = parsed("convert", small, tmp_path / "out", "--to", "torch_dist", *LAYOUT, "--iteration", "42")
    assert report["source"] == str(small) and report["target"] == str(tmp_path / "out")
    assert (report["source_format"], report["target_format"]) == ("hf", "torch_dist")
    assert report["family"] == "nemotron_h" and report["pattern"] == "ME*-"
    assert report["layout"] == {"tp": 4, "pp": 2, "ep": 2, "etp": 4} and report["padded_vocab"] == 512
    assert report["hf_tensors"] == len(TENSORS) == sum(b["tensors"] for b in report["blocks"])
    assert report["parameters"] == sum(b["parameters"] for b in report["blocks"])
    assert nbytes(TENSORS) == sum(b["nbytes"] for b in report["blocks"])
    assert report["casts"] == report["left_out"] == [] and report["dry_run"] is False
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").read_text().strip() == "42"


def test_a_cast_is_reported(small: Path, tmp_path: Path) -> None:
    report = parsed("convert", small, tmp_path / "out", "--to", "hf", "--dtype", "fp32")
    bf16 = sum(dtype == "BF16" for dtype, _ in TENSORS.values())
    assert report["casts"] == [{"src": "BF16", "dst": "F32", "tensors": bf16, "exact": True}]
    assert report["payload_nbytes"] == 4 * report["parameters"]


def test_the_whole_pattern_and_path_are_printed_on_any_screen(tmp_path: Path) -> None:
    pattern = "ME" * 60
    src = write_hf(
        tmp_path / ("long" * 30), TINY | {"hybrid_override_pattern": pattern, "num_hidden_layers": 120}
    )
    done = run("convert", src, tmp_path / "out", "--to", "torch_dist", "--dry-run", env={"COLUMNS": "60"})
    joined = "".join(line.strip() for line in done.stdout.splitlines())
    assert done.returncode == 0 and "…" not in joined
    assert pattern in joined and "long" * 30 in joined and done.stderr == ""


def test_inspect_of_hf(small: Path) -> None:
    found = parsed("inspect", small)
    assert set(found) == INSPECTION
    assert (found["format"], found["family"], found["pattern"], found["layers"]) == (
        "hf",
        "nemotron_h",
        "ME*-",
        4,
    )
    assert found["tensors"] == len(TENSORS) and found["nbytes"] == nbytes(TENSORS)
    assert found["dtypes"] == {k: sum(d == k for d, _ in TENSORS.values()) for k in ("BF16", "F32")}
    assert found["iteration"] is found["layout"] is None and found["encodings"] == found["notes"] == []
    text = run("inspect", small).stdout
    assert f"{found['parameters']:,}" in text and "ME*-" in text and "nemotron_h" in text


def test_inspect_lists_tensors(small: Path) -> None:
    found = parsed("inspect", small, "--tensors")["tensors"]
    assert {t["name"]: (t["dtype"], tuple(t["shape"])) for t in found} == TENSORS
    lines = run("inspect", small, "--tensors").stdout.splitlines()
    listed = [line.split() for line in lines if line.startswith("  ")]
    assert [line[0] for line in listed] == [t["name"] for t in found]
    assert ["backbone.layers.0.mixer.conv1d.weight", "BF16", "52x1x4"] in listed


def test_inspect_of_megatron(megatron: Path) -> None:
    found = parsed("inspect", megatron, "--tensors")
    assert set(found) == INSPECTION and found["format"] == megatron.name
    assert (found["family"], found["pattern"], found["layers"]) == ("nemotron_h", "ME*-", 4)
    assert found["iteration"] == 1 and found["layout"] == {"tp": 4, "pp": 2, "ep": 2, "etp": 4}
    names = [t["name"] for t in found["tensors"]]
    where = "" if found["format"] == "torch_dist" else "mp_rank_00_000_000/"
    assert f"{where}embedding.word_embeddings.weight" in names and len(set(names)) == len(names)
    text = run("inspect", megatron, "--tensors").stdout
    assert "saved at    tp=4 pp=2 ep=2 etp=4" in text and "iteration 1" in text and "Traceback" not in text
    refused(run("inspect", megatron, "--iteration", "7"), "no `iter_0000007`", "iter_0000001")


def test_a_quantised_folder_is_named_and_refused(tmp_path: Path) -> None:
    name = "backbone.layers.1.mixer.experts.0.up_proj.weight"
    tensors = TENSORS | {name: ("F32", TENSORS[name][1]), f"{name}_scale": ("F32", ())}
    src = write_hf(tmp_path / "fp8", SMALL | {"quantization_config": {"quant_method": "fp8"}}, tensors)
    file = src / "model.safetensors"
    data = file.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    entry = header[name]
    entry["dtype"], entry["shape"] = "F8_E4M3", [4 * entry["shape"][0], entry["shape"][1]]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + n :])
    found = parsed("inspect", src)
    assert any(line.startswith("FP8") for line in found["encodings"]), found["encodings"]
    assert "FP8" in run("inspect", src).stdout and "not converted" in run("inspect", src).stdout
    refused(run("convert", src, tmp_path / "out", "--to", "torch_dist"), "FP8", name)
    assert not (tmp_path / "out").exists()


def test_an_unknown_architecture(tmp_path: Path) -> None:
    config = SMALL | {"architectures": ["MambaPalmForCausalLM"], "model_type": "mamba_palm"}
    src = write_hf(tmp_path / "src", config)
    found = parsed("inspect", src)
    assert found["family"] is found["pattern"] is None and found["architectures"] == ["MambaPalmForCausalLM"]
    assert found["tensors"] == len(TENSORS) and found["parameters"] > 0
    assert "unknown (MambaPalmForCausalLM)" in run("inspect", src).stdout
    refused(
        run("convert", src, tmp_path / "out", "--to", "torch_dist"),
        "MambaPalmForCausalLM",
        "NemotronHForCausalLM",
    )


@pytest.mark.parametrize("change", ["missing", "left over", "shape"])
def test_what_does_not_add_up_is_named(tmp_path: Path, change: str) -> None:
    tensors, name = dict(TENSORS), "backbone.layers.0.mixer.D"
    if change == "missing":
        del tensors[name]
    elif change == "left over":
        name = "backbone.layers.0.mixer.E"
        tensors[name] = ("F32", (4,))
    else:
        tensors[name] = ("F32", (5,))
    src = write_hf(tmp_path / "src", SMALL, tensors)
    refused(run("convert", src, tmp_path / "out", "--to", "torch_dist"), f"`{name}`")
    assert [p.name for p in tmp_path.iterdir()] == ["src"]
