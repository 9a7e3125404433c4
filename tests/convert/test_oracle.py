"""Against what real Megatron wrote and real Megatron-Bridge converted: both ways, every layout, every bit."""

import json
from pathlib import Path

import pytest

import convtools
from convtools.stores.dcp import read_metadata
from convtools.stores.torch_legacy import rank_folder
from tests.oracle_cases import Layout, layouts, shard_name
from tests.tensors import Content, differences, of_torch, read_hf, read_rank, read_safetensors

ALL = layouts("nemotron", "llama", "qwen2", "qwen3_moe", "deepseek", "gpt_oss", "qwen3_next")
NEMOTRON = [x for x in ALL if x.case.startswith("nemotron")]
WITH_HF = [x for x in ALL if x.hf]


def options(layout: Layout, **more: object) -> dict[str, object]:
    return {
        "padded_vocab_size": layout.padded,
        "expert_layout": "grouped" if layout.grouped else "sequential",
        "mcore_version": layout.mcore,
        **layout.sizes,
        **more,
    }


def to_hf(src: Path, dst: Path, hf: Path | None, *, allow_inexact: bool = False) -> convtools.Report:
    return convtools.convert(src, dst, convtools.Options(to="hf", hf_config=hf, allow_inexact=allow_inexact))


def minus_one(layout: Layout, dump: Content, pp: int) -> Content:
    """A rank's tensors with `out_norm` by its definition, HF's minus 1.

    Megatron-Bridge added 1 in bf16 to make the HF folder of `qwen3_next`: that is rounded, and what
    it came from is lost. HF's numbers minus 1 are exact.
    """
    import torch
    from safetensors.torch import load_file

    names = [n for n in dump if n.endswith("self_attention.out_norm.weight")]
    if not names:
        return dump
    assert layout.hf
    hf = load_file(layout.hf / "model.safetensors")
    layers = json.loads((layout.hf / "config.json").read_text())["num_hidden_layers"]
    first, out = layers // layout.sizes["pp"] * pp, dict(dump)
    for name in names:
        layer = first + int(name.split(".")[2])
        exact = hf[f"model.layers.{layer}.linear_attn.norm.weight"].double() - 1
        assert torch.equal(exact.bfloat16().double(), exact)
        out[name] = of_torch(exact.bfloat16())
    return out


@pytest.mark.parametrize("layout", WITH_HF, ids=str)
@pytest.mark.parametrize("kind", ["torch_dist", "torch_legacy"])
def test_reading_gives_the_canonical_tensors(layout: Layout, kind: str, tmp_path: Path) -> None:
    if not (layout.root / kind).is_dir():
        pytest.skip(f"this layout was not saved as {kind}")
    assert layout.hf
    rounded = layout.case == "qwen3_next"  # 1 is added to norms in bf16, as Megatron-Bridge did
    report = to_hf(layout.root / kind, tmp_path / "hf", layout.hf, allow_inexact=rounded)
    assert any(s.inexact for s in report.shifts) == rounded
    want = read_hf(layout.hf)
    if json.loads((layout.hf / "config.json").read_text())["tie_word_embeddings"]:
        del want["lm_head.weight"]  # Megatron holds no second copy of a tied head
    assert differences(want, read_hf(tmp_path / "hf")) == []
    assert report.hf_tensors == len(want)
    assert (tmp_path / "hf/config.json").read_bytes() == (layout.hf / "config.json").read_bytes()


@pytest.mark.parametrize("layout", [x for x in WITH_HF if (x.root / "state_dict").is_dir()], ids=str)
def test_writing_a_layout_gives_each_rank_its_tensors(layout: Layout, tmp_path: Path) -> None:
    assert layout.hf
    convtools.convert(layout.hf, tmp_path / "out", convtools.Options(**options(layout, to="torch")))  # type: ignore[arg-type]
    dumps = sorted((layout.root / "state_dict").glob("*.safetensors"))
    assert dumps
    for dump in dumps:
        tp, pp, ep = (int(part[2:]) for part in dump.stem.split("_"))
        assert dump.name == shard_name(tp, pp, ep)
        folder = rank_folder(tp, pp, ep, pp_size=layout.sizes["pp"], ep_size=layout.sizes["ep"])
        value, tensors, extra = read_rank(tmp_path / "out/iter_0000001" / folder / "model_optim_rng.pt")
        assert differences(minus_one(layout, read_safetensors(dump), pp), tensors) == []
        assert type(value["args"]).__name__ == "Namespace" and value["iteration"] == 1
        assert value["args"].tensor_model_parallel_size == layout.sizes["tp"]
        saved = layout.root / "torch_legacy/iter_0000001" / folder / "model_optim_rng.pt"
        if saved.exists():
            _, _, real_extra = read_rank(saved)
            assert sorted(extra) == sorted(real_extra)


@pytest.mark.parametrize("layout", [x for x in WITH_HF if (x.root / "torch_dist").is_dir()], ids=str)
def test_writing_torch_dist_gives_megatrons_keys_and_chunks(layout: Layout, tmp_path: Path) -> None:
    assert layout.hf
    chosen = convtools.Options(**options(layout, to="torch_dist"))  # type: ignore[arg-type]
    convtools.convert(layout.hf, tmp_path / "out", chosen)
    real = read_metadata(layout.root / "torch_dist/iter_0000001")
    ours = read_metadata(tmp_path / "out/iter_0000001")
    assert {k: (t.dtype, t.shape) for k, t in ours.tensors.items()} == {
        k: (t.dtype, t.shape) for k, t in real.tensors.items()
    }
    for key, tensor in real.tensors.items():
        assert {c.region for c in ours.tensors[key].chunks} == {c.region for c in tensor.chunks}, key
    state = ("common_state", "rng_state")
    assert {o for o in ours.objects} == {o for o in real.objects if not o.startswith(state)}


@pytest.mark.parametrize("layout", [x for x in WITH_HF if x in NEMOTRON], ids=str)
def test_the_true_vocabulary_comes_out_of_megatrons_args(layout: Layout, tmp_path: Path) -> None:
    """Without an HF config, config.json is derived: 250 rows; the six random ones past them are reported."""
    assert layout.hf
    report = convtools.convert(layout.root / "torch_dist", tmp_path / "hf", convtools.Options(to="hf"))
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["vocab_size"] == 250
    assert sum(p.nonzero_rows for p in report.padding) == 12  # embedding and head
    ours, theirs = read_hf(tmp_path / "hf"), read_hf(layout.hf)
    for name in ("backbone.embeddings.weight", "lm_head.weight"):
        assert ours[name][1] == (250, 64)
        assert ours[name][2] == theirs[name][2][: len(ours[name][2])]
    rest = {n: v for n, v in theirs.items() if n not in ("backbone.embeddings.weight", "lm_head.weight")}
    assert differences(rest, {n: v for n, v in ours.items() if n in rest}) == []


@pytest.mark.parametrize("layout", [x for x in ALL if (x.root / "torch_legacy").is_dir()], ids=str)
def test_megatron_to_megatron(layout: Layout, tmp_path: Path) -> None:
    """torch_dist -> legacy at the same layout is the state dict, and legacy -> torch_dist -> legacy too."""
    hf = None if layout.case.startswith("nemotron") else layout.hf  # whose args do not say it all
    to_torch = convtools.Options(**options(layout, to="torch", hf_config=hf))  # type: ignore[arg-type]
    to_dist = convtools.Options(to="torch_dist", padded_vocab_size=layout.padded, hf_config=hf)
    convtools.convert(layout.root / "torch_dist", tmp_path / "a", to_torch)
    convtools.convert(layout.root / "torch_legacy", tmp_path / "b", to_dist)
    convtools.convert(tmp_path / "b", tmp_path / "c", convtools.Options(**options(layout, to="torch")))  # type: ignore[arg-type]
    for dump in sorted((layout.root / "state_dict").glob("*.safetensors")):
        tp, pp, ep = (int(part[2:]) for part in dump.stem.split("_"))
        folder = rank_folder(tp, pp, ep, pp_size=layout.sizes["pp"], ep_size=layout.sizes["ep"])
        want = {
            n: v
            for n, v in read_safetensors(dump).items()
            if not n.startswith(("embedding.", "output_layer."))
        }
        for root in ("a", "c"):
            _, tensors, _ = read_rank(tmp_path / root / "iter_0000001" / folder / "model_optim_rng.pt")
            got = {n: v for n, v in tensors.items() if n in want}
            assert differences(want, got) == []
