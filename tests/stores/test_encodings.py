"""Quantised weights and adapters are refused by name; plain models are not."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from convtools.errors import UnsupportedEncoding
from convtools.stores.encodings import find_encodings, refuse_encodings
from convtools.stores.hf import open_hf
from convtools.stores.safetensors_header import encode_header

FIXTURES = Path(__file__).parents[2] / "fixtures" / "oracle"
ORACLES = sorted(p.parent for p in FIXTURES.glob("*/hf/model.safetensors"))


class Head(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def heads(**dtypes: str | tuple[str, tuple[int, ...]]) -> dict[str, Head]:
    """`{name: Head}`, 6x10 unless said otherwise; `__` in a key stands for a dot."""
    return {
        name.replace("__", "."): Head(d, (6, 10)) if isinstance(d, str) else Head(*d)
        for name, d in dtypes.items()
    }


def refusal(config: dict[str, Any], tensors: dict[str, Head], *files: str) -> str:
    with pytest.raises(UnsupportedEncoding) as caught:
        refuse_encodings(config, tensors, files)
    return str(caught.value)


BF16 = heads(model__layers__0__mlp__up_proj__weight="BF16", model__norm__weight=("BF16", (6,)))
FP8_CONFIG = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 4]}}
SCALE = ("F32", (2, 3))

ENCODED = {
    "FP8 block, DeepSeek": ("FP8", heads(l__weight="F8_E4M3", l__weight_scale_inv=SCALE)),
    "FP8, compressed-tensors": ("FP8", heads(l__weight="F8_E4M3", l__weight_scale=("BF16", (6, 1)))),
    "FP8 with .scale": ("FP8", heads(l__weight="F8_E4M3", l__scale=("F8_E8M0", (2, 3)))),
    "FP8 e5m2 alone": ("FP8", heads(l__weight="F8_E5M2")),
    "FP8 stacked experts": (
        "FP8",
        heads(mlp__experts__down_proj=("F8_E4M3", (4, 6, 10)), mlp__experts__down_proj_scale_inv=SCALE),
    ),
    "MXFP8": ("FP8", heads(l__weight="F8_E4M3", l__weight_scale=("U8", (6, 1)))),
    "GPTQ": (
        "packed INT4 or INT8 (GPTQ/AWQ layout)",
        heads(l__qweight="I32", l__qzeros="I32", l__scales="F16", l__g_idx=("I32", (6,))),
    ),
    "AWQ": ("GPTQ/AWQ", heads(l__qweight="I32", l__qzeros="I32", l__scales="F16")),
    "compressed-tensors INT4": (
        "packed INT4 or INT8 (compressed-tensors layout)",
        heads(l__weight_packed="I32", l__weight_scale="BF16", l__weight_shape=("I64", (2,))),
    ),
    "compressed-tensors NVFP4": (
        "NVFP4",
        heads(l__weight_packed="U8", l__weight_scale="F8_E4M3", l__weight_global_scale=("F32", (1,))),
    ),
    "compressed-tensors MXFP4": ("MXFP4", heads(l__weight_packed="U8", l__weight_scale="U8")),
    "MXFP4, gpt-oss": (
        "MXFP4",
        heads(
            mlp__experts__gate_up_proj_blocks=("U8", (4, 6, 2, 16)),
            mlp__experts__gate_up_proj_scales=("U8", (4, 6, 2)),
            mlp__experts__gate_up_proj_bias="BF16",
        ),
    ),
    "MXFP4, E8M0 scale": ("MXFP4", heads(l__weight="I8", l__scale=("F8_E8M0", (6, 1)))),
    "NVFP4, ModelOpt": (
        "NVFP4",
        heads(
            l__weight="U8",
            l__weight_scale="F8_E4M3",
            l__weight_scale_2=("F32", ()),
            l__input_scale=("F32", ()),
        ),
    ),
    "NVFP4 fused experts": (
        "NVFP4",
        heads(
            e__down_proj=("U8", (4, 6, 5)),
            e__down_proj_weight_scale=("F8_E4M3", (4, 6, 1)),
            e__down_proj_weight_scale_2=("F32", (4,)),
        ),
    ),
    "bitsandbytes 4-bit": (
        "bitsandbytes",
        {
            "l.weight": Head("U8", (30, 1)),
            "l.weight.absmax": Head("U8", (1,)),
            "l.weight.quant_map": Head("F32", (16,)),
            "l.weight.nested_absmax": Head("F32", (1,)),
            "l.weight.nested_quant_map": Head("F32", (256,)),
            "l.weight.quant_state.bitsandbytes__nf4": Head("U8", (80,)),
        },
    ),
    "bitsandbytes 8-bit": ("bitsandbytes", heads(l__weight="I8", l__SCB=("F32", (6,)))),
    "INT8": ("INT8 with scales", heads(l__weight="I8", l__weight_scale=("F32", (6, 1)))),
    "MLX": ("MLX packed integers", heads(l__weight="U32", l__scales="BF16", l__biases="BF16")),
    "F4": ("the sub-byte dtype F4", heads(l__weight="F4", l__scale="F8_E8M0")),
}  # fmt: skip


@pytest.mark.parametrize("case", ENCODED)
def test_b47_b54_an_encoding_is_refused_by_name_without_any_config(case: str) -> None:
    kind, tensors = ENCODED[case]
    said = refusal({}, {**BF16, **tensors})
    assert kind in said.splitlines()[0]
    assert f"`{next(iter(tensors))}`" in said
    assert "model.norm.weight" not in said
    assert "what to do: convert the model's unquantised (bf16) checkpoint" in said


@pytest.mark.parametrize("case", ENCODED)
def test_every_tensor_of_an_encoding_is_told_and_of_one_kind(case: str) -> None:
    kind, tensors = ENCODED[case]
    found = find_encodings({}, {**BF16, **tensors}, [])
    assert all(e.seen_in == "headers" for e in found)
    assert [e.kind for e in found if kind not in e.kind] == (["FP8"] if case == "F4" else [])
    plain = {name for name in tensors if name.endswith(("_bias", ".input_scale"))}
    if case == "MLX":
        plain = {"l.scales", "l.biases"}  # names that a plain model may use too
    assert {name for e in found for name in e.tensors} == tensors.keys() - plain


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale", "scale", None])
def test_b47_fp8_is_refused_with_its_scale_under_any_name_and_without(scale: str | None) -> None:
    tensors = {"l.weight": Head("F8_E4M3", (6, 10))}
    if scale:
        tensors[f"l.{scale}"] = Head("F32", (2, 3))
    said = refusal(FP8_CONFIG, tensors)
    assert said.startswith("the weights are encoded: FP8. They are not read as plain numbers")
    assert ("`l.weight`, `l." in said) == (scale is not None)


def test_b47_a_scale_in_another_shard_is_told_with_its_weight(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weight_map = {"l.weight": "1.safetensors", "l.scale": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "1.safetensors").write_bytes(encode_header([("l.weight", "I8", (6, 5))]) + bytes(30))
    (tmp_path / "2.safetensors").write_bytes(encode_header([("l.scale", "F8_E8M0", (6, 1))]) + bytes(6))
    found = open_hf(tmp_path)
    with pytest.raises(UnsupportedEncoding, match=r"encoded: MXFP4\.[^`]*`l\.weight`, `l\.scale`"):
        refuse_encodings(found.config, found.tensors, found.side_files)


def test_b54_bf16_weights_under_an_fp8_config_disagree() -> None:
    said = refusal(FP8_CONFIG, BF16)
    assert said.startswith("the config says FP8, and the weights are plain numbers: the two disagree")
    assert "config.json: `quantization_config` (quant_method `fp8`)" in said
    assert "if the weights were dequantised, take the quantisation block out of config.json" in said


def test_b54_fp8_weights_under_another_config_disagree() -> None:
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    said = refusal(config, heads(l__weight="F8_E4M3"))
    assert (
        "the config says packed INT4 or INT8 (GPTQ/AWQ layout), the headers say FP8: the two disagree" in said
    )


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "FP8"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "NVFP4"),
        ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, "MXFP4"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "INT8 with scales"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "packed INT4 or INT8 (comp"),
        ({"quant_method": "fbgemm_fp8"}, "FP8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8"),
        ({"quant_method": "modelopt_fp4"}, "NVFP4"),
        ({"quant_method": "mxfp4"}, "MXFP4"),
        ({"quant_method": "awq", "bits": 4}, "packed INT4 or INT8 (GPTQ"),
        ({"quant_method": "intel/auto-round"}, "packed INT4 or INT8 (GPTQ"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"bits": 4, "group_size": 64}, "MLX"),
    ],
)
def test_b54_each_known_method_is_named(block: dict[str, Any], kind: str) -> None:
    said = refusal({"quantization_config": block}, BF16).splitlines()[0]
    assert said.startswith(f"the config says {kind}")
    assert said.endswith("and the weights are plain numbers: the two disagree")


@pytest.mark.parametrize(
    ("block", "word"),
    [
        ({"quant_method": "hqq"}, "quant_method `hqq`"),
        ({"quant_method": "compressed-tensors", "format": "new-one"}, "format `new-one`"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo `MIXED_PRECISION`"),
        ({}, "no quant_method"),
        ("fp8", "a quantisation `fp8`"),
        ([1], "a quantisation `[1]`"),
    ],
)
def test_b54_an_unknown_method_is_refused_by_its_own_name(block: object, word: str) -> None:
    for tensors in (BF16, heads(l__weight="F8_E4M3")):
        said = refusal({"quantization_config": block}, tensors)
        assert word in said.splitlines()[0]
        assert "which is not known here" in said


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"text_config": FP8_CONFIG}, "text_config.quantization_config"),
        ({"thinker_config": {"text_config": FP8_CONFIG}}, "thinker_config.text_config.quantization_config"),
        ({"compression_config": FP8_CONFIG["quantization_config"]}, "compression_config"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantization"),
    ],
)
def test_b54_the_block_is_found_wherever_it_lies(config: dict[str, Any], path: str) -> None:
    assert f"config.json: `{path}` (" in refusal(config, BF16)


def test_modelopts_own_config_file_counts() -> None:
    assert "the file `hf_quant_config.json`" in refusal({}, BF16, "hf_quant_config.json")
    said = refusal({}, ENCODED["NVFP4, ModelOpt"][1], "hf_quant_config.json")
    assert said.startswith("the weights are encoded: NVFP4.")


@pytest.mark.parametrize(
    "names",
    [
        ("l.self_attn.k_proj.k_scale", "l.self_attn.v_proj.v_scale"),
        ("l.self_attn.attn.k_scale", "l.self_attn.attn.v_scale"),
        ("l.self_attn.kv_scale",),
        ("l.self_attn.k_proj.output_scale", "l.self_attn.v_proj.output_scale"),
    ],
)
def test_b56_kv_cache_scales_are_refused_not_dropped(names: tuple[str, ...]) -> None:
    said = refusal({}, {**BF16, **{name: Head("F32", ()) for name in names}})
    assert "encoded: KV-cache scales" in said
    assert all(f"`{name}`" in said for name in names)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.lora_B.default.weight",
        "base_model.model.model.layers.0.mlp.down_proj.ia3_l",
    ],
)
def test_adapters_are_refused_by_tensor_names(name: str) -> None:
    said = refusal({}, {**BF16, name: Head("F32", (8, 10))})
    assert "a LoRA/PEFT adapter" in said.splitlines()[0]
    assert f"`{name}`" in said
    assert "merge_and_unload" in said


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_adapters_are_refused_by_file_names(file: str) -> None:
    assert f"the file `{file}`" in refusal({}, BF16, "tokenizer.json", file)


def test_gguf_alone_is_refused_and_beside_safetensors_is_not() -> None:
    assert "GGUF" in refusal({}, {}, "model.Q4_K_M.gguf")
    refuse_encodings({}, BF16, ["model.Q4_K_M.gguf"])


@pytest.mark.parametrize("dtype", ["U8", "I8"])
@pytest.mark.parametrize("name", ["l.weight", "mlp.experts.gate_up_proj"])
def test_b47_a_one_byte_weight_matrix_without_a_partner_is_unknown(name: str, dtype: str) -> None:
    said = refusal({}, {**BF16, name: Head(dtype, (2, 6, 10))})
    assert said.startswith("the weights are encoded: an unknown 8-bit encoding.")
    assert f"`{name}`" in said


def test_a_weight_matrix_of_wider_integers_is_unknown_too() -> None:
    assert "an unknown integer encoding" in refusal({}, heads(l__weight="I32"))


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale", "weight_scale_2", "weight_zero_point"])
def test_b54_scales_left_beside_plain_weights_are_refused(scale: str) -> None:
    plain = {"l.weight": Head("BF16", (6, 10)), f"l.{scale}": Head("F32", (2, 3))}
    assert "quantisation scales without quantised weights" in refusal({}, plain)
    assert "the two disagree" not in refusal(FP8_CONFIG, plain)


def test_the_list_of_tensors_is_capped() -> None:
    tensors = {f"model.layers.{i}.weight": Head("F8_E4M3", (6, 10)) for i in range(5000)}
    said = refusal({}, tensors)
    assert "`model.layers.3.weight` ... and 4996 more" in said
    assert len(said) < 800


PLAIN = {
    **BF16,
    **heads(
        backbone__layers__0__mixer__D=("F32", (4,)),
        backbone__layers__0__mixer__dt_bias=("F32", (4,)),
        backbone__layers__0__mixer__A_log=("F32", (4,)),
        mixer__gate__e_score_correction_bias=("F32", (12,)),
        router__scale=("BF16", (6,)),
        norm__scale=("F32", (6,)),
        l__weight="BF16",
        l__scale=("BF16", (6,)),
        l__k_scale=("BF16", (6,)),
        vision__layer_scale=("F32", (6,)),
        logit_scale=("F32", ()),
        embed_scale=("F32", ()),
        attn__scales=("F32", (6,)),
        attn__out_scale="BF16",
        mlp__res_blocks=("F32", (6, 2)),
        mlp__res_scales=("F32", (6, 2)),
        stem__conv_blocks=("U8", (6,)),
        embeddings__position_ids=("I64", (1, 77)),
        hash__tid2eid=("I32", (23, 6)),
        mask=("BOOL", (6, 6)),
        codes=("U8", (6,)),
        attn__bias_table=("U8", (6, 6)),
        l__weight_g=("BF16", (6, 1)),
        l__weight_v="BF16",
        lora__weight="BF16",
        attn__w_lora_A_proj__weight="BF16",
        adapter__down_proj__weight="BF16",
        e__gate_up_proj=("BF16", (4, 6, 10)),
        e__gate_up_proj_bias="BF16",
        empty__weight=("BF16", (0, 6)),
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_no_rule_misfires_on_a_plain_model(name: str) -> None:
    hits = [e for e in find_encodings({}, PLAIN, ["tokenizer.json", "config.json"]) if name in e.tensors]
    assert hits == []


@pytest.mark.parametrize(
    "config", [{}, {"quantization_config": None}, {"quantization": "none"}, {"a": {"b": [1]}}]
)
def test_a_plain_model_passes(config: dict[str, Any]) -> None:
    assert find_encodings(config, PLAIN, ["tokenizer.json"]) == ()
    refuse_encodings(config, PLAIN, ["tokenizer.json"])


@pytest.mark.parametrize("root", ORACLES, ids=lambda p: p.parent.name)
def test_real_bf16_checkpoints_pass(root: Path) -> None:
    found = open_hf(root)
    refuse_encodings(found.config, found.tensors, found.side_files)
    assert len(found.tensors) > 20


def test_there_are_real_checkpoints() -> None:
    assert ORACLES


def test_hostile_names_and_blocks_stay_in_bounds() -> None:
    deep: dict[str, Any] = {}
    for _ in range(50_000):
        deep = {"a": deep}
    refuse_encodings(deep, BF16, [])
    chained = {"w" + "_scale" * i: Head("U8", (2, 2)) for i in range(3000)}
    find_encodings({}, chained, [])
    block = {"quant_method": deep, "format": "x" * 10**6}
    said = refusal({"quantization_config": block}, {"\x1b[2J" * 999 + ".weight": Head("F8_E4M3", (1,))})
    assert len(said) < 2500
    assert re.fullmatch(r"[\x20-\x7e\n]*", said)
