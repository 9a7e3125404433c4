"""What once converted silently and computed something else in Megatron; each a test of its whole kind."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

import convtools
from convtools.conversion.megatron_config import hf_side
from convtools.errors import AccountingError, ConfigError, ConvtoolsError
from convtools.families import registry
from tests.convert.small import filled, write_small_hf
from tests.families.test_every_family import content_of
from tests.families.tiny_configs import TINY, described, inventory

GPTS = [a for a in TINY if a not in ("Mamba2ForCausalLM", "NemotronHForCausalLM")]
ROPE = [a for a in GPTS if a not in ("GptOssForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")]
MLA = ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"]
SIGMOID = ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"]


def args_of(architecture: str, **changes: Any) -> dict[str, Any]:
    return described(architecture, changes, {}).megatron_args()


def noted(architecture: str, text: str, **changes: Any) -> None:
    """The weights are converted, and the report says what Megatron computes otherwise."""
    model = described(architecture, changes, {})
    assert model.megatron_args()["num_layers"] > 0
    assert any(text in note for note in model.notes())
    assert not any(text in note for note in described(architecture, {}, {}).notes())


def refused(architecture: str, message: str, **changes: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        args_of(architecture, **changes)


@pytest.mark.parametrize("architecture", GPTS)
def test_an_activation_that_swiglu_has_not(architecture: str) -> None:
    refused(architecture, "`hidden_act` is 'gelu'", hidden_act="gelu")


@pytest.mark.parametrize("spelled", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("architecture", ROPE)
def test_rope_scaling_was_dropped(architecture: str, spelled: str) -> None:
    """v4 and v5; what Megatron has a word for is said, everything else is refused."""

    def told(**rope: Any) -> dict[str, Any]:
        base = {"rope_theta": 1e4} if spelled == "rope_parameters" else {}
        return args_of(architecture, **{spelled: base | rope})

    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    args = told(rope_type="llama3", factor=32.0, **llama3)
    assert (args["use_rope_scaling"], args["rope_scaling_factor"]) == (True, 32.0)
    assert told(type="linear", factor=4.0)["rotary_seq_len_interpolation_factor"] == 4
    args = told(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
    assert {k: v for k, v in args.items() if k.startswith("yarn_")} == {
        "yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 16,
        "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_correction_range_round_to_int": True,
        "yarn_mscale": None, "yarn_mscale_all_dim": None,
    }  # fmt: skip
    assert args["position_embedding_type"] == "yarn"
    for rope in (
        {"rope_type": "llama3", "factor": 8.0, **llama3, "original_max_position_embeddings": 4096},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "factor": 2.0},
        {"rope_type": "linear", "factor": 1.5},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.1},
        {"rope_type": "yarn"},
        {"rope_type": []},
        {"rope_type": "default", "llama_4_scaling_beta": 0.1},
    ):
        with pytest.raises(ConfigError, match="Megatron cannot compute this model"):
            told(**rope)


@pytest.mark.parametrize("architecture", MLA)
def test_megatrons_own_yarn_numbers_stood_in_for_missing_ones(architecture: str) -> None:
    """Its defaults are one model's, differ between versions, and scale the softmax of a plain rope too."""
    plain = args_of(architecture)
    assert [plain[k] for k in ("rope_type", "rotary_scaling_factor", "mscale_all_dim")] == ["rope", 1.0, 0.0]
    yarn = args_of(architecture, rope_scaling={"type": "yarn", "factor": 4.0})
    names = "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim"
    assert [yarn[k] for k in names.split()] == [4.0, 64, 32, 1, 1.0, 0.0]
    for rope in (
        {"type": "linear", "factor": 2.0},
        {"type": "yarn"},
        {"type": "yarn", "factor": 2, "truncate": 0},
    ):
        refused(architecture, "Megatron cannot compute", rope_scaling=rope)
    refused(architecture, "rope_interleave", rope_interleave=False)
    assert (yarn["attention_dropout"], yarn["hidden_dropout"]) == (0.0, 0.0)  # Megatron's default is 0.1


def test_mistrals_sliding_window_was_dropped() -> None:
    for architecture in ("MistralForCausalLM", "MixtralForCausalLM"):
        assert args_of(architecture, sliding_window=4096)["window_size"] == [4095, 0]
        assert "window_size" not in args_of(architecture, sliding_window=None)
    assert args_of("MistralForCausalLM")["window_size"] == [4095, 0]  # as transformers, where it is silent
    assert "window_size" not in args_of("LlamaForCausalLM", sliding_window=4096)  # which does not look at it


@pytest.mark.parametrize("architecture", [a for a in TINY if a.startswith(("Qwen2", "Qwen3F", "Qwen3M"))])
def test_qwens_sliding_window_was_dropped(architecture: str) -> None:
    refused(architecture, "use_sliding_window", use_sliding_window=True, sliding_window=32)
    assert args_of(architecture, use_sliding_window=False, sliding_window=32)["num_layers"] == 4


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}),
        ("LlamaForCausalLM", {"mlp_bias": True}),
        ("Qwen3ForCausalLM", {"attention_bias": True}),
        ("Qwen3MoeForCausalLM", {"attention_bias": True}),
    ],
    ids=str,
)
def test_a_bias_that_megatrons_module_has_not(architecture: str, changes: Any, tmp_path: Path) -> None:
    """It has one on `linear_proj` only where all have; loading `torch_dist` passes over what is too many."""
    model = described(architecture, changes, {})
    src = write_small_hf(tmp_path / "hf", dict(model.config), filled(inventory(model)))
    for to in ("torch_dist", "torch"):
        with pytest.raises(ConfigError, match="biases on"):
            convtools.convert(src, tmp_path / to, convtools.Options(to=to))
        assert not (tmp_path / to).exists()
    convtools.convert(src, tmp_path / "copy", convtools.Options(to="hf"))


@pytest.mark.parametrize("architecture", SIGMOID)
def test_sigmoid_routing_that_megatron_does_not_compute(architecture: str) -> None:
    noted(architecture, "norm_topk_prob", norm_topk_prob=False)
    noted(architecture, "norm_topk_prob", norm_topk_prob=True, num_experts_per_tok=1, n_group=1)
    refused(architecture, "scoring_func", scoring_func="softmax")
    noted(architecture, "best 2 experts", n_group=3, topk_group=1, num_experts_per_tok=3)
    args = args_of(architecture, n_group=3, topk_group=2, num_experts_per_tok=4)
    assert (args["moe_router_num_groups"], args["moe_router_group_topk"]) == (3, 2)


def test_groups_of_deepseek_v2_were_dropped() -> None:
    model = described(
        "DeepseekV2ForCausalLM",
        {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "num_experts_per_tok": 4},
        {},
    )
    args = model.megatron_args()
    assert (args["moe_router_num_groups"], args["moe_router_group_topk"]) == (3, 2)
    assert "the routing can differ" in model.notes()[0]
    greedy = described("DeepseekV2ForCausalLM", {"n_group": 3, "topk_group": 2}, {})
    assert (greedy.megatron_args()["moe_router_num_groups"], greedy.notes()) == (None, ())


@pytest.mark.parametrize("architecture", GPTS)
def test_a_silent_epsilon_is_transformers_and_not_megatrons(architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    own = transformers.AutoConfig.for_model(TINY[architecture].config["model_type"]).rms_norm_eps
    assert args_of(architecture)["norm_epsilon"] == own
    assert args_of(architecture, rms_norm_eps=3e-6)["layernorm_epsilon"] == 3e-6


DEEP: list[Any] = []
for _ in range(300):
    DEEP = [DEEP]
STRANGE = ["x", -1, float("nan"), float("inf"), 10**400, DEEP, [1], {"a": 1}, True, "x" * 10**5]
FIELDS = (
    "max_position_embeddings", "rope_theta", "num_experts_per_tok", "rms_norm_eps", "attention_dropout",
    "initializer_range", "routed_scaling_factor", "router_aux_loss_coef", "swiglu_limit", "chunk_size",
    "partial_rotary_factor", "attention_bias", "tie_word_embeddings", "n_group", "topk_group",
)  # fmt: skip


@pytest.mark.parametrize("architecture", TINY)
def test_strange_values_reached_megatrons_args(architecture: str, tmp_path: Path) -> None:
    """As text, NaN or a number for floats; a deep list or a huge number was a traceback."""
    model = described(architecture, {}, {})
    src = write_small_hf(tmp_path / "hf", dict(model.config), content_of(model, "BF16", 1))
    plain = model.megatron_args()
    for field in FIELDS:
        for value in STRANGE:
            (src / "config.json").write_text(json.dumps(model.config | {field: value}))
            try:
                args = convtools.open_source(src).model.megatron_args()
            except ConvtoolsError as error:
                assert len(str(error)) < 1500  # the value is not printed whole
                continue
            kinds = {k: type(v) for k, v in args.items() if v is not None and plain[k] is not None}
            assert kinds.items() <= {k: type(v) for k, v in plain.items()}.items(), field


@pytest.mark.parametrize("architecture", TINY)
def test_a_note_made_an_untied_head_from_the_embedding(architecture: str, tmp_path: Path) -> None:
    model = described(architecture, {"tie_word_embeddings": False}, {})
    src = write_small_hf(tmp_path / "hf", dict(model.config), content_of(model, "BF16", 1))
    convtools.convert(src, tmp_path / "m", convtools.Options(to="torch_dist"))
    note = tmp_path / "m/iter_0000001/hf/.convtools.json"
    text = json.loads(note.read_text())
    text["spelling"]["head"] = True
    note.write_text(json.dumps(text))
    with pytest.raises(AccountingError, match="whose head is not tied"):
        convtools.convert(tmp_path / "m", tmp_path / "back", convtools.Options(to="hf"))
    assert not (tmp_path / "back").exists()


SPECIAL = [
    {"apply_layernorm_1p": True}, {"layernorm_zero_centered_gamma": True}, {"attention_output_gate": True},
    {"softmax_type": "learnable"}, {"glu_linear_offset": 1.0}, {"activation_func_clamp_value": 7.0},
    {"rotary_seq_len_interpolation_factor": 4}, {"window_size": [127, 0]}, {"no_rope_freq": 4},
    {"apply_residual_connection_post_layernorm": True}, {"qk_l2_norm": True},
]  # fmt: skip


@pytest.mark.parametrize("special", SPECIAL, ids=str)
@pytest.mark.parametrize("architecture", [*ROPE, "DeepseekV3ForCausalLM"])
def test_args_of_another_model_gave_a_config(architecture: str, special: dict[str, Any]) -> None:
    """A norm centred on zero, say, became that of a Llama, with every weight off by one."""
    if architecture.startswith(("Qwen3N", "Qwen3_5")) and special.keys() & {
        "apply_layernorm_1p", "layernorm_zero_centered_gamma", "attention_output_gate",
    }:  # fmt: skip
        return  # which are so
    args = args_of(architecture, sliding_window=None) | {"bf16": True} | special
    derived = (registry.load_family(name).hf_config(args, {}) for name in registry.families())
    assert all(missing for _, missing in derived)


@pytest.mark.parametrize("routing", [
    {"moe_router_score_function": "sigmoid"}, {"moe_router_topk_scaling_factor": 2.5},
    {"moe_router_num_groups": 2, "moe_router_group_topk": 1}, {"moe_latent_size": 4},
], ids=str)  # fmt: skip
@pytest.mark.parametrize(
    "architecture",
    ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"],
)
def test_args_of_another_routing_gave_a_config(architecture: str, routing: dict[str, Any]) -> None:
    args = args_of(architecture, sliding_window=None) | {"bf16": True} | routing
    derived = (registry.load_family(name).hf_config(args, {}) for name in registry.families())
    assert all(missing for _, missing in derived)


def test_biases_of_a_hybrid_model_were_not_in_its_args() -> None:
    """Megatron gives every linear layer of attention and feed-forward a bias, or none."""
    name, both = "NemotronHForCausalLM", {"attention_bias": True, "mlp_bias": True}
    no_experts = {"layers_block_type": ["mamba", "attention", "mlp"]}
    assert args_of(name, **no_experts, **both)["add_bias_linear"] is True
    assert args_of(name, layers_block_type=["mamba", "mlp"], mlp_bias=True)["add_bias_linear"] is True
    assert args_of(name)["add_bias_linear"] is False
    refused(name, "`attention_bias` and `mlp_bias` differ", **no_experts, mlp_bias=True)
    refused(name, "`attention_bias` and `mlp_bias` differ", attention_bias=True)  # experts have none
    refused(name, "mlp_hidden_act", mlp_hidden_act="silu")
    noted(name, "norm_topk_prob", norm_topk_prob=False)


@pytest.mark.parametrize("architecture", ["NemotronHForCausalLM", "Mamba2ForCausalLM"])
@pytest.mark.parametrize("flag", ["apply_layernorm_1p", "layernorm_zero_centered_gamma"])
def test_centred_norms_of_a_hybrid_model_gave_a_config(architecture: str, flag: str) -> None:
    family = registry.find_family({"architectures": [architecture]})
    args = args_of(architecture) | {"bf16": True}
    more = set(family.hf_config(args | {flag: True}, {})[1]) - set(family.hf_config(args, {})[1])
    assert len(more) == 1


@pytest.mark.parametrize("name", ["moe_shared_expert_intermediate_size", "mtp_num_layers", "num_layers"])
@pytest.mark.parametrize("architecture", TINY)
def test_strange_args_were_a_traceback(architecture: str, name: str) -> None:
    for value in STRANGE:
        with pytest.raises(ConfigError, match="cannot be derived") as raised:
            hf_side(Path("/nowhere"), None, args_of(architecture, sliding_window=None) | {name: value}, {})
            raise ConfigError("cannot be derived: the value does not matter here")
        assert len(str(raised.value)) < 12_000


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Mamba2ForCausalLM"])
def test_a_config_of_many_layers_was_compared_for_minutes(architecture: str, tmp_path: Path) -> None:
    """Every missing name was compared with every other one, for an error that shows 20 of them."""
    model = described(architecture, {}, {})
    content = content_of(model, "BF16", 1)
    content |= {f"model.layers.0.other.{i}": ("BF16", (1,), b"\0\0") for i in range(200)}
    src = write_small_hf(tmp_path / "hf", model.config | {"num_hidden_layers": 9_000}, content)
    began = time.process_time()
    with pytest.raises(AccountingError, match=r"and .* more"):
        convtools.open_source(src)
    assert time.process_time() - began < 20


def test_qwen3_5_norms_the_routers_weights_whatever_its_config_says() -> None:
    moe = ("Qwen3NextForCausalLM", "Qwen3MoeForCausalLM", "Qwen3_5MoeForCausalLM")
    found = {a: args_of(a, norm_topk_prob=False)["moe_router_pre_softmax"] for a in moe}
    assert found.pop("Qwen3_5MoeForCausalLM") is False
    assert [found[a] for a in ("Qwen3NextForCausalLM", "Qwen3MoeForCausalLM")] == [True, True]
