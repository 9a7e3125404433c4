"""Qwen3-Next and Qwen3.5: rows by hand for each rank, and the one norm that only Megatron centres on zero."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convtools
from convtools.conversion.api import open_source
from convtools.stores.torch_legacy import rank_folder
from tests.commands import run
from tests.convert.small import filled, read_dist, write_small_hf
from tests.families.tiny_configs import TINY, described, inventory, near_one
from tests.tensors import Content, differences, read_hf, read_rank

NEXT, DENSE, MOE = "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"

ROWS: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 2, "vocab_size": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 3, "intermediate_size": 4, "max_position_embeddings": 8,
    "rope_theta": 1e4,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 2,
    "linear_value_head_dim": 3, "linear_conv_kernel_dim": 2, "rms_norm_eps": 1e-6,
    "layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": False,
}  # fmt: skip
TAGS = {
    "k_proj": 1000, "v_proj": 2000, "in_proj_ba": 1000,
    "in_proj_z": 1000, "in_proj_b": 2000, "in_proj_a": 3000,
}  # fmt: skip
"""What rows of these tensors are numbered from; the others from 0."""


def numbered(architecture: str, spelling: dict[str, Any]) -> tuple[dict[str, Any], Content]:
    """A model whose every element is the number of its row."""
    experts = {"num_experts": 2, "moe_intermediate_size": 2, "shared_expert_intermediate_size": 2}
    config = {"architectures": [architecture]} | ROWS | ({} if architecture == DENSE else experts)
    model = described(architecture, config, spelling)
    content: Content = {}
    for name, (_, shape) in inventory(model, "F32").items():
        rows = np.arange(shape[0], dtype="<f4") + TAGS.get(name.split(".")[-2], 0)
        whole = np.broadcast_to(rows.reshape(-1, *[1] * (len(shape) - 1)), shape)
        content[name] = ("F32", shape, np.ascontiguousarray(whole).tobytes())
    return config, content


def rows_of(entry: tuple[str, tuple[int, ...], bytes]) -> list[int]:
    """The row that each row of a tensor came from; all elements of one must agree."""
    _, shape, data = entry
    whole = np.frombuffer(data, "<f4").reshape(shape[0], -1)
    assert (whole == whole[:, :1]).all()
    return [int(x) for x in whole[:, 0]]


def ranks(architecture: str, root: Path, tp: int, spelling: dict[str, Any] | None = None) -> list[Content]:
    """What each tensor parallel rank holds."""
    src = write_small_hf(root / "hf", *numbered(architecture, spelling or {}))
    convtools.convert(src, root / "m", convtools.Options(to="torch", tp=tp, allow_inexact=True))
    folders = (rank_folder(r, 0, 0, pp_size=1, ep_size=1) for r in range(tp))
    return [read_rank(root / "m/iter_0000001" / f / "model_optim_rng.pt")[1] for f in folders]


def span(*pairs: tuple[int, int]) -> list[int]:
    return [i for first, end in pairs for i in range(first, end)]


GDN = "decoder.layers.0.self_attention."


def test_b25_in_proj_by_key_head(tmp_path: Path) -> None:
    """Qwen3-Next: a key head's 16 rows are 2 q, 2 k, 6 v, 6 z, and of `in_proj_ba` 2 b, 2 a."""
    (whole,) = ranks(NEXT, tmp_path / "1", 1)
    heads = range(0, 64, 16)
    q, k = ([h + at + i for h in heads for i in range(2)] for at in (0, 2))
    v, z = ([h + at + i for h in heads for i in range(6)] for at in (4, 10))
    beta, alpha = ([1000 + h + at + i for h in range(0, 16, 4) for i in range(2)] for at in (0, 2))
    assert rows_of(whole[f"{GDN}in_proj.weight"]) == q + k + v + z + beta + alpha
    first, second = ranks(NEXT, tmp_path / "2", 2)
    assert rows_of(first[f"{GDN}in_proj.weight"]) == [
        *(0, 1, 16, 17), *(2, 3, 18, 19), *span((4, 10), (20, 26)), *span((10, 16), (26, 32)),
        *(1000, 1001, 1004, 1005), *(1002, 1003, 1006, 1007),
    ]  # fmt: skip
    assert rows_of(second[f"{GDN}in_proj.weight"]) == [
        *(32, 33, 48, 49), *(34, 35, 50, 51), *span((36, 42), (52, 58)), *span((42, 48), (58, 64)),
        *(1008, 1009, 1012, 1013), *(1010, 1011, 1014, 1015),
    ]  # fmt: skip


@pytest.mark.parametrize("architecture", [DENSE, MOE])
def test_b25_in_proj_flat(architecture: str, tmp_path: Path) -> None:
    """Qwen3.5: 8 rows of q, 8 of k, 24 of v in one tensor; z, b and a in three others."""
    _, second = ranks(architecture, tmp_path, 2)
    assert rows_of(second[f"{GDN}in_proj.weight"]) == span(
        (4, 8), (12, 16), (28, 40), (1012, 1024), (2004, 2008), (3004, 3008)
    )


@pytest.mark.parametrize("architecture", [NEXT, DENSE])
def test_b25_the_rest_of_gdn_on_rank_1(architecture: str, tmp_path: Path) -> None:
    _, second = ranks(architecture, tmp_path, 2)
    assert rows_of(second[f"{GDN}conv1d.weight"]) == span((4, 8), (12, 16), (28, 40))
    assert rows_of(second[f"{GDN}A_log"]) == rows_of(second[f"{GDN}dt_bias"]) == span((4, 8))
    assert second[f"{GDN}out_proj.weight"][1] == (2, 12)
    assert rows_of(second[f"{GDN}out_norm.weight"]) == [-1, 0, 1]  # HF's 0, 1, 2, whole on every rank


def test_b25_torch_dist_has_a_key_for_each_part(tmp_path: Path) -> None:
    src = write_small_hf(tmp_path / "hf", *numbered(NEXT, {}))
    convtools.convert(src, tmp_path / "m", convtools.Options(to="torch_dist", tp=2, allow_inexact=True))
    keys, _ = read_dist(tmp_path / "m/iter_0000001")
    assert rows_of(keys[f"{GDN}in_proj.weight.key"]) == [2, 3, 18, 19, 34, 35, 50, 51]
    assert rows_of(keys[f"{GDN}in_proj.weight.beta"]) == [1000, 1001, 1004, 1005, 1008, 1009, 1012, 1013]
    assert rows_of(keys[f"{GDN}conv1d.weight.value"]) == span((16, 40))
    assert not any(key.endswith(("in_proj.weight", "conv1d.weight")) for key in keys)


def test_b25_a_tp_that_does_not_divide_key_heads_is_refused(tmp_path: Path) -> None:
    src = write_small_hf(tmp_path / "hf", *numbered(NEXT, {}))
    with pytest.raises(convtools.ConvtoolsError, match="tp=8 does not divide linear_num_key_heads=4"):
        convtools.convert(src, tmp_path / "m", convtools.Options(to="torch", tp=8, allow_inexact=True))


@pytest.mark.parametrize("layer", ["decoder.layers.1.", "mtp.layers.0.mtp_model_layer."])
def test_b02_each_heads_query_and_gate(layer: str, tmp_path: Path) -> None:
    """`q_proj` has 3 rows of query, 3 of gate a head; a group of Megatron's has 2 queries, 2 gates, k, v."""
    first, second = ranks(NEXT, tmp_path, 2, {"mtp": True})
    name = f"{layer}self_attention.linear_qkv.weight"
    assert rows_of(first[name]) == span((0, 3), (6, 9), (3, 6), (9, 12), (1000, 1003), (2000, 2003))
    assert rows_of(second[name]) == span((12, 15), (18, 21), (15, 18), (21, 24), (1003, 1006), (2003, 2006))


def test_mtp_names(tmp_path: Path) -> None:
    config, content = numbered(DENSE, {"mtp": True})
    assert [n for n in content if n.startswith("mtp.") and "layers" not in n] == [
        "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight",
        "mtp.fc.weight", "mtp.norm.weight",
    ]  # fmt: skip
    src = write_small_hf(tmp_path / "hf", config, content)
    convtools.convert(src, tmp_path / "m", convtools.Options(to="torch_dist", allow_inexact=True))
    keys, _ = read_dist(tmp_path / "m/iter_0000001")
    assert sorted(k for k in keys if k.startswith("mtp.")) == [
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.final_layernorm.weight",
        "mtp.layers.0.hnorm.weight",
        *(
            f"mtp.layers.0.transformer_layer.{name}"
            for name in (
                "mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight",
                "self_attention.k_layernorm.weight", "self_attention.linear_proj.weight",
                "self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.weight",
                "self_attention.q_layernorm.weight",
            )
        ),
    ]  # fmt: skip


NORM, OUT_NORM = "model.layers.0.linear_attn.norm.weight", f"{GDN}out_norm.weight"


def bf16(*numbers: float) -> bytes:
    return b"".join(struct.pack("<f", x)[2:] for x in numbers)


def normed(root: Path, numbers: bytes) -> Path:
    """A model whose GDN norm and first input norm both hold these five bf16 numbers, others near one."""
    changes = {"linear_value_head_dim": 5, "hidden_size": 10}
    model = described(NEXT, changes, {})
    content = near_one(model, filled(inventory(model)))
    content[NORM] = ("BF16", (5,), numbers)
    content["model.layers.0.input_layernorm.weight"] = ("BF16", (10,), numbers * 2)
    return write_small_hf(root, dict(model.config), content)


def test_b07_the_table_says_which_norm_is_centred_not_its_numbers(tmp_path: Path) -> None:
    """Equal numbers in two norms: one is copied, one shifted, whatever their mean is."""
    src = normed(tmp_path / "hf", bf16(0.40234375, 7.90625, 9.0, 1.0, 0.5))
    report = convtools.convert(src, tmp_path / "m", convtools.Options(to="torch_dist"))
    keys, _ = read_dist(tmp_path / "m/iter_0000001")
    assert keys[OUT_NORM][2] == bf16(-0.59765625, 6.90625, 8.0, 0.0, -0.5)
    assert keys[f"{GDN}in_proj.layer_norm_weight"][2] == bf16(0.40234375, 7.90625, 9.0, 1.0, 0.5) * 2
    assert [(s.name, s.plus, s.elements, s.inexact) for s in report.shifts] == [
        (f"model.layers.{i}.linear_attn.norm.weight", -1, 5, 0) for i in range(3)
    ]
    report = convtools.convert(tmp_path / "m", tmp_path / "back", convtools.Options(to="hf"))
    assert {s.plus for s in report.shifts} == {1}
    assert differences(read_hf(src), read_hf(tmp_path / "back")) == []


LOSSY = bf16(0.400390625, -0.0, 2.0**-133, 9.0, 1.0)
"""Three that are lost: an odd last bit at 0.4, a sign, a subnormal."""


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("to", ["torch_dist", "torch"])
def test_b07_what_cannot_come_back_is_an_error(to: str, dry_run: bool, tmp_path: Path) -> None:
    src = normed(tmp_path / "hf", LOSSY)
    with pytest.raises(convtools.ConvtoolsError, match=f"`{NORM}`.* 3 of 5 numbers") as error:
        convtools.convert(src, tmp_path / "m", convtools.Options(to=to, dry_run=dry_run))
    assert "--allow-inexact" in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_b07_unless_allowed_then_it_is_reported(tmp_path: Path) -> None:
    src = normed(tmp_path / "hf", LOSSY)
    done = run("convert", src, tmp_path / "m", "--to", "torch_dist", "--tp", 2, "--allow-inexact")
    assert "-1 on every number of 3 tensors" in done.stdout
    assert f"3 of 5 numbers in 1 tensors do not come back exactly: {NORM}" in " ".join(done.stdout.split())
    keys, _ = read_dist(tmp_path / "m/iter_0000001")
    assert keys[OUT_NORM][2] == bf16(-0.6015625, -1.0, -1.0, 8.0, 0.0)
    done = run("convert", tmp_path / "m", tmp_path / "back", "--to", "hf", "--json")
    assert [s["inexact"] for s in json.loads(done.stdout)["shifts"]] == [0, 0, 0]
    assert read_hf(tmp_path / "back")[NORM][2] == bf16(0.3984375, 0.0, 0.0, 9.0, 1.0)


def test_b07_a_trained_megatron_norm_may_not_fit_hfs_dtype(tmp_path: Path) -> None:
    """0.01 in bf16 plus 1 needs more bits than bf16 has; fp32 holds it."""
    src = normed(tmp_path / "hf", bf16(1.0, 1.0, 1.0, 1.0, 1.0))
    convtools.convert(src, tmp_path / "m", convtools.Options(to="torch"))
    path = tmp_path / "m/iter_0000001/mp_rank_00/model_optim_rng.pt"
    data, small = path.read_bytes(), 0.010009765625
    import torch

    value = torch.load(path, weights_only=False)
    value["model"][OUT_NORM] = torch.full((5,), small, dtype=torch.bfloat16)
    torch.save(value, path)
    assert path.read_bytes() != data
    with pytest.raises(convtools.ConvtoolsError, match=f"`{NORM}`.* 5 of 5 numbers"):
        convtools.convert(tmp_path / "m", tmp_path / "back", convtools.Options(to="hf"))
    convtools.convert(tmp_path / "m", tmp_path / "wide", convtools.Options(to="hf", dtype="fp32"))
    assert read_hf(tmp_path / "wide")[NORM][2] == struct.pack("<f", 1 + small) * 5
    convtools.convert(tmp_path / "m", tmp_path / "round", convtools.Options(to="hf", allow_inexact=True))
    assert read_hf(tmp_path / "round")[NORM][2] == bf16(1.0078125) * 5


def test_b07_within_one_side_nothing_is_added(tmp_path: Path) -> None:
    """HF to HF and Megatron to Megatron copy every bit: of NaNs, -0.0 and subnormals."""
    odd = b"\x81\x7f\x00\x80\x01\x00\xcd\x3e\x80\xff"
    src = normed(tmp_path / "hf", odd)
    assert convtools.convert(src, tmp_path / "copy", convtools.Options(to="hf")).shifts == ()
    assert differences(read_hf(src), read_hf(tmp_path / "copy")) == []
    convtools.convert(src, tmp_path / "m", convtools.Options(to="torch", tp=2, allow_inexact=True))
    report = convtools.convert(tmp_path / "m", tmp_path / "d", convtools.Options(to="torch_dist", pp=2))
    assert report.shifts == ()
    _, rank, _ = read_rank(tmp_path / "m/iter_0000001/mp_rank_01/model_optim_rng.pt")
    assert read_dist(tmp_path / "d/iter_0000001")[0][OUT_NORM][2] == rank[OUT_NORM][2]


@pytest.mark.parametrize("architecture", [NEXT, DENSE])
@pytest.mark.parametrize("mtp", [False, True])
def test_config_json_comes_out_of_megatrons_args(architecture: str, mtp: bool, tmp_path: Path) -> None:
    """The same model from args alone, without the kept config.json."""
    model = described(architecture, {"rms_norm_eps": 1e-6, "rope_theta": 1e6}, {"mtp": mtp})
    content = near_one(model, filled(inventory(model)))
    src = write_small_hf(tmp_path / "hf", dict(model.config), content)
    convtools.convert(src, tmp_path / "m", convtools.Options(to="torch_dist"))
    shutil.rmtree(tmp_path / "m/iter_0000001/hf")
    convtools.convert(tmp_path / "m", tmp_path / "back", convtools.Options(to="hf"))
    assert differences(content, read_hf(tmp_path / "back")) == []
    assert open_source(tmp_path / "back").model.spec == open_source(src).model.spec


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"apply_layernorm_1p": False, "layernorm_zero_centered_gamma": None}, "apply_layernorm_1p"),
        ({"attention_output_gate": False}, "attention_output_gate=False"),
        ({"position_embedding_type": "mrope"}, "position_embedding_type='mrope'"),
        ({"linear_attention_freq": [1, 2]}, "layer_types"),
        ({"moe_shared_expert_gate": False}, "moe_shared_expert_gate"),
        ({"experimental_attention_variant": None}, "another architecture, by its args"),
    ],
)
def test_args_of_another_model_are_not_derived_from(change: dict[str, Any], said: str) -> None:
    model = described(NEXT, {"rms_norm_eps": 1e-6, "rope_theta": 1e6}, {})
    args = model.family.megatron_args(model.config, model.spec, model.spelling)
    assert model.family.hf_config(args, {})[1] == []
    assert model.family.hf_config(args | change, {})[1] == [said]


def test_conditional_generation_holds_the_same_text_model(tmp_path: Path) -> None:
    """Nested config, `model.language_model.`, fused experts in the layers and not in MTP."""
    inner = described(MOE, {}, {"mtp": True, "fused_experts": True})
    prefix, content = "model.language_model.", near_one(inner, filled(inventory(inner)))
    content = {n.replace("model.", prefix, 1) if n.startswith("model.") else n: v for n, v in content.items()}
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "text_config": TINY[MOE].config, "tie_word_embeddings": False,
    }  # fmt: skip
    src = write_small_hf(tmp_path / "hf", config, content)
    convtools.convert(src, tmp_path / "m", convtools.Options(to="torch_dist", tp=2, pp=2, ep=2))
    convtools.convert(tmp_path / "m", tmp_path / "back", convtools.Options(to="hf"))
    assert differences(content, read_hf(tmp_path / "back")) == []
    assert {f"{prefix}layers.0.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts.0.up_proj.weight"} <= set(
        content
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "`layer_types` is not a list of 4"),
        ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "`layer_types`"),
        (
            {"linear_num_value_heads": 3},
            "linear_num_value_heads=3 is not a multiple of linear_num_key_heads=2",
        ),
        ({"attention_bias": True}, "`attention_bias` is true"),
        ({"mlp_only_layers": [4]}, "`mlp_only_layers` is not a list of numbers from 0 to 3"),
        ({"mtp_num_hidden_layers": 2}, "`mtp_num_hidden_layers` is 2"),
        (
            {"num_experts": 60_000, "num_hidden_layers": 10_000, "layer_types": None},
            "tensors, expected at most",
        ),
    ],
)
def test_what_the_table_cannot_say_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(convtools.ConvtoolsError) as error:
        described(NEXT, changes, {})
    assert said in str(error.value)


def test_layers_by_interval() -> None:
    spec = described(
        DENSE, {"layer_types": None, "num_hidden_layers": 8, "full_attention_interval": 3}, {}
    ).spec
    assert spec.text == "G-G-*-G-G-*-G-G-"
    spec = described(NEXT, {"layer_types": None, "decoder_sparse_step": 2, "mlp_only_layers": [1]}, {}).spec
    assert spec.text == "G-G-G-*E"
