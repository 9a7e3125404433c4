"""Pipeline stages of every kind, both ways: uneven, virtual, embedding or loss alone, MTP alone; and ETP."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convtools
from convtools.errors import AccountingError, CheckpointError, UsageError
from convtools.stores.dcp import read_metadata
from tests.commands import refused, run
from tests.convert.small import filled, read_dist, write_small_hf
from tests.nemotron_checkpoints import TINY, write_hf
from tests.tensors import Content, differences, of_torch, read_hf

torch = pytest.importorskip("torch")

Chunk = dict[str, tuple[str, tuple[int, ...], bytes]]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 20,
    "vocab_size": 24, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 16,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 6,
    "kv_lora_rank": 4, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 3,
    "intermediate_size": 20, "moe_intermediate_size": 8, "n_routed_experts": 2, "n_shared_experts": 1,
    "num_experts_per_tok": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "vocab_size": 24,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
}  # fmt: skip


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Llama checkpoint, written out by hand."""
    h, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[n] * config["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "input_layernorm": (h,), "post_attention_layernorm": (h,), "self_attn.q_proj": (q, h),
        "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h), "self_attn.o_proj": (h, q),
        "mlp.gate_proj": (ffn, h), "mlp.up_proj": (ffn, h), "mlp.down_proj": (h, ffn),
    }  # fmt: skip
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, h), "model.norm.weight": (h,)}
    for i in range(config["num_hidden_layers"]):
        out |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return out if config["tie_word_embeddings"] else out | {"lm_head.weight": (vocab, h)}


def constant(value: int, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], bytes]:
    """A bf16 tensor of one small number."""
    half = np.frombuffer(np.float32(value).tobytes(), "<u2")[1]
    return "BF16", shape, np.full(prod(shape), half, "<u2").tobytes()


def llama(root: Path, **changes: Any) -> Path:
    """A Llama whose layer l holds nothing but the number l; the rest is 99."""
    config = LLAMA | changes
    content: Content = {
        name: constant(int(name.split(".")[2]) if "layers" in name else 99, shape)
        for name, shape in llama_shapes(config).items()
    }
    return write_small_hf(root, config, content)


def deepseek(root: Path) -> Path:
    """A DeepSeek-V3 of random numbers; its tensors are those that convtools' own plan would write."""
    from convtools.families import deepseek as family
    from convtools.families.table import Table

    spec = family.parse(DEEPSEEK)
    table = Table.of(family.rows(spec, family.Spelling(), 24))
    tensors = {n: ("F32" if n.endswith("correction_bias") else "BF16", s) for n, s in table.hf.items()}
    return write_small_hf(root, DEEPSEEK, filled(tensors))


def convert(src: Path, dst: Path, to: str, **options: Any) -> convtools.Report:
    return convtools.convert(src, dst, convtools.Options(to=to, make_vocab_size_divisible_by=1, **options))


def load(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = torch.load(path / "model_optim_rng.pt", weights_only=False)
    return value


def chunks(folder: Path) -> list[Chunk]:
    """The tensors of every chunk of one rank, as torch reads them."""
    value = load(folder)
    names = (
        ["model"] if "model" in value else [f"model{i}" for i in range(len(value)) if f"model{i}" in value]
    )
    assert {n for n in value if n.startswith("model")} == set(names)
    return [{n: of_torch(t) for n, t in value[c].items() if "_extra_state" not in n} for c in names]


def rank(root: Path, pp: int, tp: int = 0) -> Path:
    return root / f"iter_0000001/mp_rank_{tp:02d}_{pp:03d}"


SPLITS: dict[str, tuple[dict[str, Any], list[list[list[int]]], dict[str, Any]]] = {
    "even": ({"pp": 2}, [[[0, 1, 2, 3]], [[4, 5, 6, 7]]], {}),
    "vpp": (
        {"pp": 2, "vpp": 2}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]],
        {"virtual_pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    ),
    "layers a chunk": (
        {"pp": 2, "num_layers_per_virtual_pipeline_stage": 1},
        [[[0], [2], [4], [6]], [[1], [3], [5], [7]]],
        {"virtual_pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 1},
    ),
    "last": (
        {"pp": 2, "decoder_last_pipeline_num_layers": 3}, [[[0, 1, 2, 3, 4]], [[5, 6, 7]]],
        {"decoder_last_pipeline_num_layers": 3},
    ),
    "first and vpp": (
        {"pp": 2, "vpp": 2, "decoder_first_pipeline_num_layers": 2}, [[[0], [4]], [[1, 2, 3], [5, 6, 7]]],
        {"decoder_first_pipeline_num_layers": 2, "num_virtual_stages_per_pipeline_rank": 2,
         "virtual_pipeline_model_parallel_size": 2},
    ),
    "places": (
        {"pp": 2, "vpp": 5, "account_for_embedding_in_pipeline_split": True,
         "account_for_loss_in_pipeline_split": True},
        [[[], [1], [3], [5], [7]], [[0], [2], [4], [6], []]],
        {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True,
         "num_virtual_stages_per_pipeline_rank": 5, "virtual_pipeline_model_parallel_size": 5},
    ),
    "layout": (
        {"pp": 2, "pipeline_model_parallel_layout": "E|t*5|(t|)*2,t|L"},
        [[[], [5], [7]], [[0, 1, 2, 3, 4], [6], []]],
        {"pipeline_model_parallel_layout": "E|t*5|(t|)*2,t|L", "virtual_pipeline_model_parallel_size": 3},
    ),
    "layout alone": (
        {"pp": 4, "pipeline_model_parallel_layout": "E|t*5|t*3|L"},
        [[[]], [[0, 1, 2, 3, 4]], [[5, 6, 7]], [[]]],
        {"pipeline_model_parallel_layout": "E|t*5|t*3|L"},
    ),
    "layout as lists": (
        {"pp": 2, "pipeline_model_parallel_layout": [["embedding"], [*["decoder"] * 8, "loss"]]},
        [[[]], [[0, 1, 2, 3, 4, 5, 6, 7]]], {"pipeline_model_parallel_layout": "E|ttttttttL"},
    ),
}  # fmt: skip
UNSET = {
    "virtual_pipeline_model_parallel_size": None, "num_virtual_stages_per_pipeline_rank": None,
    "num_layers_per_virtual_pipeline_stage": None, "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None, "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False, "pipeline_model_parallel_layout": None,
}  # fmt: skip


@pytest.mark.parametrize("case", SPLITS)
@pytest.mark.parametrize("tied", [False, True])
def test_b32_each_chunk_numbers_its_own_layers(case: str, tied: bool, tmp_path: Path) -> None:
    options, held, args = SPLITS[case]
    src = llama(tmp_path / "hf", tie_word_embeddings=tied)
    written = convert(src, tmp_path / "m", "torch", **options)
    vpp = {"vpp": len(held[0])} if len(held[0]) > 1 else {}
    for pp, layers in enumerate(held):
        found = chunks(rank(tmp_path / "m", pp))
        assert len(found) == len(layers)
        for chunk, (tensors, globals_) in enumerate(zip(found, layers, strict=True)):
            numbers = {int(n.split(".")[2]) for n in tensors if n.startswith("decoder.layers.")}
            assert numbers == set(range(len(globals_)))
            for name, (_, shape, data) in tensors.items():
                value = globals_[int(name.split(".")[2])] if "layers" in name else 99
                assert data == constant(value, shape)[2], name
            ends = {n for n in tensors if "layers" not in n}
            want = {"embedding.word_embeddings.weight"} if (pp, chunk) == (0, 0) else set()
            if (pp, chunk) == (len(held) - 1, len(layers) - 1):
                want |= {"decoder.final_layernorm.weight", "output_layer.weight"}
            assert ends == want
        saved = vars(load(rank(tmp_path / "m", pp))["args"])
        assert {k: saved[k] for k in UNSET} == UNSET | args
        assert saved["pipeline_model_parallel_size"] == len(held)
    report = convert(tmp_path / "m", tmp_path / "back", "hf")
    assert differences(read_hf(src), read_hf(tmp_path / "back")) == []
    assert written.layout == {"tp": 1, "pp": len(held), "ep": 1, "etp": 1} | vpp
    looked = convtools.inspect(tmp_path / "m")
    assert looked.layout == written.layout and looked.layers == 8
    assert len({t.name for t in looked.tensors}) == len(looked.tensors)
    assert report.hf_tensors == len(llama_shapes(LLAMA | {"tie_word_embeddings": tied}))
    layout = convtools.open_source(tmp_path / "m").layout
    assert layout is not None and layout.pp == len(held)
    assert [[list(c) for c in layout.layers(r)] for r in range(layout.pp)] == held


def test_any_split_goes_to_any_other(tmp_path: Path) -> None:
    """Legacy to legacy at another split, to torch_dist and back; what args said of the old one is gone."""
    src = llama(tmp_path / "0")
    last = src
    for i, (options, _, args) in enumerate(SPLITS.values()):
        to = ("torch", "torch_dist")[i % 2]
        convert(last, tmp_path / f"{i + 1}", to, tp=1 + i % 2, **options)
        last = tmp_path / f"{i + 1}"
        saved = convtools.open_source(last).args
        assert {k: saved[k] for k in UNSET} == UNSET | args
    change_args(last, 2, num_layers_in_first_pipeline_stage=3)
    convert(last, tmp_path / "whole", "torch_dist")
    saved = convtools.open_source(tmp_path / "whole").args
    assert "num_layers_in_first_pipeline_stage" not in saved
    assert {k: saved[k] for k in UNSET} == UNSET and saved["pipeline_model_parallel_size"] == 1
    convert(tmp_path / "whole", tmp_path / "back", "hf")
    assert differences(read_hf(src), read_hf(tmp_path / "back")) == []


@pytest.mark.parametrize("case", SPLITS)
def test_a_chunk_lies_in_the_file_of_the_rank_that_holds_it(case: str, tmp_path: Path) -> None:
    options, held, _ = SPLITS[case]
    convert(llama(tmp_path / "hf"), tmp_path / "m", "torch_dist", tp=2, **options)
    whole, _ = read_dist(tmp_path / "m/iter_0000001")
    metadata = read_metadata(tmp_path / "m/iter_0000001")
    stage = {layer: pp for pp, chunks in enumerate(held) for chunk in chunks for layer in chunk}
    seen = set()
    for key, tensor in metadata.tensors.items():
        for chunk in tensor.chunks:
            file_rank = int(chunk.relative_path.split("_")[2])
            if key.startswith("decoder.layers."):  # Llama's layers are alike: stacked, a layer an entry
                layer = chunk.region.offsets[0]
                assert chunk.region.sizes[0] == 1 and file_rank // 2 == stage[layer], key
                seen.add(layer)
            else:
                assert file_rank // 2 == (0 if key.startswith("embedding.") else len(held) - 1), key
    assert seen == set(range(8))
    for key, (_, shape, data) in whole.items():
        if key.startswith("decoder.layers."):
            assert data == b"".join(constant(layer, shape[1:])[2] for layer in range(8)), key
    assert convtools.inspect(tmp_path / "m").layers == 8


NORM, HEAD, WORDS = (
    "decoder.final_layernorm.weight",
    "output_layer.weight",
    "embedding.word_embeddings.weight",
)


@pytest.mark.parametrize(
    ("layout", "pp", "mcore", "held"),
    [
        ("Et|tt|m|L", 4, "0.16", [[{WORDS}], [{NORM}], [{WORDS, "mtp"}], [{HEAD}]]),
        ("Et|tt|m|L", 2, "0.19", [[{WORDS}, {WORDS, "mtp"}], [{NORM}, {HEAD}]]),
        ("Et|t|t|mL", 2, "0.19", [[{WORDS}, {NORM}], [set(), {WORDS, HEAD, "mtp"}]]),
        ("Ettt|mL", 2, "0.19", [[{WORDS, NORM}], [{WORDS, HEAD, "mtp"}]]),
        ("Ettt|mL", 2, "0.15", [[{WORDS}], [{WORDS, NORM, HEAD, "mtp"}]]),
        ("EtttmL", 1, "0.16", [[{WORDS, NORM, HEAD, "mtp"}]]),
    ],
)
def test_where_mtp_the_final_norm_and_copies_lie(
    layout: str, pp: int, mcore: str, held: list[list[set[str]]], tmp_path: Path
) -> None:
    src = deepseek(tmp_path / "hf")
    convert(src, tmp_path / "m", "torch", pp=pp, pipeline_model_parallel_layout=layout, mcore_version=mcore)
    words = []
    for r, want in enumerate(held):
        folder = rank(tmp_path / "m", r) if pp > 1 else tmp_path / "m/iter_0000001/mp_rank_00"
        found = chunks(folder)
        heads = [
            {"mtp" if n.startswith("mtp.") else n for n in c if "decoder.layers" not in n} for c in found
        ]
        assert heads == want
        words += [c[WORDS] for c in found if WORDS in c]
    assert len({data for *_, data in words}) == 1
    convert(tmp_path / "m", tmp_path / "back", "hf")
    assert differences(read_hf(src), read_hf(tmp_path / "back")) == []
    convert(src, tmp_path / "dist", "torch_dist", pp=pp, pipeline_model_parallel_layout=layout)
    convert(tmp_path / "dist", tmp_path / "again", "hf")
    assert differences(read_hf(src), read_hf(tmp_path / "again")) == []


def test_copies_of_the_embedding_are_compared(tmp_path: Path) -> None:
    convert(
        deepseek(tmp_path / "hf"), tmp_path / "m", "torch", pp=4, pipeline_model_parallel_layout="Et|tt|m|L"
    )
    value = load(rank(tmp_path / "m", 2))
    value["model"][WORDS][3, 1] += 1
    torch.save(value, rank(tmp_path / "m", 2) / "model_optim_rng.pt")
    with pytest.raises(AccountingError, match="two copies of one tensor differ"):
        convert(tmp_path / "m", tmp_path / "back", "hf")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pp": 4, "pipeline_model_parallel_layout": "Et|tt|m|L", "mcore_version": "0.15"}, "MTP apart from"),
        (
            {"pp": 2, "pipeline_model_parallel_layout": "Ett|tmL", "mcore_version": "0.12"},
            "does not know --pipe",
        ),
        ({"pp": 2, "pipeline_model_parallel_layout": "Ett|tL"}, "has 0 of MTP layer (m), the model 1"),
        ({"pp": 2, "hybrid_layer_pattern": "M|M"}, "is for hybrid models"),
        ({"pp": 2}, "pp=2 does not divide the number of layers=3"),
        ({"pp": 3, "vpp": 2}, "vpp=2 does not divide the 1 layers"),
        ({"pipeline_model_parallel_layout": "Ett|tmL"}, "2 stages of one pipeline rank"),
        ({"pp": 2, "decoder_first_pipeline_num_layers": 0}, "is not a positive number"),
    ],
)
def test_what_cannot_be_loaded_is_not_written(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        convert(deepseek(tmp_path / "hf"), tmp_path / "m", "torch", **options)
    assert said in str(caught.value) and not (tmp_path / "m").exists()


def test_the_command_line_says_it_too(tmp_path: Path) -> None:
    src = llama(tmp_path / "hf")
    megatron = ("--to", "torch", "--make-vocab-size-divisible-by", "1", "--pp", "2")
    for i, name in enumerate(["--vpp", "--num-virtual-stages-per-pipeline-rank"]):
        done = run(
            "convert", src, tmp_path / f"{i}", *megatron, name, "2", "--decoder-last-pipeline-num-layers", "2"
        )
        assert done.returncode == 0, done.stderr
        assert [len(c) for c in chunks(rank(tmp_path / f"{i}", 1))] == [6, 8]
    done = run("convert", src, tmp_path / "l", *megatron, "--pipeline-model-parallel-layout", "E|t*8,L")
    assert done.returncode == 0, done.stderr
    assert chunks(rank(tmp_path / "l", 0)) == [{WORDS: constant(99, (24, 16))}]
    refused(
        run("convert", src, tmp_path / "x", *megatron[:-1], "3"),
        "pp=3 does not divide",
        "--decoder-last-pipeline-num-layers",
        code=2,
    )
    refused(
        run("convert", src, tmp_path / "x", "--to", "hf", "--vpp", "2"), "no parallel layout", "--vpp", code=2
    )
    refused(
        run("convert", src, tmp_path / "x", *megatron, "--vpp", "8"), "vpp=8 does not divide the 4", code=2
    )
    assert not (tmp_path / "x").exists()


def change_args(root: Path, ranks: int, **changes: Any) -> None:
    for pp in range(ranks):
        value = load(rank(root, pp))
        vars(value["args"]).update(changes)
        torch.save(value, rank(root, pp) / "model_optim_rng.pt")


@pytest.mark.parametrize(
    ("written", "said", "words"),
    [({"pp": 2}, 2, "`model` in each file"), ({"pp": 2, "vpp": 2}, 4, "`model0` to `model1`")],
)
def test_b33_args_and_files_must_agree_on_virtual_stages(
    written: dict[str, Any], said: int, words: str, tmp_path: Path
) -> None:
    convert(llama(tmp_path / "hf"), tmp_path / "m", "torch", **written)
    change_args(tmp_path / "m", 2, virtual_pipeline_model_parallel_size=said)
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "m", tmp_path / "back", "hf")
    assert words in str(caught.value) and f"virtual_pipeline_model_parallel_size={said}" in str(caught.value)


def test_two_spellings_of_one_chunk_are_refused(tmp_path: Path) -> None:
    convert(llama(tmp_path / "hf"), tmp_path / "m", "torch", pp=2, vpp=2)
    value = load(rank(tmp_path / "m", 0))
    value["model00"] = value["model0"]
    torch.save(value, rank(tmp_path / "m", 0) / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match="`model00` is outside of the model"):
        convert(tmp_path / "m", tmp_path / "back", "hf")


def test_a_chunk_that_is_gone_is_refused(tmp_path: Path) -> None:
    convert(llama(tmp_path / "hf"), tmp_path / "m", "torch", pp=2, vpp=2)
    change_args(tmp_path / "m", 2, virtual_pipeline_model_parallel_size=None)
    for pp in range(2):
        value = load(rank(tmp_path / "m", pp))
        del value["model1"]
        torch.save(value, rank(tmp_path / "m", pp) / "model_optim_rng.pt")
    with pytest.raises(AccountingError, match="do not add up") as caught:
        convert(tmp_path / "m", tmp_path / "back", "hf")
    assert "expected: 8 layers" in str(caught.value) and "found: 4 (2, 2 a stage)" in str(caught.value)


# Hybrid models: stages are the bars of the pattern.

HYBRID = TINY | {"hybrid_override_pattern": "ME*-M*", "num_hidden_layers": 6}
BARS: dict[str, tuple[dict[str, Any], list[list[str]]]] = {
    "bars": ({"hybrid_layer_pattern": "M|E*-M*"}, [["M"], ["E*-M*"]]),
    "virtual": ({"hybrid_layer_pattern": "M|E*|-|M*"}, [["M", "-"], ["E*", "M*"]]),
    "empty": ({"hybrid_layer_pattern": "|ME*-M*"}, [[""], ["ME*-M*"]]),
    "first": ({"decoder_first_pipeline_num_layers": 4}, [["ME*-"], ["M*"]]),
    "none": ({}, [["ME*"], ["-M*"]]),
}
MARK = {"M": "mixer.in_proj.weight", "E": "mlp.router.weight", "*": "self_attention.linear_qkv.weight",
        "-": "mlp.linear_fc2.weight"}  # fmt: skip


@pytest.mark.parametrize("case", BARS)
def test_hybrid_models_are_cut_at_the_bars_of_their_pattern(case: str, tmp_path: Path) -> None:
    import shutil

    options, held = BARS[case]
    src = write_hf(tmp_path / "hf", HYBRID)
    convert(src, tmp_path / "m", "torch", pp=2, **options)
    for pp, parts in enumerate(held):
        for chunk, letters in zip(chunks(rank(tmp_path / "m", pp)), parts, strict=True):
            assert all(f"decoder.layers.{i}.{MARK[x]}" in chunk for i, x in enumerate(letters))
            numbers = {n.split(".")[2] for n in chunk if n.startswith("decoder.layers.")}
            assert numbers == {str(i) for i in range(len(letters))}
        args = vars(load(rank(tmp_path / "m", pp))["args"])
        assert args["hybrid_layer_pattern"] == options.get("hybrid_layer_pattern", "ME*-M*")
        assert args["num_virtual_stages_per_pipeline_rank"] is None
        assert args["virtual_pipeline_model_parallel_size"] == (2 if len(parts) == 2 else None)
    shutil.rmtree(tmp_path / "m/iter_0000001/hf")  # config.json comes out of args, bars and all
    convert(tmp_path / "m", tmp_path / "back", "hf")
    assert json.loads((tmp_path / "back/config.json").read_text())["hybrid_override_pattern"] == "ME*-M*"
    assert differences(read_hf(src), read_hf(tmp_path / "back")) == []
    convert(tmp_path / "m", tmp_path / "dist", "torch_dist", pp=2, **options)
    shutil.rmtree(tmp_path / "dist/iter_0000001/hf")
    convert(tmp_path / "dist", tmp_path / "again", "hf")
    assert differences(read_hf(src), read_hf(tmp_path / "again")) == []
    assert (
        convtools.open_source(tmp_path / "dist").args["hybrid_layer_pattern"] == args["hybrid_layer_pattern"]
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"vpp": 3}, "--vpp means nothing to a hybrid model"),
        ({"hybrid_layer_pattern": "M|*E-M*"}, "is not the model's pattern"),
        ({"hybrid_layer_pattern": "M|E*-M*", "mcore_version": "0.16"}, "does not know | in"),
        (
            {"decoder_first_pipeline_num_layers": 4, "mcore_version": "0.15"},
            "a hybrid model with uneven stages",
        ),
    ],
)
def test_what_hybrid_models_refuse(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        convert(write_hf(tmp_path / "hf", HYBRID), tmp_path / "m", "torch", pp=2, **options)
    assert said in str(caught.value)


# Real models of megatron-core.

SCRIPT = Path(__file__).parent.parent / "oracle/mcore_stages.py"
LAYOUT = "pipeline_model_parallel_layout"
REAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vpp": ({"pp": 2, "vpp": 2, "config": {"num_layers": 8}}, {"pp": 2, "vpp": 2}),
    "tied": ({"pp": 2, "vpp": 4, "tied": True, "config": {"num_layers": 8}}, {"pp": 2, "vpp": 4}),
    "first and last": (
        {"pp": 3, "config": {"num_layers": 8, "num_layers_in_first_pipeline_stage": 1,
                             "num_layers_in_last_pipeline_stage": 3}},
        {"pp": 3, "decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3},
    ),
    "last and vpp": (
        {"pp": 2, "vpp": 2, "config": {"num_layers": 8, "num_layers_in_last_pipeline_stage": 2}},
        {"pp": 2, "vpp": 2, "decoder_last_pipeline_num_layers": 2},
    ),
    "places": (
        {"pp": 2, "vpp": 5, "config": {"num_layers": 8, "account_for_embedding_in_pipeline_split": True,
                                       "account_for_loss_in_pipeline_split": True}},
        SPLITS["places"][0],
    ),
    "layout": (
        {"pp": 2, "vpp": 3, "config": {"num_layers": 8, LAYOUT: SPLITS["layout"][0][LAYOUT]}},
        SPLITS["layout"][0],
    ),
    "layout alone": (
        {"pp": 4, "config": {"num_layers": 8, "pipeline_model_parallel_layout": "E|t*5|t*3|L"}},
        SPLITS["layout alone"][0],
    ),
}  # fmt: skip
"""What megatron-core is told, and what convtools is told, for the same stages."""
WITH_MTP = [("Et|tt|m|L", 4, None), ("Et|tt|m|L", 2, 2), ("Et|t|t|mL", 2, 2), ("Ettt|mL", 2, None)]
LOCAL = {
    ".self_attention.linear_qkv.layer_norm_weight": ".input_layernorm.weight",
    ".mlp.linear_fc1.layer_norm_weight": ".pre_mlp_layernorm.weight",
}
"""Names of Transformer Engine's fused norms, and of the same tensors in a model without it."""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Every model of REAL saved by rank, and what all chunks hold (those WITH_MTP last)."""
    pytest.importorskip("megatron.core")
    root = tmp_path_factory.mktemp("real")
    jobs = [
        job | {"folder": str(root / name), "args": {
            "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": job["pp"],
            "virtual_pipeline_model_parallel_size": job.get("vpp"), "num_layers": 8,
        }}
        for name, (job, _) in REAL.items()
    ]  # fmt: skip
    jobs += [
        {"pp": pp, "vpp": vpp,
         "config": {"num_layers": 3, "mtp_num_layers": 1, "pipeline_model_parallel_layout": layout}}
        for layout, pp, vpp in WITH_MTP
    ]  # fmt: skip
    (root / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(root / "jobs.json"), str(root / "out.json")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return root, json.loads((root / "out.json").read_text())


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize("case", REAL)
def test_real_stages_are_read_and_written(case: str, real: tuple[Path, list[Any]], tmp_path: Path) -> None:
    root, results = real
    job, options = REAL[case]
    src = llama(tmp_path / "hf", tie_word_embeddings=job.get("tied", False))
    convert(root / case, tmp_path / "back", "hf", hf_config=src)
    assert differences(read_hf(src), read_hf(tmp_path / "back")) == []
    layout = convtools.open_source(root / case, hf_config=src).layout
    result = results[list(REAL).index(case)]
    assert layout is not None
    assert [[c["layers"] for c in r] for r in result] == [
        [list(c) for c in layout.layers(pp)] for pp in range(layout.pp)
    ]
    convert(src, tmp_path / "m", "torch", mcore_version="0.16", **options)
    for pp in range(layout.pp):
        theirs, ours = chunks(rank(root / case, pp)), chunks(rank(tmp_path / "m", pp))
        for real_chunk, chunk in zip(theirs, ours, strict=True):
            renamed = {}
            for name, value in chunk.items():
                fused = next((te for te in LOCAL if name.endswith(te)), None)
                renamed[name.removesuffix(fused) + LOCAL[fused] if fused else name] = value
            assert differences(real_chunk, renamed) == []


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "pp", "vpp"), WITH_MTP)
def test_real_models_with_mtp_hold_the_same(
    layout: str, pp: int, vpp: int | None, real: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """Which chunk holds the embedding and its copy, MTP, the final norm and the head."""
    src = deepseek(tmp_path / "hf")
    convert(src, tmp_path / "m", "torch", pp=pp, pipeline_model_parallel_layout=layout, mcore_version="0.16")
    result = real[1][len(REAL) + WITH_MTP.index((layout, pp, vpp))]

    def ends(names: Any) -> set[str]:
        entry = ("mtp.layers.0.eh_proj.weight", "mtp.layers.0.final_layernorm.weight")
        return {n for n in names if n in (WORDS, NORM, HEAD, *entry)}

    for r, theirs in enumerate(result):
        ours = chunks(rank(tmp_path / "m", r))
        assert [ends(c) for c in ours] == [ends(c["names"]) for c in theirs]
        counts = [len({n.split(".")[2] for n in c if n.startswith("decoder.layers.")}) for c in ours]
        assert counts == [len(c["layers"]) for c in theirs]


@pytest.mark.oracle
@pytest.mark.slow
def test_args_that_hold_a_layout_object_are_read(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    src = llama(tmp_path / "hf")
    convert(src, tmp_path / "m", "torch", pp=2, pipeline_model_parallel_layout="Et*8|L")
    change_args(tmp_path / "m", 2, pipeline_model_parallel_layout=PipelineParallelLayerLayout("Et*8|L", 2))
    assert isinstance(load(rank(tmp_path / "m", 0))["args"], Namespace)
    convert(tmp_path / "m", tmp_path / "back", "torch_dist", pp=2)
    saved = convtools.open_source(tmp_path / "back").args
    assert {k: saved[k] for k in UNSET} == UNSET
    convert(tmp_path / "back", tmp_path / "hf2", "hf")
    assert differences(read_hf(src), read_hf(tmp_path / "hf2")) == []
