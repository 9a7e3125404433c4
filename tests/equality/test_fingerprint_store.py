"""One fingerprint for one set of weights: in any format and layout, from files and from ranks."""

import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, reject, settings, strategies as st

import convtools
from convtools.conversion.api import open_source
from convtools.equality import fingerprint_reading
from convtools.equality.canonical import Side, open_side
from convtools.equality.fingerprint import (
    ALGORITHM,
    COMPILED,
    NUMPY,
    fingerprint_bytes,
    hexdigest,
    path_used,
    paths,
)
from convtools.equality.fingerprint_reading import cut
from convtools.equality.fingerprint_shards import combine_shards, fingerprint_shards
from convtools.equality.fingerprint_store import fingerprint
from convtools.errors import AccountingError, CheckpointError, ConfigError, UsageError
from convtools.layout.parallel import Rank
from convtools.layout.plan import Move, Stride
from convtools.manifest import MANIFEST_NAME, XXH3, Manifest, read_manifest
from tests.commands import SMALL, refused, run
from tests.convert.small import filled, torch_files, write_safetensors, write_small_hf
from tests.families.test_every_family import cases, each_architecture, options, place
from tests.nemotron_checkpoints import inventory, write_hf
from tests.oracle_cases import Layout, layouts
from tests.tensors import Content, read_hf, read_rank

TIED: dict[str, Any] = SMALL | {"tie_word_embeddings": True}


def expected(content: Content) -> dict[str, str]:
    """What every tensor must have, from its bytes."""
    return {name: hexdigest(fingerprint_bytes(data)) for name, (_, _, data) in content.items()}


def hashes(manifest: Manifest, algorithm: str = ALGORITHM) -> dict[str, str]:
    return {name: tensor.hashes[algorithm] for name, tensor in manifest.tensors.items()}


def kinds(manifest: Manifest) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in manifest.tensors.items()}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "hf", SMALL, inventory(SMALL))


@pytest.mark.parametrize("path", [COMPILED, NUMPY])
def test_of_a_folder(small: Path, path: str) -> None:
    if path not in paths():
        pytest.skip("the compiled kernel was not built: pip install -e . with a C compiler builds it")
    content = read_hf(small)
    made = fingerprint(small, xxh3=True, path=path)
    assert hashes(made) == expected(content)
    assert kinds(made) == {name: value[:2] for name, value in content.items()}
    import xxhash

    assert hashes(made, XXH3) == {n: xxhash.xxh3_128_hexdigest(data) for n, (_, _, data) in content.items()}
    assert made.source is not None and (made.source.format, made.source.name) == ("hf", "hf")
    assert XXH3 not in next(iter(fingerprint(small).tensors.values())).hashes


@pytest.mark.parametrize("path", [COMPILED, NUMPY])
@pytest.mark.parametrize(
    "chosen",
    [
        {"to": "torch_dist"},
        {"to": "torch_dist", "tp": 2, "pp": 2, "ep": 4},
        {"to": "torch", "tp": 4, "pp": 2, "ep": 2},
    ],
    ids=lambda c: "-".join(map(str, c.values())),
)
def test_of_megatron_checkpoints(small: Path, tmp_path: Path, chosen: dict[str, Any], path: str) -> None:
    if path not in paths():
        pytest.skip("the compiled kernel was not built")
    convtools.convert(small, tmp_path / "m", convtools.Options(fsync=False, **chosen))
    made, of_hf = fingerprint(tmp_path / "m", path=path), fingerprint(small, xxh3=True)
    assert (hashes(made), kinds(made)) == (hashes(of_hf), kinds(of_hf))
    assert made.source is not None and made.source.format == chosen["to"]
    assert hashes(fingerprint(tmp_path / "m", xxh3=True, path=path), XXH3) == hashes(of_hf, XXH3)


@each_architecture
@settings(max_examples=4)
@given(st.data())
def test_every_architecture_at_any_layout(architecture: str, data: st.DataObject) -> None:
    """From the files as from the ranks that hold them: every element counts once, norms as HF stores them."""
    case = data.draw(cases(architecture))
    to = data.draw(st.sampled_from(["torch_dist", "torch"]))
    with place(case) as (root, src):
        more = case.layout | {"make_vocab_size_divisible_by": data.draw(st.sampled_from([1, 8]))}
        assert hashes(fingerprint(src)) == expected(case.content)
        try:
            convtools.convert(src, root / "m", options(to, **more))
        except ConfigError:  # a model that Megatron cannot compute
            reject()
        copies = {copy.name for copy in open_source(root / "m").model.copies()}  # Megatron stores none
        own = {name: value for name, value in expected(case.content).items() if name not in copies}
        assert hashes(fingerprint(root / "m")) == own
        if to == "torch":
            assert of_ranks(root / "m") == own


SAVED = [
    (layout, kind)
    for layout in layouts("nemotron", "llama", "qwen", "deepseek", "gpt_oss")
    for kind in ("torch_dist", "torch_legacy")
    if layout.hf and (layout.root / kind).is_dir()
]


@pytest.mark.parametrize(("layout", "kind"), SAVED, ids=[f"{layout}-{kind}" for layout, kind in SAVED])
def test_of_what_real_megatron_wrote(layout: Layout, kind: str) -> None:
    """The HF folder that its own converter made of the same weights has the same hashes."""
    made = fingerprint(layout.root / kind, hf_config=layout.hf)
    assert layout.hf
    want = expected(read_hf(layout.hf))
    if "lm_head.weight" not in made.tensors:  # tied: Megatron holds no second copy
        assert want.pop("lm_head.weight") == hashes(made)[next(n for n in want if "embed" in n)]
    assert hashes(made) == want


def of_ranks(root: Path) -> dict[str, str]:
    """What all ranks of a legacy checkpoint come to, each from its own file alone."""
    source = open_source(root)
    layout = source.layout
    assert layout is not None
    files = {path.parent.name: path for path in torch_files(next(root.glob("iter_*")))}
    parts = []
    for rank in layout.ranks():
        folder = f"mp_rank_{rank.tp:02d}"
        if layout.pp > 1:
            folder += f"_{rank.pp:03d}"
        if layout.ep > 1:
            folder += f"_{rank.ep:03d}"
        import torch

        value = torch.load(files[folder], weights_only=False)
        chunks = [value["model"]] if layout.vpp == 1 else [value[f"model{i}"] for i in range(layout.vpp)]
        named = [{n: t for n, t in chunk.items() if not n.endswith("_extra_state")} for chunk in chunks]
        parts.append(fingerprint_shards(named, source.model, layout, rank))
    assert sum(len(p) for p in parts) >= len(source.hf)
    return combine_shards(parts, source.model)


@pytest.mark.parametrize("etp", [1, 2, 4])
@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
def test_ranks_with_virtual_stages_and_expert_parallelism(
    config: dict[str, Any], etp: int, tmp_path: Path
) -> None:
    src = write_hf(tmp_path / "hf", config, inventory(config))
    more = {"tp": 4, "pp": 2, "hybrid_layer_pattern": "M|E|*|-", "ep": 2 if etp < 4 else 1, "etp": etp}
    convtools.convert(src, tmp_path / "m", options("torch", **more))
    want = expected(read_hf(src))
    assert {n: of_ranks(tmp_path / "m")[n] for n in want} == want


def test_a_rank_needs_no_other(small: Path, tmp_path: Path) -> None:
    """Which rank counts what: the first of those that hold the same; and a stage's copies never count."""
    convtools.convert(small, tmp_path / "m", options("torch", tp=2, ep=2))
    source = open_source(tmp_path / "m")
    assert source.layout is not None
    parts = {}
    for rank in source.layout.ranks():
        file = tmp_path / f"m/iter_0000001/mp_rank_{rank.tp:02d}_{rank.ep:03d}/model_optim_rng.pt"
        value, _, extra = read_rank(file)
        named = {n: t for n, t in value["model"].items() if n not in extra}
        parts[rank] = fingerprint_shards(named, source.model, source.layout, rank)
    norms, first = "backbone.layers.0.norm.weight", Rank(0, 0, 0, 0)
    assert [r for r, part in parts.items() if norms in part] == [first]
    embedding = "backbone.embeddings.weight"
    assert [(r.tp, r.ep) for r, part in parts.items() if embedding in part] == [
        (0, 0),
        (1, 0),
    ]  # ep 1 holds both again
    missing = {n: t for n, t in named.items() if n != "embedding.word_embeddings.weight"}
    with pytest.raises(AccountingError, match=r"missing: `embedding\.word_embeddings\.weight`"):
        fingerprint_shards(missing, source.model, source.layout, rank)
    wrong = named | {"embedding.word_embeddings.weight": named["embedding.word_embeddings.weight"][:, 1:]}
    with pytest.raises(AccountingError, match=r"shape: `embedding\.word_embeddings\.weight` is"):
        fingerprint_shards(wrong, source.model, source.layout, rank)
    with pytest.raises(AccountingError, match="no rank has a part"):
        combine_shards([parts[Rank(1, 0, 1, 1)]], source.model)
    with pytest.raises(UsageError, match="2 model chunks were given"):
        fingerprint_shards([named, named], source.model, source.layout, rank)


def test_a_tied_head_is_hashed_as_what_it_repeats(tmp_path: Path) -> None:
    content = filled(inventory(TIED))
    content["lm_head.weight"] = content["backbone.embeddings.weight"]
    src = write_small_hf(tmp_path / "hf", TIED, content)
    convtools.convert(src, tmp_path / "m", options("torch", pp=2))
    assert hashes(fingerprint(src)) == expected(content)
    stored = {name: value for name, value in content.items() if name != "lm_head.weight"}
    assert hashes(fingerprint(tmp_path / "m")) == expected(stored)
    only = fingerprint(tmp_path / "m", only=["lm_head.weight"])
    assert hashes(only) == {"lm_head.weight": expected(content)["lm_head.weight"]}
    content["lm_head.weight"] = (*content["backbone.embeddings.weight"][:2], bytes(2 * 256 * 16))
    write_safetensors(src / "model.safetensors", content)
    assert hashes(fingerprint(src)) == expected(content)  # each as it is: here they differ


def test_of_a_folder_that_no_family_knows(tmp_path: Path) -> None:
    """Any dtype, also narrower than a byte; scalars and tensors of nothing."""
    content: Content = {
        "a.blocks": ("F4", (3, 6), bytes(range(9))),
        "b": ("F8_E4M3", (5,), b"12345"),
        "c": ("I64", (), bytes(range(8))),
        "d": ("BF16", (0, 4), b""),
        "e": ("C64", (2,), bytes(range(16))),
    }
    root = write_small_hf(tmp_path / "x", {"architectures": ["NobodyKnows"]}, content)
    for xxh3 in (False, True):
        made = fingerprint(root, xxh3=xxh3)
        assert hashes(made) == expected(content)
        assert kinds(made) == {name: value[:2] for name, value in content.items()}


def test_of_live_tensors_and_of_an_opened_source(small: Path) -> None:
    import torch
    from safetensors.torch import load_file

    want = expected(read_hf(small))
    files = sorted(small.glob("*.safetensors"))
    named = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert hashes(fingerprint(named)) == want
    strided = {n: t.T.contiguous().T if t.dim() == 2 else t for n, t in named.items()}
    assert hashes(fingerprint(strided)) == want
    assert hashes(fingerprint(open_source(small))) == want
    side = open_side(str(small))
    assert isinstance(side, Side) and hashes(fingerprint(side)) == want
    linear = torch.nn.Linear(7, 5)
    assert set(hashes(fingerprint(linear))) == {"weight", "bias"}


def test_one_bit_anywhere_shows_in_its_tensor_only(small: Path, tmp_path: Path) -> None:
    convtools.convert(small, tmp_path / "m", options("torch_dist", tp=2))
    before = hashes(fingerprint(small))
    (file,) = small.glob("*.safetensors")
    content = read_hf(small)
    for name in list(content)[::5]:
        dtype, shape, data = content[name]
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        write_safetensors(file, content | {name: (dtype, shape, bytes(flipped))})
        after = hashes(fingerprint(small))
        assert [n for n in before if before[n] != after[n]] == [name]
    assert hashes(fingerprint(tmp_path / "m")) == before


def test_copies_that_differ_are_an_error_that_names_both(small: Path, tmp_path: Path) -> None:
    convtools.convert(small, tmp_path / "m", options("torch", tp=2))
    file = tmp_path / "m/iter_0000001/mp_rank_01/model_optim_rng.pt"
    source = open_source(tmp_path / "m")
    kept, repeated = next(pair for pair in source.duplicates if "final_norm" in pair.kept)
    (blob,) = source.tensors[repeated].blobs
    assert blob.path == file
    with file.open("r+b") as f:
        f.seek(blob.offset)
        byte = f.read(1)[0]
        f.seek(blob.offset)
        f.write(bytes([byte ^ 1]))
    with pytest.raises(AccountingError, match="copies of one tensor differ") as raised:
        fingerprint(tmp_path / "m")
    assert kept in str(raised.value) and repeated in str(raised.value)


def test_what_cannot_be_hashed(small: Path, tmp_path: Path) -> None:
    made = fingerprint(small)
    with pytest.raises(UsageError, match="a manifest has no weights"):
        fingerprint(made)
    with pytest.raises(UsageError, match="no tensor `nothing`"):
        fingerprint(small, only=["nothing", "lm_head.weight"])
    with pytest.raises(UsageError, match="--iteration"):
        fingerprint(small, iteration=3)
    with pytest.raises(UsageError):
        fingerprint(tmp_path / "nowhere")


@pytest.mark.parametrize("to", ["hf", "torch_dist"])
def test_a_file_that_ends_or_vanishes_or_changes_while_it_is_read(
    to: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if to == "torch_dist":
        convtools.convert(small, tmp_path / "m", options(to))
    root = small if to == "hf" else tmp_path / "m"
    file = max((p for p in root.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    whole, real = file.read_bytes(), fingerprint_reading._Run.job

    def then(change: Any) -> None:
        done: list[int] = []

        def job(self: Any, items: Any) -> None:
            if not done:
                change()
                done.append(1)
            real(self, items)

        monkeypatch.setattr(fingerprint_reading._Run, "job", job)

    then(lambda: os.truncate(file, len(whole) // 2))
    with pytest.raises(CheckpointError, match="ends before the tensor's bytes do"):
        fingerprint(root)
    file.write_bytes(whole)
    then(file.unlink)
    with pytest.raises(CheckpointError, match="cannot open"):
        fingerprint(root)
    file.write_bytes(whole)
    then(lambda: file.write_bytes(whole[:-1] + b"?"))
    with pytest.raises(CheckpointError, match="changed while it was read"):
        fingerprint(root)
    monkeypatch.undo()
    file.write_bytes(whole)
    assert hashes(fingerprint(root)) == expected(read_hf(small))


@settings(max_examples=200)
@given(st.data())
def test_a_cut_move_is_the_same_bytes(data: st.DataObject) -> None:
    number = st.integers(1, 6)
    run_, loops = data.draw(st.integers(1, 40)), []
    src = dst = run_
    for _ in range(data.draw(st.integers(0, 3))):
        n = data.draw(number)
        loops.insert(0, Stride(n, dst * data.draw(number), src * data.draw(number)))
        dst, src = loops[0].dst * n, loops[0].src * n
    whole = Move(data.draw(number), data.draw(number), tuple(loops), run_)
    most = data.draw(st.integers(1, 300))

    def places(move: Move) -> list[tuple[int, int]]:
        return [(d + i, s + i) for d, s in move.runs() for i in range(move.run)]

    parts = list(cut(whole, most))
    assert sorted(p for part in parts for p in places(part)) == sorted(places(whole))
    assert all(max(s for _, s in places(p)) - min(s for _, s in places(p)) < most for p in parts)


def test_progress_comes_to_all_bytes(small: Path, tmp_path: Path) -> None:
    convtools.convert(small, tmp_path / "m", options("torch", tp=2))
    for root in (small, tmp_path / "m"):
        for xxh3 in (False, True):
            told: list[int] = []
            asked: list[int] = []

            def bar(nbytes: int, told: list[int] = told, asked: list[int] = asked) -> Any:
                asked.append(nbytes)
                return nullcontext(told.append)

            fingerprint(root, xxh3=xxh3, bar=bar)
            assert sum(told) == asked[0] > 10_000


def test_the_command(small: Path, tmp_path: Path) -> None:
    convtools.convert(small, tmp_path / "m", options("torch_dist", tp=2))
    done = run("fingerprint", small, "-o", tmp_path / "a.json")
    assert done.returncode == 0 and ALGORITHM in done.stdout and path_used() in done.stdout, done
    done = run("fingerprint", tmp_path / "m", "-o", tmp_path / "b.json", "--xxh3", "--json", "--workers", "1")
    facts = json.loads(done.stdout)
    content = read_hf(small)
    assert (facts["tensors"], facts["computed_by"]) == (len(content), path_used())
    assert facts["bytes"] == sum(len(data) for _, _, data in content.values())
    a, b = read_manifest(tmp_path / "a.json"), read_manifest(tmp_path / "b.json")
    assert hashes(a) == hashes(b) == expected(content) and set(hashes(b, XXH3)) == set(content)
    shutil.copy(tmp_path / "b.json", small / MANIFEST_NAME)  # the slicer's schema: its reader takes it
    assert run("verify", small).returncode == 0
    before = (tmp_path / "a.json").read_bytes()
    refused(run("fingerprint", tmp_path / "nothing", "-o", tmp_path / "a.json"), code=2)
    refused(run("fingerprint", small, "-o", tmp_path / "no/such/a.json"), "could not write", code=2)
    refused(run("fingerprint", small, "-o", tmp_path / "a.json", "--workers", "0"), "--workers 0", code=2)
    (file,) = small.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    refused(run("fingerprint", small, "-o", tmp_path / "a.json", "--overwrite"), file.name, code=2)
    assert (tmp_path / "a.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json", "hf", "m"]
