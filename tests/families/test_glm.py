"""GLM-4.5 and Qwen2-MoE, of which no files of real Megatron exist: rows by hand, MTP, and configs.

What GLM shares with DeepSeek-V3 (routing bias, MTP layers past the last, their copies) is tested for
both. Random models and layouts are in `test_every_family.py`, experts in `test_fused_experts.py`.
B01, B16, B23, B27 and B29 are public failures of this kind.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convtools
from convtools.errors import AccountingError
from convtools.families.gpt import Spelling
from convtools.families.registry import find_family
from convtools.families.table import Table
from tests.convert.small import filled, read_dist, write_dist, write_small_hf
from tests.families.test_rank_rows import Arrays, Model, hold, numbered, padded
from tests.families.tiny_configs import described, inventory
from tests.tensors import Content, differences, read_hf, read_rank

# 12 layers, of which GLM's first two and Qwen's layers 0 and 7 are dense; 12 experts
GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 12, "hidden_size": 20, "vocab_size": 23,
    "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 3, "intermediate_size": 52,
    "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 2, "n_routed_experts": 12,
    "moe_intermediate_size": 18, "n_shared_experts": 2, "num_nextn_predict_layers": 2,
    "num_experts_per_tok": 4, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "max_position_embeddings": 64, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN2_MOE: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"], "num_hidden_layers": 12, "hidden_size": 20, "vocab_size": 23,
    "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 52, "head_dim": 3,
    "mlp_only_layers": [0, 7], "decoder_sparse_step": 1, "num_experts": 12, "moe_intermediate_size": 18,
    "shared_expert_intermediate_size": 44, "num_experts_per_tok": 4, "norm_topk_prob": False,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 3, "first_k_dense_replace": 1,
    "hidden_size": 20, "vocab_size": 23, "num_attention_heads": 4, "q_lora_rank": 7, "kv_lora_rank": 9,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "intermediate_size": 52,
    "n_routed_experts": 12, "moe_intermediate_size": 18, "n_shared_experts": 2, "num_experts_per_tok": 4,
    "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 64,
    "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS = {"glm": GLM, "qwen2 moe": QWEN2_MOE}


class Numbered(Model):
    """A model whose tensors' elements are numbered."""

    def __init__(self, config: dict[str, Any]) -> None:
        family = find_family(config)
        self.spec = family.parse(config)
        self.table = Table.of(family.rows(self.spec, Spelling(), 32))
        self.hf = {name: numbered(i, shape) for i, (name, shape) in enumerate(self.table.hf.items())}


@pytest.fixture(scope="module")
def models() -> dict[str, Numbered]:
    return {name: Numbered(config) for name, config in CONFIGS.items()}


@pytest.fixture(scope="module")
def tp2(models: dict[str, Numbered]) -> dict[str, list[Arrays]]:
    return {name: model.ranks(tp=2) for name, model in models.items()}


def rows_of(hf: Arrays, at: str, kind: str, *runs: tuple[str, int, int]) -> np.ndarray:
    return np.concatenate([hf[f"{at}{which}_proj.{kind}"][first:end] for which, first, end in runs])


# (Megatron's name, the Hugging Face tensors' rows that rank 0 and rank 1 hold)
QKV = ([("q", 0, 18), ("k", 0, 3), ("v", 0, 3)], [("q", 18, 36), ("k", 3, 6), ("v", 3, 6)])
PLACES = {"glm": [(0, 0), (1, 1), (7, 7), (11, 11)], "qwen2 moe": [(0, 0), (1, 1), (7, 7), (10, 10)]}
DENSE = {"glm": (0, 1), "qwen2 moe": (0, 7)}
SHARED = {"glm": ("shared_experts.", 36), "qwen2 moe": ("shared_expert.", 44)}


def where(case: str) -> list[tuple[str, str]]:
    """(Megatron's layer, Hugging Face's) for some layers, and GLM's two MTP layers 12 and 13."""
    out = [(f"decoder.layers.{a}.", f"model.layers.{b}.") for a, b in PLACES[case]]
    if case == "glm":
        out += [(f"mtp.layers.{o}.mtp_model_layer.", f"model.layers.{12 + o}.") for o in (0, 1)]
    return out


@pytest.mark.parametrize("case", CONFIGS)
def test_B01_attention_of_each_layer(
    models: dict[str, Numbered], tp2: dict[str, list[Arrays]], case: str
) -> None:
    hf, ranks = models[case].hf, tp2[case]
    for mcore, at in where(case):
        for kind in ("weight", "bias"):
            expected = [rows_of(hf, f"{at}self_attn.", kind, *runs) for runs in QKV]
            hold(ranks, f"{mcore}self_attention.linear_qkv.{kind}", expected)
        o_proj = hf[f"{at}self_attn.o_proj.weight"]
        hold(ranks, f"{mcore}self_attention.linear_proj.weight", [o_proj[:, 0:18], o_proj[:, 18:36]])
        assert f"{mcore}self_attention.linear_proj.bias" not in ranks[0]  # q, k, v have biases, o has none
        assert f"{at}self_attn.o_proj.bias" not in hf
        hold(ranks, f"{mcore}self_attention.linear_qkv.layer_norm_weight",
             [hf[f"{at}input_layernorm.weight"]] * 2)  # fmt: skip
        for x in "qk":
            name = f"{mcore}self_attention.{x}_layernorm.weight"
            if case == "glm":
                hold(ranks, name, [hf[f"{at}self_attn.{x}_norm.weight"]] * 2)
            else:
                assert name not in ranks[0]


@pytest.mark.parametrize("case", CONFIGS)
def test_dense_layers_and_layers_of_experts(
    models: dict[str, Numbered], tp2: dict[str, list[Arrays]], case: str
) -> None:
    hf, ranks = models[case].hf, tp2[case]
    module, width = SHARED[case]
    for mcore, at in where(case):
        after = [hf[f"{at}post_attention_layernorm.weight"]] * 2
        if mcore in {f"decoder.layers.{i}." for i in DENSE[case]}:
            gate, up, down = (hf[f"{at}mlp.{x}_proj.weight"] for x in ("gate", "up", "down"))
            expected = [np.concatenate([gate[r], up[r]]) for r in (slice(0, 26), slice(26, 52))]
            hold(ranks, f"{mcore}mlp.linear_fc1.weight", expected)
            hold(ranks, f"{mcore}mlp.linear_fc2.weight", [down[:, 0:26], down[:, 26:52]])
            hold(ranks, f"{mcore}mlp.linear_fc1.layer_norm_weight", after)
            assert f"{mcore}mlp.router.weight" not in ranks[0]
            continue
        hold(ranks, f"{mcore}pre_mlp_layernorm.weight", after)
        hold(ranks, f"{mcore}mlp.router.weight", [hf[f"{at}mlp.gate.weight"]] * 2)
        gate, up, down = (hf[f"{at}mlp.{module}{x}_proj.weight"] for x in ("gate", "up", "down"))
        half = width // 2
        expected = [np.concatenate([gate[r], up[r]]) for r in (slice(0, half), slice(half, width))]
        hold(ranks, f"{mcore}mlp.shared_experts.linear_fc1.weight", expected)
        hold(ranks, f"{mcore}mlp.shared_experts.linear_fc2.weight", [down[:, :half], down[:, half:]])
        gate, up, down = (hf[f"{at}mlp.experts.10.{x}_proj.weight"] for x in ("gate", "up", "down"))
        whole = np.concatenate([gate, up])  # etp is 1: the second rank of tp 2 holds all of it too
        hold(ranks, f"{mcore}mlp.experts.linear_fc1.weight10", [whole, whole])
        hold(ranks, f"{mcore}mlp.experts.linear_fc2.weight10", [down, down])
        if case == "glm":
            hold(ranks, f"{mcore}mlp.router.expert_bias", [hf[f"{at}mlp.gate.e_score_correction_bias"]] * 2)
            assert f"{mcore}mlp.shared_experts.gate_weight" not in ranks[0]
        else:
            gate_weight = hf[f"{at}mlp.shared_expert_gate.weight"]
            assert gate_weight.shape == (1, 20)
            hold(ranks, f"{mcore}mlp.shared_experts.gate_weight", [gate_weight] * 2)
            assert f"{mcore}mlp.router.expert_bias" not in ranks[0]


def test_glms_mtp_layers_stand_past_the_last_layer(
    models: dict[str, Numbered], tp2: dict[str, list[Arrays]]
) -> None:
    hf, ranks = models["glm"].hf, tp2["glm"]
    for o, at in enumerate(("model.layers.12.", "model.layers.13.")):
        eh_proj = hf[f"{at}eh_proj.weight"]
        assert eh_proj.shape == (20, 40)
        hold(ranks, f"mtp.layers.{o}.eh_proj.weight", [eh_proj[0:10], eh_proj[10:20]])
        for mcore, other in (("enorm", "enorm"), ("hnorm", "hnorm"), ("final_layernorm", "shared_head.norm")):
            hold(ranks, f"mtp.layers.{o}.{mcore}.weight", [hf[f"{at}{other}.weight"]] * 2)


def test_B16_mtp_experts_are_on_the_last_stage_and_placed_as_the_decoders(
    models: dict[str, Numbered],
) -> None:
    model = models["glm"]
    ranks = model.ranks(pp=2, ep=3)
    assert not any(name.startswith("mtp.") for held in ranks[:3] for name in held)
    down = [model.hf[f"model.layers.13.mlp.experts.{e}.down_proj.weight"] for e in (3, 7, 11)]
    hold(ranks[3:], "mtp.layers.1.mtp_model_layer.mlp.experts.linear_fc2.weight3", down)
    tokens = padded(model.hf["model.embed_tokens.weight"], 0, 32)
    hold(ranks[3:], "embedding.word_embeddings.weight", [tokens] * 3)


# --- checkpoints: bias, MTP, copies -----------------------------------------------------------------


def content_of(config: dict[str, Any], **spelling: bool) -> Content:
    """Random tensors, and equal bytes for what repeats another."""
    model = described(config["architectures"][0], config, spelling)
    content = filled(inventory(model), 1)
    return content | {copy.name: content[copy.of] for copy in model.copies()}


def options(to: str, **more: Any) -> convtools.Options:
    return convtools.Options(to=to, fsync=False, workers=1, **more)


def small(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Fewer layers, and no sizes that slow a test down."""
    return config | {"num_hidden_layers": 3, "first_k_dense_replace": 1} | changes


@pytest.mark.parametrize("config", [GLM, DEEPSEEK], ids=["glm", "deepseek"])
@pytest.mark.parametrize("to", ["torch_dist", "torch"])
def test_B23_the_routers_bias_stays_fp32_in_every_layer_and_in_mtp(
    config: dict[str, Any], to: str, tmp_path: Path
) -> None:
    """1 + 1/1024 and 1 are one number in bf16; casting the model leaves the bias alone."""
    config, biases = small(config, num_nextn_predict_layers=1), {}
    content = content_of(config)
    names = [f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2, 3)]
    for i, name in enumerate(names):
        biases[name] = ("F32", (12,), struct.pack("<12f", *(1 + (k + i) / 1024 for k in range(12))))
    assert {n for n in content if n.endswith("bias") and "gate" in n} == set(names)
    src = write_small_hf(tmp_path / "hf", config, content | biases)
    convtools.convert(src, tmp_path / "m", options(to, dtype="bf16", tp=2))
    if to == "torch_dist":
        keys, _ = read_dist(tmp_path / "m/iter_0000001")
        at = [f"decoder.layers.{i}." for i in (1, 2)] + ["mtp.layers.0.transformer_layer."]
    else:
        _, keys, _ = read_rank(tmp_path / "m/iter_0000001/mp_rank_01/model_optim_rng.pt")
        at = [f"decoder.layers.{i}." for i in (1, 2)] + ["mtp.layers.0.mtp_model_layer."]
    assert [keys[f"{a}mlp.router.expert_bias"] for a in at] == list(biases.values())
    convtools.convert(tmp_path / "m", tmp_path / "back", options("hf", dtype="bf16"))
    back = read_hf(tmp_path / "back")
    assert {name: back[name] for name in names} == biases
    rounded = {n: ("BF16", s, d[:24]) for n, (_, s, d) in biases.items()}
    write_small_hf(tmp_path / "hf", config, content | rounded)
    with pytest.raises(AccountingError, match=r"e_score_correction_bias` is BF16, expected F32"):
        convtools.convert(src, tmp_path / "n", options(to))


COPIES = {"mtp_embedding": "embed_tokens.weight", "mtp_head": "shared_head.head.weight"}


@pytest.mark.parametrize("config", [GLM, DEEPSEEK], ids=["glm", "deepseek"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("kinds", [(), ("mtp_head",), ("mtp_embedding", "mtp_head")], ids=str)
def test_B27_mtp_layers_and_their_copies(
    config: dict[str, Any], depth: int, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    """All of them come back; a copy whose values are its own is an error that names it, not replaced."""
    config = small(config, num_nextn_predict_layers=depth)
    content = content_of(config, **dict.fromkeys(kinds, True))
    copies = [f"model.layers.{3 + o}.{COPIES[kind]}" for o in range(depth) for kind in kinds]
    assert [n for n in content if n.endswith(tuple(COPIES.values())) and ".layers." in n] == copies
    src = write_small_hf(tmp_path / "hf", config, content)
    report = convtools.convert(src, tmp_path / "m", options("torch_dist", tp=2))
    assert report.duplicates == len(copies)
    assert not any("MTP" in note for note in report.notes)
    convtools.convert(tmp_path / "m", tmp_path / "back", options("hf"))
    assert differences(content, read_hf(tmp_path / "back")) == []
    for name in copies:
        dtype, shape, data = content[name]
        write_small_hf(src, config, content | {name: (dtype, shape, data[:-2] + b"\x11\x11")})
        with pytest.raises(convtools.ConvtoolsError, match=name):
            convtools.convert(src, tmp_path / "n", options("torch_dist"))
        assert not (tmp_path / "n").exists()


@pytest.mark.parametrize("config", [GLM, DEEPSEEK], ids=["glm", "deepseek"])
@pytest.mark.parametrize("to", ["torch_dist", "torch"])
def test_B27_mtp_layers_that_only_the_config_has_are_noted(
    config: dict[str, Any], to: str, tmp_path: Path
) -> None:
    """transformers saves no MTP layers, and leaves `num_nextn_predict_layers` in the config."""
    config = small(config, num_nextn_predict_layers=1)
    src = write_small_hf(tmp_path / "hf", config, content_of(config, mtp=False))
    note = "the config says 1 MTP layers, but there is no tensor of them: converted without"
    report = convtools.convert(src, tmp_path / "m", options(to))
    back = convtools.convert(tmp_path / "m", tmp_path / "back", options("hf"))
    other = convtools.convert(tmp_path / "m", tmp_path / "other", options("hf", hf_config=src))
    for notes in (report.notes, back.notes, other.notes):
        assert note in notes
    assert differences(read_hf(src), read_hf(tmp_path / "back")) == []
    assert (tmp_path / "back/config.json").read_bytes() == (src / "config.json").read_bytes()


def test_B27_an_mtp_layer_of_which_a_part_is_missing_is_refused(tmp_path: Path) -> None:
    config = small(GLM, num_nextn_predict_layers=1)
    content = content_of(config)
    for name in [n for n in content if n.startswith("model.layers.3.") and "experts" not in n]:
        src = write_small_hf(tmp_path / "hf", config, {n: v for n, v in content.items() if n != name})
        with pytest.raises(AccountingError, match=f"missing: `{name}`"):
            convtools.convert(src, tmp_path / "m", options("torch_dist"))


@pytest.mark.parametrize("config", [GLM, DEEPSEEK], ids=["glm", "deepseek"])
def test_mtp_keys_under_the_modules_newer_name_are_read_too(config: dict[str, Any], tmp_path: Path) -> None:
    config = small(config, num_nextn_predict_layers=2)
    src = write_small_hf(tmp_path / "hf", config, content_of(config))
    convtools.convert(src, tmp_path / "m", options("torch_dist", ep=3))
    folder = tmp_path / "m/iter_0000001"
    keys, objects = read_dist(folder)
    renamed = {n.replace(".transformer_layer.", ".mtp_model_layer."): v for n, v in keys.items()}
    assert sum(".mtp_model_layer." in n for n in renamed) > 20
    write_dist(folder, renamed, objects)
    convtools.convert(tmp_path / "m", tmp_path / "back", options("hf"))
    assert differences(read_hf(src), read_hf(tmp_path / "back")) == []


PHANTOMS = {
    "deepseek without a narrow query": (small(DEEPSEEK, q_lora_rank=None), "q_layernorm", (20,)),
    "deepseek beside the fused norm": (small(DEEPSEEK), "q_layernorm", (7,)),
    "glm without norms": (small(GLM, use_qk_norm=False), "q_layernorm", (3,)),
    "qwen2 moe": (small(QWEN2_MOE, mlp_only_layers=[]), "k_layernorm", (3,)),
}


@pytest.mark.parametrize("case", PHANTOMS)
@pytest.mark.parametrize("value", [b"\x80\x3f", b"\x11\x3f"], ids=["ones", "trained"])
def test_B29_a_norm_that_hugging_face_lacks_is_refused_by_name(
    case: str, value: bytes, tmp_path: Path
) -> None:
    config, norm, shape = PHANTOMS[case]
    src = write_small_hf(tmp_path / "hf", config, content_of(config))
    convtools.convert(src, tmp_path / "m", options("torch_dist"))
    folder = tmp_path / "m/iter_0000001"
    keys, objects = read_dist(folder)
    phantom = f"decoder.layers.1.self_attention.{norm}.weight"
    write_dist(folder, keys | {phantom: ("BF16", shape, value * shape[0])}, objects)
    with pytest.raises(AccountingError, match=f"not in this model: `{phantom}`"):
        convtools.convert(tmp_path / "m", tmp_path / "back", options("hf"))
