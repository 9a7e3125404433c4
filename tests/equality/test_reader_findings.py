"""What someone met who used `compare` and `fingerprint` for the first time."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convtools
from convtools.cli.compare_table import told
from convtools.equality.compare import compare
from convtools.equality.fingerprint_store import fingerprint
from convtools.equality.options import CompareOptions
from convtools.equality.report_html import render_html
from convtools.equality.verdict import DIFFERS, MISSING_B, SKIPPED, Comparison
from convtools.errors import ConvtoolsError, UsageError
from convtools.layout.parallel import ParallelLayout, Rank, even_stages
from convtools.manifest import MANIFEST_NAME, Manifest, ManifestTensor, encode
from tests.commands import ROOT, command, run
from tests.convert.small import write_small_hf
from tests.equality.equal_pairs import (
    LLAMA_TIED,
    NEMOTRON,
    QWEN3_FP32,
    QWEN3_MOE,
    QWEN3_MOE_FUSED,
    array,
    fuse,
    put,
    write_hf,
    write_megatron,
)
from tests.equality.test_compare import ranks_of
from tests.tensors import Content

PAGE = ROOT / "docs/fingerprint.md"
HEAD, Q_PROJ = "lm_head.weight", "model.layers.3.self_attn.q_proj.weight"
UNKNOWN = {"architectures": ["Unheard"]}


def of(content: Content) -> Manifest:
    """A manifest of some tensors."""
    return fingerprint_of(content)


def fingerprint_of(content: Content, algorithm: str = "additive-127") -> Manifest:
    from convtools.equality.fingerprint import fingerprint_bytes, hexdigest

    tensors = {
        n: ManifestTensor(d, s, hashes={algorithm: hexdigest(fingerprint_bytes(data))})
        for n, (d, s, data) in content.items()
    }
    return Manifest("test", tensors)


def changed(content: Content, name: str) -> Content:
    raw = array(content, name)
    raw.reshape(-1)[1] ^= 1
    return put(content, name, raw)


def faulty(found: Comparison) -> dict[str, str]:
    return {r.name: r.verdict for r in found.tensors if r.faulty}


class TestSpellings:
    """Manifests of one model in two spellings: never a difference that is none."""

    @pytest.fixture
    def fused(self, tmp_path: Path) -> Path:
        return write_small_hf(tmp_path / "fused", QWEN3_MOE_FUSED.config, fuse(QWEN3_MOE.content()))

    def test_a_tied_head_that_one_manifest_has(self) -> None:
        content = LLAMA_TIED.content()
        without = {n: t for n, t in content.items() if n != HEAD}
        for a, b in ((of(content), of(without)), (of(without), of(content))):
            found = compare(a, b)
            assert (found.equal, found.exit_code) == (True, 0)
            assert any(f"`{HEAD}` is not stored in" in note for note in found.notes)
        own = compare(of(changed(content, HEAD)), of(without))
        assert faulty(own) == {HEAD: DIFFERS} and own.exit_code == 1

    def test_a_tied_head_and_a_folder(self, tmp_path: Path) -> None:
        content = LLAMA_TIED.content()
        without = {n: t for n, t in content.items() if n != HEAD}
        for name, held in (("with", content), ("without", without)):
            root = write_small_hf(tmp_path / name, LLAMA_TIED.config, held)
            for manifest in (of(content), of(without)):
                assert compare(root, manifest).exit_code == compare(manifest, root).exit_code == 0

    def test_a_folder_is_hashed_under_the_names_of_a_manifest(self, fused: Path, tmp_path: Path) -> None:
        content = QWEN3_MOE.content()
        split = write_hf(QWEN3_MOE, tmp_path / "split")
        for root, names in ((split, fuse(content)), (fused, content)):
            for a, b in ((root, of(names)), (of(names), root)):
                found = compare(a, b)
                assert found.equal is True and {r.name for r in found.tensors} == set(names)
            bad = compare(root, of(changed(names, Q_PROJ)))
            assert faulty(bad) == {Q_PROJ: DIFFERS} and bad.exit_code == 1

    def test_another_prefix(self, tmp_path: Path) -> None:
        content = NEMOTRON.content()
        renamed = {n.replace("backbone.", "model.", 1): t for n, t in content.items()}
        root = write_hf(NEMOTRON, tmp_path / "a")
        assert compare(root, of(renamed)).equal is True
        found = compare(of(content), of(renamed))
        assert (found.equal, found.exit_code) == (None, 2)
        assert "the two manifests spell their tensors differently" in found.verdict

    def test_two_manifests_of_two_spellings(self) -> None:
        content = QWEN3_MOE.content()
        found = compare(of(content), of(fuse(content)))
        assert (found.equal, found.exit_code) == (None, 2) and "compare a folder with one" in found.verdict
        bad = compare(of(changed(content, Q_PROJ)), of(fuse(content)))
        assert faulty(bad) == {Q_PROJ: DIFFERS} and bad.exit_code == 1

    def test_names_that_no_spelling_explains(self) -> None:
        content = QWEN3_MOE.content()
        less = {n: t for n, t in content.items() if n != Q_PROJ}
        found = compare(of(content), of(less))
        assert faulty(found) == {Q_PROJ: MISSING_B} and found.exit_code == 1
        smaller = {n: t for n, t in fuse(content).items() if n != Q_PROJ}
        assert compare(of(content), of(smaller)).exit_code == 1

    def test_a_folder_of_an_unknown_family(self, tmp_path: Path) -> None:
        content: Content = {f"model.layers.{i}.w.weight": ("F32", (2,), bytes(8)) for i in range(3)}
        root = write_small_hf(tmp_path / "a", UNKNOWN, content)
        found = compare(root, of({f"text.{n}": t for n, t in content.items()}))
        assert found.exit_code == 2 and "no known family relates" in found.verdict
        assert {r.verdict for r in found.tensors} == {SKIPPED}

    def test_megatron_checkpoints_that_are_equal_have_equal_manifests(self, tmp_path: Path) -> None:
        content = LLAMA_TIED.content()
        without = {n: t for n, t in content.items() if n != HEAD}
        made = []
        for name, held in (("with", content), ("without", without)):
            root = write_small_hf(tmp_path / name, LLAMA_TIED.config, held)
            megatron = tmp_path / f"{name} m"
            convtools.convert(root, megatron, convtools.Options(to="torch_dist", fsync=False, workers=1))
            made.append(megatron)
        assert compare(*made).equal is True
        one, other = (fingerprint(root) for root in made)
        assert one.tensors == other.tensors and HEAD not in one.tensors
        assert compare(one, of(content)).equal is True


def test_two_manifests_without_a_hash_in_common() -> None:
    content = QWEN3_MOE.content()
    found = compare(fingerprint_of(content, "xxh3-128"), of(content))
    assert found.exit_code == 2
    assert "A has xxh3-128, B has additive-127" in found.verdict and "--xxh3" in found.verdict


class TestEndings:
    """The exit code is the answer, whoever listens."""

    @pytest.fixture
    def pair(self, tmp_path: Path) -> tuple[Path, Path]:
        content: Content = {f"w{i}": ("F32", (2,), bytes(8)) for i in range(3)}
        a = write_small_hf(tmp_path / "a", UNKNOWN, content)
        return a, write_small_hf(tmp_path / "b", UNKNOWN, changed(content, "w1"))

    @pytest.mark.parametrize("json", [(), ("--json",)])
    @pytest.mark.parametrize("to", ["full", "closed pipe", "nothing"])
    def test_nobody_takes_the_output(self, pair: tuple[Path, Path], to: str, json: tuple[str, ...]) -> None:
        a, b = pair
        for sides, code in (((a, a), 0), ((a, b), 1), ((a, a / "none"), 2)):
            if to == "full":
                with open("/dev/full", "w") as out:
                    done = subprocess.run(command("compare", *sides, *json), stdout=out, cwd=ROOT)
            elif to == "closed pipe":
                read, write = os.pipe()
                os.close(read)
                done = subprocess.run(command("compare", *sides, *json), stdout=write, cwd=ROOT)
                os.close(write)
            else:
                shell = ["sh", "-c", '"$@" >&- 2>&-', "sh", *command("compare", *sides, *json)]
                done = subprocess.run(shell, cwd=ROOT)
            assert done.returncode == code

    def test_verify(self, tmp_path: Path) -> None:
        content: Content = {"model.layers.0.w": ("F32", (2,), bytes(8))}
        root = write_small_hf(tmp_path / "a", UNKNOWN | {"num_hidden_layers": 1}, content)
        (root / MANIFEST_NAME).write_bytes(encode(fingerprint(root, xxh3=True)))
        assert run("verify", root).returncode == 0
        with open("/dev/full", "w") as out:
            assert subprocess.run(command("verify", root), stdout=out, cwd=ROOT).returncode == 0
            write_small_hf(root, UNKNOWN | {"num_hidden_layers": 1}, changed(content, "model.layers.0.w"))
            assert subprocess.run(command("verify", root), stdout=out, cwd=ROOT).returncode == 1

    def test_only_its_own_kind_is_replaced(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        a, b = pair
        for name in ("model.safetensors", "config.json"):
            before = (a / name).read_bytes()
            for args in (
                ("compare", a, a, "--html", a / name, "--overwrite"),
                ("fingerprint", b, "-o", a / name, "--overwrite"),
            ):
                done = run(*args)
                assert done.returncode == 2 and "exists, and is no" in done.stderr, done
            assert (a / name).read_bytes() == before
        out, page = tmp_path / "m.json", tmp_path / "p.html"
        for args in (("fingerprint", a, "-o", out), ("compare", a, a, "--html", page)):
            assert run(*args).returncode == 0
            again = run(*args)
            assert again.returncode == 2 and "pass --overwrite" in again.stderr
            assert run(*args, "--overwrite").returncode == 0
        cut = Manifest("test", of({"w": ("F32", (2,), bytes(8))}).tensors, layers=[0])
        out.write_bytes(encode(cut))
        done = run("fingerprint", a, "-o", out, "--overwrite")
        assert done.returncode == 2 and "manifest of a slice" in done.stderr

    def test_failures_of_fingerprint_are_2(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        a, _ = pair
        (a / "model.safetensors").write_bytes(b"damaged")
        assert run("fingerprint", a, "-o", tmp_path / "m.json").returncode == 2


class TestWords:
    """What is said is what was done."""

    def test_a_part_is_no_bare_equal(self) -> None:
        import torch

        a = {f"w{i}": torch.ones(3) for i in range(45)}
        found = compare(a, {n: t.clone() for n, t in a.items()}, CompareOptions(only="w7"))
        assert (found.heading, found.compared, found.to_dict()["compared"]) == (
            "Equal (1 of 45 tensors)", 1, 1,
        )  # fmt: skip
        page = render_html(found)
        assert "<h1>Equal (1 of 45 tensors)</h1>" in page and "3 elements, 1 tensor <" in page

    def test_a_tolerance_is_no_bare_equal(self) -> None:
        import torch

        a = {"w": torch.ones(3), "v": torch.zeros(1)}
        b = {"w": torch.ones(3), "v": torch.zeros(1)}
        assert compare(a, b, CompareOptions(ulp=8)).heading == "Equal"
        b["w"][1] = torch.nextafter(b["w"][1], torch.tensor(2.0))
        found = compare(a, b, CompareOptions(ulp=8))
        assert found.heading == "Equal within ulp 8" and "at most 1 ulp, in `w`" in found.verdict

    def test_rel_is_what_rtol_takes(self) -> None:
        import torch

        a = {"w": torch.tensor([4.0, 1.0], dtype=torch.float64)}
        b = {"w": torch.tensor([2.0, 1.0], dtype=torch.float64)}
        assert compare(a, b).tensors[0].max_rel == 1.0 and compare(b, a).tensors[0].max_rel == 0.5
        assert compare(a, b, CompareOptions(rtol=1.0)).equal is True
        assert compare(a, b, CompareOptions(rtol=0.99)).equal is False
        zero = compare(a, {"w": torch.tensor([0.0, 1.0], dtype=torch.float64)}).tensors[0]
        assert zero.max_rel is None and "rel none" in told(zero)

    def test_a_pattern_that_matches_nothing(self) -> None:
        import torch

        a = {"model.layers.0.mlp.up_proj.weight": torch.ones(1), "model.norm.weight": torch.ones(1)}
        b = {n: t.clone() for n, t in a.items()}
        with pytest.raises(UsageError, match="--skip `up_proj` matches no tensor") as raised:
            compare(a, b, CompareOptions(skip="up_proj"))
        assert "`model.layers.0.mlp.up_proj.weight`" in str(raised.value)
        with pytest.raises(UsageError, match=r"model\.norm\.weight"):
            compare(a, b, CompareOptions(only=("model.nrom.weight",)))
        assert compare(a, b, CompareOptions(skip="*norm*")).compared == 1

    def test_no_causes_prints_none(self) -> None:
        import torch

        pairs = (
            (torch.tensor([0.0]), torch.tensor([-0.0])),
            (torch.arange(4.0), torch.arange(4.0) * 2),
            (torch.ones(3, 2), torch.ones(4, 2)),
        )
        for x, y in pairs:
            assert compare({"w": x}, {"w": y}).tensors[0].cause
            assert compare({"w": x}, {"w": y}, CompareOptions(causes=False)).tensors[0].cause is None

    def test_numbers_are_read_by_people(self) -> None:
        one = compare({"w": np.array([1], "f4")}, {"w": np.array([1.5], "f4")})
        assert "1 of 1 element," in told(one.tensors[0])
        assert "ulp max 4,194,304, median 4,194,304" in told(one.tensors[0])
        assert one.verdict == "not equal: 1 of 1 tensor differs: `w`"

    def test_rotary_heads_that_are_re_interleaved(self) -> None:
        import torch

        heads, size, width = 4, 8, 6
        q = torch.arange(heads * size * width, dtype=torch.float32).reshape(heads * size, width)
        halves = q.view(heads, size // 2, 2, -1).transpose(1, 2).reshape(q.shape)
        name = "model.layers.0.self_attn.q_proj.weight"
        for a, b, words in (
            (q, halves, "[4, 2] in A and as [2, 4]"),
            (halves, q, "[2, 4] in A and as [4, 2]"),
        ):
            cause = compare({name: a}, {name: b}).tensors[0].cause
            assert cause == f"re-interleaved: rows lie as {words} in B, within each of 4 heads of 8"


class TestConfigs:
    """config.json is no part of the weights, and no secret either."""

    def test_a_note_on_what_differs(self, tmp_path: Path) -> None:
        content: Content = {"w": ("F32", (2,), bytes(8))}
        one = UNKNOWN | {"rope": {"theta": 1.0, "x": 1}, "use_cache": True, "hidden_act": "silu"}
        other = UNKNOWN | {"rope": {"theta": 2.0, "x": 1}, "hidden_act": "gelu"}
        a, b = (write_small_hf(tmp_path / n, c, content) for n, c in (("a", one), ("b", other)))
        found = compare(a, b)
        assert found.equal is True and found.notes == (
            "config.json is not compared, and the two differ in `hidden_act`, `rope.theta`",
        )
        assert compare(a, a).notes == ()

    def test_two_architectures_are_said_first(self, tmp_path: Path) -> None:
        a = write_small_hf(tmp_path / "a", UNKNOWN, {f"a{i}": ("F32", (2,), bytes(8)) for i in range(9)})
        b = write_small_hf(tmp_path / "b", {"architectures": ["Other"]}, {"b": ("F32", (2,), bytes(8))})
        verdict = compare(a, b).verdict
        assert verdict.startswith("not equal: two architectures, `Unheard` in A and `Other` in B; 10 of 10")
        assert len(verdict) < 300
        lines = run("compare", a, b).stdout.splitlines()
        assert lines[0] == "two architectures, `Unheard` in A and `Other` in B"
        assert "... and 7 more" in lines and len(lines) < 12


class TestWhatIsGiven:
    """A wrong argument is answered with the right one."""

    def test_paths(self, tmp_path: Path) -> None:
        root = write_small_hf(tmp_path / "a", UNKNOWN, {"w": ("F32", (2,), bytes(8))})
        (tmp_path / "other.json").write_text('{"a": 1}')
        for given, words in (
            (tmp_path / "none", "there is no folder"),
            (tmp_path / "none.json", "there is no file"),
            (root / "model.safetensors", f"give its folder: {root}"),
            (root / "config.json", f"give its folder: {root}"),
            (tmp_path / "other.json", "is a JSON file, and no manifest"),
        ):
            with pytest.raises(ConvtoolsError, match=re.escape(words)):
                compare(given, root)
        done = run("compare", "no-such/folder-here", root, env={"HF_HUB_OFFLINE": "1"})
        assert done.returncode == 2 and "there is no folder `no-such/folder-here`" in done.stderr

    def test_hf_config(self, tmp_path: Path) -> None:
        root = write_small_hf(tmp_path / "a", UNKNOWN, {"w": ("F32", (2,), bytes(8))})
        for config, words in ((tmp_path / "none", "there is no folder"), (root, "neither is one")):
            with pytest.raises(UsageError, match=words):
                compare(root, root, CompareOptions(hf_config=config))

    def test_meta_and_sparse(self) -> None:
        import torch

        for strange, words in (
            (torch.ones(2, device="meta"), "`w` is on the meta device"),
            (torch.eye(2).to_sparse(), "`w` is a sparse tensor"),
        ):
            for call in (lambda t: compare({"w": t}, {"w": t}), lambda t: fingerprint({"w": t})):
                with pytest.raises(ConvtoolsError, match=words):
                    call(strange)


def test_the_example_of_shards_in_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    hf = write_hf(QWEN3_FP32, tmp_path / "hf")
    megatron = write_megatron(QWEN3_FP32, hf, tmp_path / "m", "torch")
    layout = ParallelLayout(2, 2, 1, 1, even_stages(4, 2))
    held = ranks_of(megatron, layout)
    monkeypatch.chdir(hf)
    before, _, after = code.partition("parts = [part]")
    names: dict[str, Any] = {"named_tensors": held[Rank(0, 0, 0, 0)]}
    exec(before, names)
    assert names["layout"] == layout
    nothing = {n: t.to("meta") for n, t in held[Rank(0, 0, 0, 0)].items()}
    with pytest.raises(UsageError, match="is on the meta device"):
        names["fingerprint_shards"](nothing, names["model"], layout, Rank(0, 0, 0, 0))
    parts = []
    for rank in layout.ranks():
        parts.append(names["fingerprint_shards"](held[rank], names["model"], layout, rank))
    assert parts[0] == names["part"]
    names["parts"] = parts
    exec(after.partition("\n")[2], names)
    want = {n: t.hashes["additive-127"] for n, t in fingerprint(megatron).tensors.items()}
    assert names["everything"] == want
