"""`compare` as a whole: any format against any, modes, verdicts, exit codes, the Python API."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import convtools
from convtools import CompareOptions, Shards, compare
from convtools.equality.verdict import CLOSE, DIFFERS, DTYPE, IDENTICAL, MISSING_A, MISSING_B, SHAPE, SKIPPED
from convtools.errors import UsageError
from convtools.layout.parallel import ParallelLayout, Rank, even_stages
from convtools.manifest import XXH3, Manifest, ManifestTensor, encode
from tests.commands import run
from tests.convert.small import write_safetensors, write_small_hf
from tests.equality.equal_pairs import (
    CASES,
    LLAMA_TIED,
    NEMOTRON,
    QWEN3_FP32,
    QWEN3_MOE,
    QWEN3_MOE_FUSED,
    QWEN3_NEXT,
    Case,
    array,
    fuse,
    live,
    put,
    write_hf,
    write_megatron,
)  # fmt: skip
from tests.oracle_cases import Layout, layouts
from tests.tensors import Content, read_hf, read_rank

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Two families in every format."""
    root, out = tmp_path_factory.mktemp("made"), {}
    for case in (QWEN3_MOE, LLAMA_TIED, QWEN3_NEXT, NEMOTRON):
        out[case.name, "hf"] = write_hf(case, root / case.name / "hf")
        for to in ("torch_dist", "torch"):
            out[case.name, to] = write_megatron(case, out[case.name, "hf"], root / case.name / to, to)
    return out


def faulty(found: convtools.Comparison) -> dict[str, str]:
    return {r.name: r.verdict for r in found.tensors if r.faulty}


def written(root: Path, case: Case, content: Content) -> Path:
    return write_small_hf(root, case.config, content)


REAL = [one for one in layouts("nemotron", "qwen", "deepseek", "llama", "gpt_oss") if one.hf is not None]


@pytest.mark.parametrize("layout", REAL, ids=str)
def test_real_megatron_checkpoints_equal_their_hf_folder(layout: Layout) -> None:
    assert layout.hf is not None
    for to in ("torch_dist", "torch_legacy"):
        if (layout.root / to).is_dir():
            found = compare(layout.hf, layout.root / to)
            assert found.equal is True, found.verdict
            assert {r.verdict for r in found.tensors} == {IDENTICAL}
            assert {r.name for r in found.tensors} == set(read_hf(layout.hf))


@pytest.mark.parametrize("b", ["hf", "torch_dist", "torch"])
@pytest.mark.parametrize("a", ["hf", "torch_dist", "torch"])
@pytest.mark.parametrize("case", [QWEN3_MOE, LLAMA_TIED, QWEN3_NEXT], ids=lambda c: c.name)
def test_any_format_against_any(case: Case, a: str, b: str, made: dict[tuple[str, str], Path]) -> None:
    found = compare(made[case.name, a], made[case.name, b])
    content = case.content()
    if "hf" not in (a, b):
        content = {n: t for n, t in content.items() if (n, case) != (HEAD, LLAMA_TIED)}
    elements = sum(len(data) // {"BF16": 2, "F32": 4}[dtype] for dtype, _, data in content.values())
    assert (found.equal, found.exit_code, found.elements) == (True, 0, elements)
    assert found.verdict == f"equal: {len(content)} tensors, {elements:,} elements, every byte the same"
    assert (found.a_format, found.b_format, found.mode) == (a, b, "exact")
    assert {r.name for r in found.tensors} == set(content)


@pytest.mark.parametrize("other", ["hf", "torch_dist", "torch"])
def test_fused_experts_equal_experts_by_name(
    other: str, made: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    fused = written(tmp_path / "fused", QWEN3_MOE_FUSED, fuse(QWEN3_MOE.content()))
    for a, b in ((fused, made["qwen3_moe", other]), (made["qwen3_moe", other], fused)):
        found = compare(a, b)
        assert found.equal is True and {r.name for r in found.tensors} == set(QWEN3_MOE.content())
    content = fuse(QWEN3_MOE.content())
    raw = array(content, "model.layers.2.mlp.experts.gate_up_proj")
    raw[4, 20, 3] ^= 1  # expert 4, a row of up: 14 are of gate
    bad = written(
        tmp_path / "bad", QWEN3_MOE_FUSED, put(content, "model.layers.2.mlp.experts.gate_up_proj", raw)
    )
    found = compare(bad, made["qwen3_moe", other])
    assert faulty(found) == {"model.layers.2.mlp.experts.4.up_proj.weight": DIFFERS}
    one = next(r for r in found.tensors if r.faulty)
    assert (one.first_index, one.different, one.max_ulp) == ((6, 3), 1, 1)
    assert (one.layer, one.component) == (2, "mlp.experts.*.up_proj.weight")


def test_a_prefix_more_is_the_same_model(tmp_path: Path) -> None:
    content = NEMOTRON.content()
    a = written(tmp_path / "a", NEMOTRON, content)
    renamed = {n.replace("backbone.", "model.", 1): t for n, t in content.items()}
    found = compare(a, written(tmp_path / "b", NEMOTRON, renamed))
    assert found.equal is True and len(found.tensors) == len(content)


def test_an_unknown_family_is_compared_by_names(tmp_path: Path) -> None:
    content: Content = {
        "x.3.w": ("F8_E4M3", (4,), b"abcd"),
        "y": ("I64", (), b"12345678"),
        "none": ("F32", (0, 3), b""),
    }
    for name in ("a", "b"):
        write_small_hf(tmp_path / name, {"architectures": ["Unheard"]}, content)
    assert (
        compare(tmp_path / "a", tmp_path / "b").verdict == "equal: 3 tensors, 5 elements, every byte the same"
    )
    write_safetensors(tmp_path / "b/model.safetensors", content | {"x.3.w": ("F8_E4M3", (4,), b"abce")})
    found = compare(tmp_path / "a", tmp_path / "b")
    assert faulty(found) == {"x.3.w": DIFFERS} and found.exit_code == 1


class TestTied:
    """A head that repeats the embedding."""

    def test_a_copy_on_one_side_is_said(self, made: dict[tuple[str, str], Path]) -> None:
        found = compare(made["llama tied", "hf"], made["llama tied", "torch_dist"])
        assert found.notes == (f"`{HEAD}` is not stored in B: compared with `{EMBED}`, which it repeats",)

    def test_a_copy_that_is_not_one_differs(self, made: dict[tuple[str, str], Path], tmp_path: Path) -> None:
        content = LLAMA_TIED.content()
        raw = array(content, HEAD)
        raw[3, 5] ^= 4
        bad = written(tmp_path / "bad", LLAMA_TIED, put(content, HEAD, raw))
        without = written(tmp_path / "without", LLAMA_TIED, {n: t for n, t in content.items() if n != HEAD})
        for other in (made["llama tied", "torch"], without):
            found = compare(bad, other)
            assert faulty(found) == {HEAD: DIFFERS}
            one = next(r for r in found.tensors if r.faulty)
            assert one.cause == f"one side repeats `{EMBED}` here, and the copy is not the same"
        assert compare(without, made["llama tied", "torch"]).equal is True

    def test_an_untied_head_must_be_there(self, made: dict[tuple[str, str], Path], tmp_path: Path) -> None:
        content = {n: t for n, t in QWEN3_MOE.content().items() if n != HEAD}
        found = compare(made["qwen3_moe", "torch"], written(tmp_path / "a", QWEN3_MOE, content))
        assert faulty(found) == {HEAD: MISSING_B}


class TestOneSideOnly:
    """Names of both sides count (peers iterate over one side's)."""

    def test_missing_on_either_side(self, made: dict[tuple[str, str], Path], tmp_path: Path) -> None:
        content, name = QWEN3_MOE.content(), "model.layers.1.self_attn.q_norm.weight"
        less = written(tmp_path / "less", QWEN3_MOE, {n: t for n, t in content.items() if n != name})
        for to in ("hf", "torch_dist"):
            whole = made["qwen3_moe", to]
            assert faulty(compare(less, whole)) == {name: MISSING_A}
            assert faulty(compare(whole, less)) == {name: MISSING_B}
        found = compare(less, made["qwen3_moe", "hf"])
        assert found.verdict == f"not equal: 1 of 111 tensors is missing in A: `{name}`"

    def test_mtp_on_one_side(self, tmp_path: Path) -> None:
        changes = (("num_nextn_predict_layers", 1),)
        case = Case("mtp", "DeepseekV3ForCausalLM", changes, (("mtp", True),))
        content = case.content()
        whole = written(tmp_path / "whole", case, content)
        mtp = {n for n in content if n.startswith("model.layers.4.")}
        without = written(tmp_path / "without", case, {n: t for n, t in content.items() if n not in mtp})
        assert len(mtp) > 10
        assert faulty(compare(whole, without)) == dict.fromkeys(mtp, MISSING_B)
        dist = write_megatron(case, without, tmp_path / "dist", "torch_dist")
        assert faulty(compare(dist, whole)) == dict.fromkeys(mtp, MISSING_A)

    def test_nothing_in_common_and_nothing_at_all(self) -> None:
        found = compare({"a": torch.zeros(2)}, {"b": torch.zeros(2)})
        assert faulty(found) == {"a": MISSING_B, "b": MISSING_A} and found.equal is False
        assert (compare({}, {}).equal, compare({}, {}).verdict) == (
            None,
            "could not tell: nothing was compared",
        )

    def test_a_stray_copy_in_another_shard(self, tmp_path: Path) -> None:
        content = QWEN3_MOE.content()
        a = written(tmp_path / "a", QWEN3_MOE, content)
        b = tmp_path / "b"
        shutil.copytree(a, b)
        (b / "model.safetensors").rename(b / "one.safetensors")
        write_safetensors(b / "two.safetensors", {EMBED: content[EMBED], "extra": content[EMBED]})
        index = {"weight_map": dict.fromkeys(content, "one.safetensors") | {"extra": "two.safetensors"}}
        (b / "model.safetensors.index.json").write_text(json.dumps(index))
        found = compare(a, b, CompareOptions(skip=("extra",)))
        assert faulty(found) == {f"{EMBED} in two.safetensors": MISSING_A}


class TestShapesAndDtypes:
    """Sizes and dtypes come first: nothing is upcast before it is compared."""

    def test_dtype(self) -> None:
        a, b = {"w": torch.ones(3, dtype=torch.bfloat16)}, {"w": torch.ones(3)}
        found = compare(a, b)
        assert faulty(found) == {"w": DTYPE} and found.equal is False
        assert (found.tensors[0].dtype_a, found.tensors[0].dtype_b, found.tensors[0].elements) == (
            "BF16",
            "F32",
            0,
        )

    def test_shape(self) -> None:
        assert faulty(compare({"w": torch.ones(2, 3)}, {"w": torch.ones(3, 2)})) == {"w": SHAPE}
        assert faulty(compare({"w": torch.ones(1)}, {"w": torch.ones(())})) == {"w": SHAPE}

    def test_ignored_loudly(self) -> None:
        rng = torch.Generator().manual_seed(0)
        a = {"w": torch.randn(50, generator=rng).bfloat16(), "same": torch.ones(2)}
        b = {"w": a["w"].float(), "same": torch.ones(2)}
        found = compare(a, b, CompareOptions(ignore_dtype=True))
        assert found.equal is True and found.mode == "exact, dtypes ignored"
        assert {r.name: r.verdict for r in found.tensors} == {"w": CLOSE, "same": IDENTICAL}
        assert (
            "in value, DTYPES IGNORED: 2 tensors, 52 elements; 1 tensor not the same bytes" in found.verdict
        )
        assert any(note.startswith("DTYPES IGNORED: 1 tensor of") for note in found.notes)
        b["w"][7] = torch.nextafter(b["w"][7], torch.tensor(9.0))
        found = compare(a, b, CompareOptions(ignore_dtype=True))
        assert faulty(found) == {"w": DIFFERS}
        assert (found.tensors[0].first_index, found.tensors[0].max_ulp) == ((7,), 1)
        assert compare(a, b, CompareOptions(ignore_dtype=True, ulp=1)).equal is True
        ints = compare(
            {"w": torch.ones(2)}, {"w": torch.ones(2, dtype=torch.int32)}, CompareOptions(ignore_dtype=True)
        )
        assert faulty(ints) == {"w": DTYPE}


class TestModes:
    """Exact unless told otherwise (B98: a tolerance hides a sync that did not happen)."""

    def test_B98_one_step_in_a_hundred_elements(self) -> None:
        a = {"w": torch.ones(100, dtype=torch.bfloat16)}
        b = {"w": a["w"].clone()}
        b["w"][42] = 1.0078125
        found = compare(a, b)
        assert faulty(found) == {"w": DIFFERS} and found.tensors[0].first_index == (42,)
        for options in (CompareOptions(ulp=1), CompareOptions(atol=0.01), CompareOptions(rtol=0.01)):
            close = compare(a, b, options)
            assert close.equal is True and close.tensors[0].verdict == CLOSE
            values = "at most 0.00781, in `w`; relative at most 0.00775"
            far = "at most 1 ulp, in `w`" if options.ulp else values
            said = f"equal within {options.mode}: 1 tensor, 100 elements; 1 tensor not the same bytes ({far})"
            assert close.verdict == said
            assert close.tensors[0].max_ulp == 1 and close.tensors[0].different == 0
        assert compare(a, b, CompareOptions(ulp=0)).equal is False

    def test_modes_are_named(self) -> None:
        modes = [
            CompareOptions(**o).mode for o in ({}, {"ulp": 2}, {"atol": 1e-3}, {"rtol": 0.1, "atol": 0.0})
        ]
        assert modes == ["exact", "ulp 2", "atol 0.001 rtol 0", "atol 0 rtol 0.1"]

    def test_only_and_skip_are_in_the_verdict(self, made: dict[tuple[str, str], Path]) -> None:
        a, b = made["qwen3_moe", "hf"], made["qwen3_moe", "torch_dist"]
        found = compare(a, b, CompareOptions(skip=("*.experts.*",)))
        assert found.verdict.endswith("every byte the same, 72 tensors not compared")
        assert sum(r.verdict == SKIPPED for r in found.tensors) == 72 and found.equal is True
        only = compare(a, b, CompareOptions(only=("*norm*",), skip=("model.layers.0.*",)))
        assert {r.name for r in only.tensors if r.verdict == IDENTICAL} == {
            n for n in QWEN3_MOE.content() if "norm" in n and not n.startswith("model.layers.0.")
        }
        with pytest.raises(UsageError, match=r"--only `nothing\*` matches no tensor"):
            compare(a, b, CompareOptions(only=("nothing*",)))

    @pytest.mark.parametrize(
        "bad", [{"ulp": -1}, {"ulp": 1, "atol": 1.0}, {"atol": float("nan")}, {"workers": 0}]
    )
    def test_options_that_cannot_be(self, bad: dict[str, Any]) -> None:
        with pytest.raises(UsageError):
            compare({}, {}, CompareOptions(**bad))
        with pytest.raises(UsageError, match="not something to compare"):
            compare(3, {})


class TestLive:
    """Named tensors and ranks in memory, as files are."""

    def test_B93_one_memory_is_no_comparison(self) -> None:
        a = {"w": torch.arange(4.0), "v": torch.arange(3.0)}
        found = compare(
            a, {n: t.detach().cpu() for n, t in a.items()}
        )  # `.cpu()` of a CPU tensor is the tensor
        assert (found.equal, found.exit_code) == (None, 2)
        assert "2 tensors of A and B are one memory, such as `w`" in found.verdict
        copied = {n: t.clone() for n, t in a.items()}
        assert compare(a, copied).equal is True
        other = compare(a | {"v": a["v"] + 1}, a)
        assert other.equal is False and faulty(other) == {"v": DIFFERS}  # what is proven stands
        a["w"][2] = -1
        assert faulty(compare(a, copied)) == {"w": DIFFERS}

    def test_B94_the_same_NaN(self) -> None:
        a = torch.tensor([float("nan"), 1.0])
        assert compare({"w": a}, {"w": a.clone()}).equal is True
        assert compare({"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])}).equal is False

    def test_strides_numpy_and_modules(self) -> None:
        wide = torch.arange(24.0).reshape(4, 6)
        assert compare({"w": wide.T}, {"w": wide.T.contiguous()}).equal is True
        assert compare({"w": wide[:, ::2]}, {"w": wide.numpy().copy()[:, ::2]}).equal is True
        assert compare({"w": np.float32(3)}, {"w": torch.tensor(3.0)}).equal is True
        module = torch.nn.Linear(3, 2)
        assert compare(module, {n: t.clone() for n, t in module.state_dict().items()}).equal is True
        with pytest.raises(UsageError, match="is no tensor"):
            compare({"w": [1, 2]}, {"w": wide})

    @pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
    def test_tensors_against_a_folder(self, case: Case, tmp_path: Path) -> None:
        folder = write_hf(case, tmp_path / "hf")
        found = compare(live(case.content()), folder)
        assert found.equal is True and len(found.tensors) == len(case.content())

    @pytest.mark.parametrize("case", [NEMOTRON, QWEN3_MOE, LLAMA_TIED, QWEN3_NEXT], ids=lambda c: c.name)
    def test_ranks_against_a_folder(self, case: Case, made: dict[tuple[str, str], Path]) -> None:
        sizes = dict(case.sizes)
        stages = even_stages(convtools.open_source(made[case.name, "hf"]).model.spec.num_layers, 2)
        layout = ParallelLayout(2, 2, sizes.get("ep", 1), sizes.get("etp", 2), stages)
        held = ranks_of(made[case.name, "torch"], layout)
        found = compare(made[case.name, "hf"], Shards(held, layout, case.config))
        assert found.equal is True, found.verdict
        key, name = next((k, n) for k in held for n in held[k] if n.endswith("linear_proj.weight"))
        held[key][name][0, 0] += 1
        assert len(faulty(compare(made[case.name, "hf"], Shards(held, layout, case.config)))) == 1

    def test_a_replica_that_differs(self, made: dict[tuple[str, str], Path]) -> None:
        layout = ParallelLayout(2, 2, 2, 2, even_stages(4, 2))
        held = ranks_of(made["qwen3_moe", "torch"], layout)
        held[Rank(1, 0, 1, 1)]["decoder.layers.0.mlp.router.weight"][2, 3] += 1
        found = compare(made["qwen3_moe", "hf"], Shards(held, layout, QWEN3_MOE.config))
        assert faulty(found) == {"model.layers.0.mlp.gate.weight": DIFFERS}
        one = next(r for r in found.tensors if r.faulty)
        assert (
            one.cause
            and one.cause.startswith("B's copies of it: ")
            and one.cause.endswith("are not the same")
        )


def ranks_of(root: Path, layout: ParallelLayout) -> dict[Rank, dict[str, torch.Tensor]]:
    """What each rank of a legacy checkpoint holds, read by torch."""
    folder = root / "iter_0000001"
    out = {}
    for rank in layout.ranks():
        name = f"mp_rank_{rank.tp:02d}" + (f"_{rank.pp:03d}" if layout.pp > 1 else "")
        name += f"_{rank.ep:03d}" if layout.ep > 1 else ""
        value, _, extra = read_rank(folder / name / "model_optim_rng.pt")
        out[rank] = {n: t.clone() for n, t in value["model"].items() if n not in extra}
    return out


class TestManifests:
    """Hashes instead of bytes: the verdict says so."""

    def manifest(self, content: Content, path: Path) -> Path:
        import xxhash

        tensors = {
            n: ManifestTensor(d, s, hashes={XXH3: xxhash.xxh3_128(data).hexdigest()})
            for n, (d, s, data) in content.items()
        }
        path.write_bytes(encode(Manifest("test", tensors)))
        return path

    @pytest.mark.parametrize("to", ["hf", "torch_dist", "torch"])
    def test_against_any_store(self, to: str, made: dict[tuple[str, str], Path], tmp_path: Path) -> None:
        path = self.manifest(QWEN3_NEXT.content(), tmp_path / "m.json")
        found = compare(path, made["qwen3_next", to])
        assert found.verdict == "equal by fingerprint (xxh3-128, not cryptographic): 130 tensors"
        assert (found.equal, found.a_format) == (True, "manifest")
        content = QWEN3_NEXT.content()
        raw = array(content, EMBED)
        raw[1, 1] ^= 1
        bad = self.manifest(put(content, EMBED, raw), tmp_path / "bad.json")
        assert faulty(compare(made["qwen3_next", to], bad)) == {EMBED: DIFFERS}
        assert faulty(compare(path, bad)) == {EMBED: DIFFERS} and compare(path, path).equal is True

    def test_what_a_hash_cannot_say(self, tmp_path: Path) -> None:
        path = self.manifest(QWEN3_FP32.content(), tmp_path / "m.json")
        with pytest.raises(UsageError, match="holds hashes"):
            compare(path, path, CompareOptions(ulp=1))
        bare = {n: ManifestTensor(d, s) for n, (d, s, _) in QWEN3_FP32.content().items()}
        assert compare(Manifest("test", bare), path).equal is None


def test_padding_that_is_not_zero_is_noted(made: dict[tuple[str, str], Path]) -> None:
    layout = ParallelLayout(2, 2, 2, 2, even_stages(4, 2))
    held = ranks_of(made["qwen3_moe", "torch"], layout)
    for rank in layout.ranks():
        if rank.tp == 1 and rank.pp == 0:
            held[rank]["embedding.word_embeddings.weight"][-2:] = 1
    found = compare(Shards(held, layout, QWEN3_MOE.config), made["qwen3_moe", "hf"])
    assert found.equal is True
    assert (
        len(found.notes) == 1 and "2 of 11 rows" in found.notes[0] and "past the vocabulary" in found.notes[0]
    )


class TestCommand:
    """The command line: codes, JSON, the page."""

    def test_equal(self, made: dict[tuple[str, str], Path], tmp_path: Path) -> None:
        page = tmp_path / "report.html"
        done = run("compare", made["qwen3_moe", "hf"], made["qwen3_moe", "torch_dist"], "--html", page)
        assert (
            done.returncode == 0 and "equal: 111 tensors, 38,690 elements, every byte the same" in done.stdout
        )
        before = page.read_bytes()
        again = run("compare", made["qwen3_moe", "hf"], made["qwen3_moe", "torch"], "--html", page)
        assert again.returncode == 2 and "exists" in again.stderr and page.read_bytes() == before
        assert (
            run(
                "compare", made["qwen3_moe", "hf"], made["qwen3_moe", "torch"], "--html", page, "--overwrite"
            ).returncode
            == 0
        )

    def test_not_equal(self, made: dict[tuple[str, str], Path], tmp_path: Path) -> None:
        content, name = QWEN3_MOE.content(), "model.layers.3.self_attn.q_proj.weight"
        raw = array(content, name)
        bad = written(tmp_path / "bad", QWEN3_MOE, put(content, name, np.roll(raw, 10, 0)))
        done = run("compare", made["qwen3_moe", "torch"], bad)
        assert done.returncode == 1 and done.stderr == ""
        assert f"{name}: differs; " in done.stdout and "rows are shifted by 10" in done.stdout
        assert "not equal: 1 of 111 tensors differs: `" in done.stdout
        told = json.loads(run("compare", made["qwen3_moe", "torch"], bad, "--json").stdout)
        assert (told["equal"], told["counts"]) == (False, {"identical": 110, "differs": 1})
        assert [t["name"] for t in told["tensors"] if t["verdict"] == "differs"] == [name]

    @pytest.mark.parametrize(
        "args",
        [
            ("x", "y"),
            ("--ulp", "-1", ".", "."),
            ("--nonsense",),
            ("only-one",),
            ("--ulp", "1", "--atol", "1", "a", "b"),
        ],
    )
    def test_what_cannot_be_told_is_2(self, args: tuple[str, ...], tmp_path: Path) -> None:
        done = run("compare", *args)
        assert done.returncode == 2 and "Traceback" not in done.stderr and "equal:" not in done.stdout
