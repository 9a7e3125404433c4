"""Failures that users of other converters reported in public, each as a test of its whole kind.

A round trip is blind to most of them, so the tests here say directly which element must sit where:
every element of every tensor is a number of its own. Sizes differ, layers and experts are twelve.

B01 group after group .............. test_b01_qkv_is_interleaved_per_group; nemotron: families/test_rank_rows
B04 bias of q, k, v ................ test_b04_qkv_biases_follow_the_rows
B06 rows permuted for RoPE ......... test_b06_rope_permutes_no_rows
B09 padded vocabulary .............. test_b09_padding_rows_stay_behind
B11 tied tensors ................... test_b11_the_tie_flag_decides
B14 experts dropped ................ test_b14_every_expert_arrives
B20 1 is no prefix of 10 ........... test_b20_layer_1_is_not_layer_11
B26 fused norm's name .............. test_b26_extra_states_are_left_out_by_name; convert/test_forms
B30 boundary shards dropped ........ test_b30_no_shard_is_dropped; stores/test_hf_write
B39 arrays that are not contiguous . test_b39_a_transposed_view_is_never_read_as_rows
B43 empty tensors .................. test_b43_an_empty_tensor_stands_for_none; stores/test_hf, test_hf_write
B47 to B56 quantised weights ....... test_quantised_weights_are_refused_by_name; stores/test_encodings

Elsewhere, in tests that bear the number: B02 (families/test_qwen_next), B07 (codecs/test_zero_centred), B10
(test_multimodal), B13 (families/test_wrapping), B15 B19 B21 (families/test_fused_experts), B16 B25 (families/
test_rank_rows), B18 (families/test_gpt_oss), B23 B27 B29 (families/test_glm), B32 B33 (test_stages), B31 B36
B37 B40 B41 B44 B45 (stores/). Not ours: B52, the scales that an engine wants, since nothing quantised is
ever written.
"""

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convtools
from convtools.errors import AccountingError, ConfigError, ConvtoolsError, UnsupportedEncoding
from tests.convert.small import WIDTH, read_dist, write_dist, write_safetensors, write_small_hf
from tests.families.tiny_configs import described, inventory
from tests.nemotron_checkpoints import TINY as NEMOTRON, inventory as nemotron_inventory
from tests.tensors import Content, differences, read_hf, read_rank, read_safetensors

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

F1: dict[str, Any] = {
    "num_hidden_layers": 12, "hidden_size": 10, "vocab_size": 23, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 14,
}  # fmt: skip
D = 6


def numbered(shapes: dict[str, tuple[int, ...]]) -> Arrays:
    """Every element of every tensor a number of its own; fp32 holds them exactly."""
    out, at = {}, 1
    for name, shape in shapes.items():
        out[name] = np.arange(at, at + prod(shape), dtype="<f4").reshape(shape)
        at += prod(shape)
    assert at < 2**24
    return out


def content_of(arrays: Arrays) -> Content:
    return {name: ("F32", a.shape, a.tobytes()) for name, a in arrays.items()}


def arrays_of(content: Content) -> Arrays:
    return {name: np.frombuffer(data, "<f4").reshape(shape) for name, (_, shape, data) in content.items()}


def gpt(root: Path, architecture: str, shuffled: bool = False, **changes: Any) -> tuple[Path, Arrays]:
    """(an HF checkpoint of F1 as this architecture, its tensors)."""
    model = described(architecture, F1 | changes, {"head": bool(changes.get("head"))})
    arrays = numbered({name: shape for name, (_, shape) in inventory(model).items()})
    arrays |= {copy.name: arrays[copy.of] for copy in model.copies()}
    if shuffled:
        names = list(arrays)
        np.random.default_rng(0).shuffle(names)
        arrays = {name: arrays[name] for name in names}
    return write_small_hf(root / "hf", dict(model.config), content_of(arrays)), arrays


def nemotron(config: dict[str, Any]) -> Arrays:
    return numbered({name: shape for name, (_, shape) in nemotron_inventory(config).items()})


def convert(src: Path, dst: Path, to: str, **more: Any) -> convtools.Report:
    return convtools.convert(src, dst, convtools.Options(to=to, fsync=False, workers=1, **more))


def rank(root: Path, tp: int, folder: str = "") -> Arrays:
    name = folder or f"mp_rank_{tp:02d}"
    return arrays_of(read_rank(root / f"iter_0000001/{name}/model_optim_rng.pt")[1])


def dist(root: Path) -> Arrays:
    return arrays_of(read_dist(root / "iter_0000001")[0])


def per_group(hf: Arrays, layer: int, kind: str, groups: Iterable[int], r: int) -> Array:
    """The rows of linear_qkv for these groups: r query heads, a key, a value; then the next group."""
    q, k, v = (hf[f"model.layers.{layer}.self_attn.{x}_proj.{kind}"] for x in "qkv")
    rows = []
    for g in groups:
        rows += [q[D * (g * r + i) : D * (g * r + i + 1)] for i in range(r)]
        rows += [k[D * g : D * (g + 1)], v[D * g : D * (g + 1)]]
    return np.concatenate(rows)


@pytest.mark.parametrize("groups", [2, 4, 1])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_b01_qkv_is_interleaved_per_group(architecture: str, groups: int, tmp_path: Path) -> None:
    src, hf = gpt(tmp_path, architecture, num_key_value_heads=groups)
    r = 4 // groups
    convert(src, tmp_path / "dist", "torch_dist", tp=2)
    stacked = dist(tmp_path / "dist")["decoder.layers.self_attention.linear_qkv.weight"]
    for layer in range(12):
        whole = per_group(hf, layer, "weight", range(groups), r)
        np.testing.assert_array_equal(stacked[layer], whole)
    convert(src, tmp_path / "torch", "torch", tp=2)
    for tp in range(2 if groups > 1 else 0):
        mine = range(tp * groups // 2, (tp + 1) * groups // 2)
        held = rank(tmp_path / "torch", tp)["decoder.layers.11.self_attention.linear_qkv.weight"]
        np.testing.assert_array_equal(held, per_group(hf, 11, "weight", mine, r))


def test_b01_heads_that_do_not_share_out_are_refused(tmp_path: Path) -> None:
    src, _ = gpt(tmp_path, "LlamaForCausalLM")
    config = json.loads((src / "config.json").read_text()) | {"num_key_value_heads": 3}
    (src / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"num_attention_heads=4 .* num_key_value_heads=3"):
        convert(src, tmp_path / "out", "torch_dist")


def test_b04_qkv_biases_follow_the_rows(tmp_path: Path) -> None:
    """Qwen2 has them on q, k and v, and none on o: one that is there all the same is an error."""
    src, hf = gpt(tmp_path, "Qwen2ForCausalLM")
    convert(src, tmp_path / "torch", "torch", tp=2)
    for tp in range(2):
        held = rank(tmp_path / "torch", tp)
        for layer in range(12):
            bias = held[f"decoder.layers.{layer}.self_attention.linear_qkv.bias"]
            np.testing.assert_array_equal(bias, per_group(hf, layer, "bias", [tp], 2))
    left_over = {"model.layers.3.self_attn.o_proj.bias": np.zeros(10, "<f4")}
    write_safetensors(src / "model.safetensors", content_of(hf | left_over))
    with pytest.raises(
        AccountingError, match=r"not in this model: `model\.layers\.3\.self_attn\.o_proj\.bias`"
    ):
        convert(src, tmp_path / "out", "torch")


def test_b06_rope_permutes_no_rows(tmp_path: Path) -> None:
    """Half-split RoPE, as in HF: rows of q, k and their norms come in the order they had."""
    src, hf = gpt(tmp_path, "Qwen3ForCausalLM")
    convert(src, tmp_path / "torch", "torch")
    held, at = rank(tmp_path / "torch", 0), "decoder.layers.11.self_attention."
    fused = held[f"{at}linear_qkv.weight"].reshape(2, 4, D, -1)  # group, (q q k v), row
    q = hf["model.layers.11.self_attn.q_proj.weight"].reshape(2, 2, D, -1)
    np.testing.assert_array_equal(fused[:, :2], q)
    for x in "qk":
        norm = hf[f"model.layers.11.self_attn.{x}_norm.weight"]
        np.testing.assert_array_equal(held[f"{at}{x}_layernorm.weight"], norm)
    assert held[f"{at}q_layernorm.weight"].shape == (D,)


def test_b06_a_megatron_checkpoint_of_interleaved_rope_is_refused(tmp_path: Path) -> None:
    """Its rows are in another order, which no tensor shows: only the flag in args does."""
    import torch

    src, _ = gpt(tmp_path, "LlamaForCausalLM")
    convert(src, tmp_path / "torch", "torch")
    path = tmp_path / "torch/iter_0000001/mp_rank_00/model_optim_rng.pt"
    value = torch.load(path, weights_only=False)
    value["args"].rotary_interleaved = True
    torch.save(value, path)
    with pytest.raises(ConvtoolsError, match="rotary_interleaved"):
        convert(tmp_path / "torch", tmp_path / "out", "hf")


@pytest.mark.parametrize("tied", [False, True])
def test_b09_padding_rows_stay_behind(tied: bool, tmp_path: Path) -> None:
    """23 rows at divisor 8 and tp 2: 32. What stands in the 9 rows is counted, and never exported."""
    src, hf = gpt(tmp_path, "LlamaForCausalLM", tie_word_embeddings=tied)
    convert(src, tmp_path / "dist", "torch_dist", tp=2, make_vocab_size_divisible_by=8)
    folder = tmp_path / "dist/iter_0000001"
    keys, objects = read_dist(folder)
    wide = [name for name, (_, shape, _) in keys.items() if shape[0] == 32]
    assert wide == ["embedding.word_embeddings.weight", *([] if tied else ["output_layer.weight"])]
    for name in wide:
        rows = np.frombuffer(keys[name][2], "<f4").reshape(32, 10).copy()
        np.testing.assert_array_equal(rows[23:], 0)
        rows[23:] = 777
        keys[name] = ("F32", (32, 10), rows.tobytes())
    write_dist(folder, keys, objects)
    report = convert(tmp_path / "dist", tmp_path / "out", "hf")
    assert [p.nonzero_rows for p in report.padding] == [9] * len(wide)
    assert differences(content_of(hf), read_hf(tmp_path / "out")) == []
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 23

    config = json.loads((src / "config.json").read_text()) | {"vocab_size": 33}
    (folder / "hf/config.json").write_text(json.dumps(config))
    with pytest.raises(AccountingError, match=r"fewer rows than the config's vocab_size"):
        convert(tmp_path / "dist", tmp_path / "more", "hf")


def test_b11_the_tie_flag_decides(tmp_path: Path) -> None:
    """Tied: one parameter, a copy is compared and noted. Untied: two, though their bytes be equal."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    src, hf = gpt(tmp_path / "tied", "LlamaForCausalLM", tie_word_embeddings=True, head=True)
    report = convert(src, tmp_path / "tied/dist", "torch_dist")
    assert report.duplicates == 1
    assert "output_layer.weight" not in dist(tmp_path / "tied/dist")
    write_safetensors(src / "model.safetensors", content_of(hf | {head: hf[head] + 1}))
    with pytest.raises(AccountingError, match=head):
        convert(src, tmp_path / "tied/other", "torch_dist")

    src, hf = gpt(tmp_path / "untied", "LlamaForCausalLM", tie_word_embeddings=False)
    hf[head] = hf[embedding]
    write_safetensors(src / "model.safetensors", content_of(hf))
    convert(src, tmp_path / "untied/dist", "torch_dist", make_vocab_size_divisible_by=1)
    keys = dist(tmp_path / "untied/dist")
    np.testing.assert_array_equal(keys["output_layer.weight"], hf[embedding])
    np.testing.assert_array_equal(keys["embedding.word_embeddings.weight"], hf[embedding])
    convert(tmp_path / "untied/dist", tmp_path / "untied/back", "hf")
    assert differences(content_of(hf), read_hf(tmp_path / "untied/back")) == []


def test_b14_every_expert_arrives(tmp_path: Path) -> None:
    """Mixtral: experts' gate (w1) over up (w3), and down (w2), each at its own place in the stack."""
    src, hf = gpt(tmp_path, "MixtralForCausalLM", shuffled=True, num_local_experts=12)
    convert(src, tmp_path / "dist", "torch_dist", ep=3, tp=2, etp=1)
    keys = dist(tmp_path / "dist")
    fc1, fc2 = (keys[f"decoder.layers.mlp.experts.experts.linear_fc{i}.weight"] for i in (1, 2))
    for layer in range(12):
        for e in range(12):
            w1, w2, w3 = (
                hf[f"model.layers.{layer}.block_sparse_moe.experts.{e}.w{i}.weight"] for i in (1, 2, 3)
            )
            np.testing.assert_array_equal(fc1[layer, e], np.concatenate([w1, w3]))
            np.testing.assert_array_equal(fc2[layer, e], w2)


def test_b14_experts_stacked_or_one_by_one_are_the_same_model(tmp_path: Path) -> None:
    config = NEMOTRON | {"n_routed_experts": 12}
    one = nemotron(config)
    stacks: dict[str, list[Array]] = {}
    for name, array in one.items():
        stem, found, rest = name.partition(".experts.")
        stacks.setdefault(f"{stem}.experts.{rest.split('.')[1]}" if found else name, []).append(array)
    stacked = {n: np.stack(parts) if ".experts." in n else parts[0] for n, parts in stacks.items()}
    assert stacked["backbone.layers.1.mixer.experts.up_proj"].shape == (12, 12, 8)
    for name, arrays in (("one", one), ("stacked", stacked)):
        src = write_small_hf(tmp_path / name, config, content_of(arrays))
        convert(src, tmp_path / f"{name}.dist", "torch_dist")
    keys = dist(tmp_path / "one.dist")
    assert differences(content_of(keys), content_of(dist(tmp_path / "stacked.dist"))) == []
    fc1 = keys["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"]
    np.testing.assert_array_equal(fc1, stacked["backbone.layers.1.mixer.experts.up_proj"])


@pytest.mark.parametrize("lost", ["model.layers.1.", "model.layers.11.", ".experts.1.", ".experts.11."])
def test_b20_layer_1_is_not_layer_11(lost: str, tmp_path: Path) -> None:
    """What is missing of one is never made up for by the other: every name lost is told, and no other."""
    src, hf = gpt(tmp_path, "MixtralForCausalLM", num_local_experts=12, num_hidden_layers=12)
    kept = {
        name: a
        for name, a in hf.items()
        if not (lost in name and name.endswith(("w2.weight", "norm.weight")))
    }
    gone = sorted(hf.keys() - kept.keys())
    assert len(gone) in (12, 14)
    write_safetensors(src / "model.safetensors", content_of(kept))
    with pytest.raises(AccountingError) as caught:
        convert(src, tmp_path / "out", "torch_dist")
    told = [line.split("`")[1] for line in str(caught.value).splitlines() if "missing: `" in line]
    assert sorted(told) == gone


def test_b26_extra_states_are_left_out_by_name(tmp_path: Path) -> None:
    """The fused norm has its own name in Megatron's files; extra states beside it are told, none read."""
    src = write_small_hf(
        tmp_path / "hf",
        NEMOTRON,
        content_of(numbered({n: s for n, (_, s) in nemotron_inventory(NEMOTRON).items()})),
    )
    for to, label in (("torch_dist", ""), ("torch", "mp_rank_00/")):
        convert(src, tmp_path / to, to)
        report = convert(tmp_path / to, tmp_path / f"{to}.hf", "hf")
        assert differences(read_hf(src), read_hf(tmp_path / f"{to}.hf")) == []
        states = [x.name for x in report.left_out if "_extra_state" in x.name]
        assert any(n.startswith(f"{label}decoder.layers.0.mixer.in_proj._extra_state") for n in states)
    assert "decoder.layers.0.mixer.in_proj.layer_norm_weight" in rank(tmp_path / "torch", 0)


def test_b30_no_shard_is_dropped(tmp_path: Path) -> None:
    """MTP tensors lie in the shards of the embedding and of the head, and the config knows of none."""
    config = NEMOTRON | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*"}
    hf = content_of(nemotron(config))
    mtp = [n for n in hf if n.startswith("mtp.")]
    parts = [["backbone.embeddings.weight", *mtp[:2]], [], ["lm_head.weight", *mtp[2:]]]
    parts[1] = [n for n in hf if n not in parts[0] and n not in parts[2]]
    src = write_small_hf(tmp_path / "hf", config, {})
    (src / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for k, names in enumerate(parts, 1):
        file = f"model-{k:05d}-of-00003.safetensors"
        write_safetensors(src / file, {n: hf[n] for n in names})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": "a stale number"}, "weight_map": weight_map}
    (src / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(src, tmp_path / "dist", "torch_dist")
    convert(tmp_path / "dist", tmp_path / "back", "hf", max_shard_size=3000)
    assert differences(hf, read_hf(tmp_path / "back")) == []
    written = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    assert sorted(written["weight_map"]) == sorted(hf)
    assert len(set(written["weight_map"].values())) > 3

    (src / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(AccountingError) as caught:
        convert(src, tmp_path / "out", "torch_dist")
    assert all(f"not in this model: `{name}`" in str(caught.value) for name in mtp)


def test_b39_a_transposed_view_is_never_read_as_rows(tmp_path: Path) -> None:
    """A rank file may hold a view of other strides; its bytes are in another order than its shape says."""
    import torch

    src, _ = gpt(tmp_path, "LlamaForCausalLM")
    convert(src, tmp_path / "torch", "torch")
    path = tmp_path / "torch/iter_0000001/mp_rank_00/model_optim_rng.pt"
    value = torch.load(path, weights_only=False)
    name = "decoder.layers.7.self_attention.linear_proj.weight"
    value["model"][name] = value["model"][name].t().contiguous().t()
    assert not value["model"][name].is_contiguous()
    torch.save(value, path)
    with pytest.raises(ConvtoolsError, match=rf"(?s){name}.*strides") as caught:
        convert(tmp_path / "torch", tmp_path / "back", "hf")
    assert "strides [1, 10]" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["model.layers.11.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"]
)
def test_b43_an_empty_tensor_stands_for_none(name: str, tmp_path: Path) -> None:
    """A partitioned trainer saves `[0]` for what another rank holds."""
    src, hf = gpt(tmp_path, "LlamaForCausalLM")
    write_safetensors(src / "model.safetensors", content_of(hf | {name: np.zeros(0, "<f4")}))
    with pytest.raises(AccountingError, match=rf"shape: `{name}` is \[0\]"):
        convert(src, tmp_path / "out", "torch_dist")


UP, STACK = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.experts"
Encoded = tuple[str, dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]
"""(the encoding's name, changes of config.json, tensors: those of the same weight are replaced)."""

FP8_BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
QUANTISED: dict[str, Encoded] = {
    "b47 FP8 block scales": (
        "FP8", FP8_BLOCKS, {f"{UP}.weight": ("F8_E4M3", (14, 10)), f"{UP}.weight_scale_inv": ("F32", (4, 3))},
    ),
    "b47 FP8 scale called scale": (
        "FP8", {}, {f"{UP}.weight": ("F8_E4M3", (14, 10)), f"{UP}.scale": ("F32", (4, 3))},
    ),
    "b49 FP8 of zeros without a scale": ("FP8", {}, {f"{UP}.weight": ("F8_E4M3", (14, 10))}),
    "b48 FP8 part blocks of stacked experts": (
        "FP8", FP8_BLOCKS,
        {f"{STACK}.down_proj": ("F8_E4M3", (3, 6, 10)), f"{STACK}.down_proj_scale_inv": ("F32", (3, 2, 3))},
    ),
    "b51 NVFP4 gate and up of two scales": (
        "NVFP4", {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        {
            f"{STACK}.0.{x}.{name}": value
            for x in ("gate_proj", "up_proj")
            for name, value in {
                "weight": ("U8", (14, 5)),
                "weight_scale": ("F8_E4M3", (14, 1)),
                "weight_scale_2": ("F32", ()),
            }.items()
        },
    ),
    "b54 float-quantized of compressed-tensors": (
        "FP8",
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}},
        {f"{UP}.weight": ("F8_E4M3", (14, 10)), f"{UP}.weight_scale": ("BF16", (14, 1))},
    ),
    "b54 plain weights under an FP8 config": ("FP8", FP8_BLOCKS, {}),
    "b54 INT4 of compressed-tensors": (
        "compressed-tensors",
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
        {
            f"{UP}.weight_packed": ("I32", (14, 2)), f"{UP}.weight_scale": ("BF16", (14, 3)),
            f"{UP}.weight_shape": ("I64", (2,)),
        },
    ),
    "b54 GPTQ": (
        "GPTQ", {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {
            f"{UP}.qweight": ("I32", (2, 14)), f"{UP}.qzeros": ("I32", (1, 2)),
            f"{UP}.scales": ("F16", (1, 14)), f"{UP}.g_idx": ("I32", (10,)),
        },
    ),
    "b54 AWQ": (
        "AWQ", {"quantization_config": {"quant_method": "awq", "bits": 4}},
        {
            f"{UP}.qweight": ("I32", (10, 2)), f"{UP}.qzeros": ("I32", (1, 2)),
            f"{UP}.scales": ("F16", (1, 14)),
        },
    ),
    "b54 MXFP4": (
        "MXFP4", {"quantization_config": {"quant_method": "mxfp4"}},
        {
            f"{STACK}.down_proj_blocks": ("U8", (4, 6, 2, 16)),
            f"{STACK}.down_proj_scales": ("U8", (4, 6, 2)),
        },
    ),
    "b54 bitsandbytes": (
        "bitsandbytes", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        {
            f"{UP}.weight": ("U8", (70, 1)), f"{UP}.weight.absmax": ("F32", (3,)),
            f"{UP}.weight.quant_state.bitsandbytes__nf4": ("U8", (80,)),
        },
    ),
    "b55 FP8 with a list of what is not": (
        "FP8",
        {"quantization_config": {"quant_method": "fp8", "ignored_layers": ["re:.*layers\\.1\\..*"]}},
        {"model.layers.2.mlp.up_proj.weight": ("F8_E4M3", (14, 10))},
    ),
    "b56 scales of a KV cache": (
        "KV-cache", {},
        {f"model.layers.1.self_attn.{x}_proj.{x}_scale": ("F32", ()) for x in "kv"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("to", ["torch_dist", "torch", "hf"])
@pytest.mark.parametrize("case", QUANTISED)
def test_quantised_weights_are_refused_by_name(case: str, to: str, tmp_path: Path) -> None:
    """Never as plain numbers: the error names the encoding and its tensors, and nothing is written."""
    kind, changes, tensors = QUANTISED[case]
    src, hf = gpt(tmp_path, "LlamaForCausalLM")
    config = json.loads((src / "config.json").read_text()) | changes
    replaced = {f"{UP}.weight"} if any(name.startswith(f"{UP}.") for name in tensors) else set()
    content = {n: v for n, v in content_of(hf).items() if n not in replaced}
    width = WIDTH | {"U8": 1, "F8_E4M3": 1, "I64": 8}
    content |= {n: (d, s, bytes(prod(s) * width[d])) for n, (d, s) in tensors.items()}
    write_small_hf(src, config, content)
    with pytest.raises(UnsupportedEncoding) as caught:
        convert(src, tmp_path / "out", to)
    assert kind in str(caught.value)
    assert not tensors or any(f"`{name}`" in str(caught.value) for name in tensors)
    assert not (tmp_path / "out").exists()
    assert read_safetensors(src / "model.safetensors").keys() == content.keys()
