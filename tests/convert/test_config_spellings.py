"""One model, many configs: spellings of one thing convert alike, and config.json finds its way back."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import convtools
from convtools.errors import CheckpointError, ConfigError
from convtools.families import nemotron_h
from tests.convert.small import filled, read_dist, write_small_hf
from tests.nemotron_checkpoints import TINY, inventory
from tests.tensors import differences, read_hf, read_rank

CONFIG: dict[str, Any] = TINY | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
CONTENT = filled(inventory(CONFIG))
ABSENT = object()


def options(to: str, **more: Any) -> convtools.Options:
    return convtools.Options(to=to, fsync=False, workers=1, **more)


def changed(**changes: Any) -> dict[str, Any]:
    """CONFIG with fields changed, or taken out."""
    return {k: v for k, v in (CONFIG | changes).items() if v is not ABSENT}


WORDS = ["mamba", "moe", "attention", "mlp"]
NEWER = ["linear_attention", "moe", "full_attention", "mlp"]
SAME: dict[str, dict[str, Any]] = {
    "words": changed(hybrid_override_pattern=ABSENT, layers_block_type=WORDS),
    "newer words": changed(hybrid_override_pattern=ABSENT, layer_types=NEWER),
    "words and pattern": changed(layers_block_type=WORDS, layer_types=NEWER),
    "no number of layers": changed(num_hidden_layers=ABSENT),
    "pattern with bars": changed(hybrid_override_pattern="ME|*-"),
    "MTP words": changed(mtp_hybrid_override_pattern=ABSENT, mtp_layers_block_type=["attention", "moe"]),
    "attention_head_dim": changed(head_dim=ABSENT, attention_head_dim=6),
    "both head dims": changed(attention_head_dim=6),
    "absent optionals": changed(tie_word_embeddings=ABSENT, conv_kernel=ABSENT),
    "null optionals": changed(tie_word_embeddings=None, use_conv_bias=None, mtp_use_repeated_layer=None),
    "one shared expert": changed(n_shared_experts=1),
    "biases spelled out": changed(
        use_bias=False, mamba_proj_bias=False, mlp_bias=False, attention_bias=False
    ),
    "repeated, of one": changed(mtp_use_repeated_layer=True),
    "model_type alone": changed(architectures=ABSENT),
}


def converted(root: Path, config: dict[str, Any]) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """(every rank's tensors, every torch_dist key, Megatron's args) of CONTENT under a config."""
    src = write_small_hf(root / "src", config, CONTENT)
    convtools.convert(src, root / "torch", options("torch", tp=2))
    convtools.convert(src, root / "dist", options("torch_dist", tp=2))
    paths = sorted(root.glob("torch/iter_*/mp_rank_*/model_optim_rng.pt"))
    read = [read_rank(p) for p in paths]
    return [r[1] for r in read], read_dist(root / "dist/iter_0000001")[0], vars(read[0][0]["args"])


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    return converted(tmp_path_factory.mktemp("usual"), CONFIG)


@pytest.mark.parametrize("config", SAME.values(), ids=list(SAME))
def test_spellings_convert_alike(config: dict[str, Any], usual: Any, tmp_path: Path) -> None:
    ranks, keys, args = converted(tmp_path, config)
    assert (ranks, keys) == usual[:2]
    told = {"mtp_use_repeated_layer"}  # one depth, repeated or not: the same tensors
    assert {k: v for k, v in args.items() if k not in told} == {
        k: v for k, v in usual[2].items() if k not in told
    }


def test_args_say_what_the_tensors_are_where_the_config_is_silent(tmp_path: Path) -> None:
    """head_dim has a default of 128, and no shared experts means no size of theirs."""
    config = changed(head_dim=ABSENT, n_shared_experts=0)
    src = write_small_hf(tmp_path / "src", config, filled(inventory(
        config | {"head_dim": 128, "moe_shared_expert_intermediate_size": 0})))  # fmt: skip
    convtools.convert(src, tmp_path / "torch", options("torch"))
    args = read_rank(tmp_path / "torch/iter_0000001/mp_rank_00/model_optim_rng.pt")[0]["args"]
    assert args.kv_channels == 128
    assert args.moe_shared_expert_intermediate_size is None
    shutil.rmtree(tmp_path / "torch/iter_0000001/hf")
    convtools.convert(tmp_path / "torch", tmp_path / "back", options("hf"))
    assert differences(read_hf(src), read_hf(tmp_path / "back")) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mtp_use_repeated_layer": "no"}, "`mtp_use_repeated_layer` is 'no', expected true or false"),
        ({"mtp_use_repeated_layer": 1}, "`mtp_use_repeated_layer` is 1, expected true or false"),
        ({"n_routed_experts": 65_537}, "`n_routed_experts` is 65537, expected .* at most 65536"),
        ({"num_nextn_predict_layers": 65}, "`num_nextn_predict_layers` is 65, expected .* at most 64"),
        ({"hybrid_override_pattern": "M" * 10_001, "num_hidden_layers": None}, "10001 layers, .* most 10000"),
        (
            {"hybrid_override_pattern": "E" * 9000, "num_hidden_layers": 9000, "n_routed_experts": 60_000},
            "over .* tensors, expected at most 1000000",
        ),
        ({"num_nextn_predict_layers": 64, "mtp_hybrid_override_pattern": "M" * 10_000}, "over .* tensors"),
        ({"mlp_bias": True}, "`mlp_bias` is true in a model with MoE layers"),
        ({"hybrid_override_pattern": "M-*-", "mlp_bias": True}, "true in a model with MoE"),  # MTP
    ],
)  # fmt: skip
def test_configs_that_cannot_be(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    src = write_small_hf(tmp_path / "src", changed(**changes), CONTENT)
    with pytest.raises(ConfigError, match=said):
        convtools.convert(src, tmp_path / "dst", options("torch_dist"))
    assert not (tmp_path / "dst").exists()


def test_mlp_bias_without_experts_is_converted(tmp_path: Path) -> None:
    config = TINY | {"hybrid_override_pattern": "M-", "num_hidden_layers": 2, "mlp_bias": True}
    at = "backbone.layers.1.mixer."
    biases = {f"{at}up_proj.bias": ("BF16", (28,)), f"{at}down_proj.bias": ("BF16", (16,))}
    src = write_small_hf(tmp_path / "src", config, filled(inventory(config) | biases))
    convtools.convert(src, tmp_path / "there", options("torch", tp=2))
    convtools.convert(tmp_path / "there", tmp_path / "back", options("hf"))
    assert differences(read_hf(src), read_hf(tmp_path / "back")) == []


def test_absent_and_null_leave_the_depth_to_the_names() -> None:
    for config in (changed(mtp_use_repeated_layer=None), changed()):
        assert nemotron_h.parse(config).mtp_repeated is None
    assert nemotron_h.parse(changed(mtp_use_repeated_layer=False)).mtp_repeated is False


# --- back to Hugging Face: where config.json comes from --------------------------------------------


@pytest.fixture(params=["torch_dist", "torch"])
def megatron(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The iteration's folder of a Megatron checkpoint of CONTENT, the kept Hugging Face side included."""
    src = write_small_hf(tmp_path / "src", CONFIG, CONTENT)
    (src / "tokenizer.json").write_bytes(b"{}")
    convtools.convert(src, tmp_path / "m", options(request.param, tp=2))
    return tmp_path / "m/iter_0000001"


def back(megatron: Path, **more: Any) -> tuple[convtools.Report, Path]:
    dst = megatron.parents[1] / "back"
    report = convtools.convert(megatron.parent, dst, options("hf", **more))
    assert differences(CONTENT, read_hf(dst)) == []
    return report, dst


def test_from_the_kept_folder(megatron: Path) -> None:
    report, dst = back(megatron)
    assert "iter_0000001/hf" in report.notes[0]
    assert (dst / "config.json").read_bytes() == (megatron / "hf/config.json").read_bytes()
    assert sorted(p.name for p in dst.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("point", [lambda p: p, lambda p: p / "config.json"], ids=["folder", "file"])
def test_from_a_folder_that_is_named(megatron: Path, point: Callable[[Path], Path]) -> None:
    """`--hf-config` goes before what is kept, and brings its own tokenizer."""
    other = megatron.parents[1] / "other"
    other.mkdir()
    text = json.dumps(CONFIG | {"marker": 7}, indent=3)
    (other / "config.json").write_text(text)
    (other / "chat_template.jinja").write_text("{{ x }}")
    _, dst = back(megatron, hf_config=point(other))
    assert (dst / "config.json").read_text() == text
    assert sorted(p.name for p in dst.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
    ]


def test_a_config_of_another_model_is_refused(megatron: Path) -> None:
    other = megatron.parents[1] / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(CONFIG | {"moe_intermediate_size": 24}))
    with pytest.raises(convtools.ConvtoolsError, match=r"mlp\.experts\..*linear_fc1"):
        back(megatron, hf_config=other)


def test_derived_from_megatrons_args(megatron: Path) -> None:
    shutil.rmtree(megatron / "hf")
    report, dst = back(megatron)
    assert report.notes == ("config.json: derived from Megatron's args",)
    derived = json.loads((dst / "config.json").read_text())
    assert {k: derived[k] for k in CONFIG} == CONFIG
    assert nemotron_h.parse(derived) == nemotron_h.parse(CONFIG)


BRIDGE = """\
checkpoint:
  _target_: megatron.bridge.training.config.CheckpointConfig
  save: somewhere
model:
  _target_: megatron.bridge.models.nemotronh.nemotron_h_provider.NemotronHModelProvider
  activation_func:
    _call_: false
    _target_: megatron.core.activations.squared_relu
  attention_backend: &id001 !!python/object/apply:megatron.core.transformer.enums.AttnBackend
  - 5
  again: *id001
  params_dtype:
    _call_: false
    _target_: torch.bfloat16
  canary: !!python/object/apply:os.system ["touch CANARY"]
  canary_too: !!python/object/new:subprocess.Popen [["touch", "CANARY"]]
  canary_name: !!python/name:os.system ''
  hybrid_override_pattern: ME*-
  num_layers: 4
  hidden_size: 16
  num_attention_heads: 4
  num_query_groups: 2
  kv_channels: 6
  ffn_hidden_size: 28
  mamba_num_heads: 4
  mamba_head_dim: 3
  mamba_num_groups: 2
  mamba_state_dim: 5
  num_moe_experts: 4
  moe_ffn_hidden_size: 12
  moe_shared_expert_intermediate_size: 20
  moe_latent_size: 8
  moe_router_topk: 2
  moe_router_topk_scaling_factor: 2.5
  mtp_num_layers: 1
  mtp_hybrid_override_pattern: '*E'
  share_embeddings_and_output_weights: false
  layernorm_epsilon: 1.0e-05
  seq_length: 64
  make_vocab_size_divisible_by: 128
  vocab_size: 23
tokenizer:
  _target_: megatron.bridge.training.tokenizers.config.TokenizerConfig
"""


def bridge(megatron: Path, text: str) -> Path:
    """Leave of the checkpoint what Megatron-Bridge would have written: run_config.yaml, no kept side."""
    shutil.rmtree(megatron / "hf")
    (megatron / "run_config.yaml").write_text(text)
    return megatron


def test_from_megatron_bridges_run_config(megatron: Path) -> None:
    """Whatever Python objects it names, none is made."""
    canary = megatron / "canary"
    report, dst = back(bridge(megatron, BRIDGE.replace("CANARY", str(canary))))
    assert not canary.exists()
    assert report.notes == ("config.json: derived from run_config.yaml",)
    derived = json.loads((dst / "config.json").read_text())
    assert nemotron_h.parse(derived) == nemotron_h.parse(CONFIG)
    assert derived["torch_dtype"] == "bfloat16"
    assert (derived["num_experts_per_tok"], derived["routed_scaling_factor"]) == (2, 2.5)


def test_what_cannot_be_derived_is_listed(megatron: Path) -> None:
    text = BRIDGE.replace("vocab_size: 23", "vocab_size: null").replace("  kv_channels: 6\n", "")
    with pytest.raises(ConfigError) as caught:
        back(bridge(megatron, text))
    assert "config.json cannot be derived from run_config.yaml" in str(caught.value)
    assert "nemotron_h: vocab_size, head_dim" in str(caught.value)
    assert "--hf-config" in str(caught.value)
    assert not (megatron.parents[1] / "back").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "is not a mapping"),
        ("a: [", "cannot be read"),
        ("model: 3", "has no `model` section"),
        ("model: !odd {a: 1}", "cannot be read"),
        ("{}", "has no `model` section"),
    ],
)
def test_a_damaged_run_config(megatron: Path, text: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        back(bridge(megatron, text))
