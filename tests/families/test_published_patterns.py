"""The published Nemotron-3 patterns in every spelling, and the tables of random models."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from convtools.errors import AccountingError, ConfigError, MappingError
from convtools.families import nemotron_h
from convtools.families.nemotron_h import Spec, Spelling
from convtools.families.registry import find_family
from convtools.families.table import Table
from tests.oracle_cases import layouts
from tests.tensors import read_safetensors

ORACLE = Path(__file__).parents[2] / "fixtures/oracle"

PUBLISHED = {
    "Ultra 550B-A55B": (
        "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        {"M": 48, "E": 48, "*": 12, "-": 0},
        [7, 14, 23, 32, 39, 48, 57, 64, 73, 82, 89, 98],
    ),
    "Super 120B-A12B": (
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        {"M": 40, "E": 40, "*": 8, "-": 0},
        [7, 16, 25, 36, 47, 58, 69, 78],
    ),
    "Nano 4B": (
        "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
        {"M": 21, "E": 0, "*": 4, "-": 17},
        [12, 17, 24, 32],
    ),
}
NVIDIA = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
TRANSFORMERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}

SIZES: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "hidden_size": 8192,
    "vocab_size": 131072,
    "num_attention_heads": 64,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 256,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "n_group": 1,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "intermediate_size": 21504,
    "n_routed_experts": 512,
    "moe_intermediate_size": 5120,
    "moe_shared_expert_intermediate_size": 10240,
    "moe_latent_size": 2048,
    "num_nextn_predict_layers": 1,
}
MTP = {"mtp_hybrid_override_pattern": "*E"}

SPELLINGS = {
    "pattern string": lambda p: {"hybrid_override_pattern": p} | MTP,
    "pattern string with pipeline marks": lambda p: {"hybrid_override_pattern": f"{p[:8]}|{p[8:]}"} | MTP,
    "layers_block_type, NVIDIA's words": lambda p: {
        "layers_block_type": [NVIDIA[x] for x in p],
        "mtp_layers_block_type": ["attention", "moe"],
    },
    "layers_block_type, transformers' words": lambda p: {
        "layers_block_type": [TRANSFORMERS[x] for x in p],
        "mtp_layers_block_type": ["full_attention", "moe"],
    },
    "layer_types": lambda p: {
        "layer_types": [TRANSFORMERS[x] for x in p],
        "mtp_layers_block_type": ["full_attention", "moe"],
    },
    "both, in agreement": lambda p: {
        "hybrid_override_pattern": p,
        "layers_block_type": [NVIDIA[x] for x in p],
        "num_hidden_layers": len(p),
        "mtp_layers_block_type": ["attention", "moe"],
    } | MTP,
    "nulls where another is absent": lambda p: {
        "hybrid_override_pattern": None,
        "layers_block_type": [NVIDIA[x] for x in p],
        "num_hidden_layers": None,
        "mtp_layers_block_type": None,
    } | MTP,
}  # fmt: skip


def config(pattern: str = "ME*-", **changes: Any) -> dict[str, Any]:
    """A config with some fields changed, and those that are changed to `...` left out."""
    merged = SIZES | {"hybrid_override_pattern": pattern} | MTP | changes
    return {name: value for name, value in merged.items() if value is not ...}


# --- the published patterns ------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_spelling_of_a_published_pattern_is_the_same_model(name: str, spelling: str) -> None:
    pattern, counts, attention = PUBLISHED[name]
    spec = nemotron_h.parse(SIZES | SPELLINGS[spelling](pattern))
    assert spec == nemotron_h.parse(config(pattern))
    assert spec.pattern == pattern
    assert spec.num_layers == len(pattern) == sum(counts.values())
    assert {kind: spec.pattern.count(kind) for kind in "ME*-"} == counts
    assert [i for i, kind in enumerate(spec.pattern) if kind == "*"] == attention
    assert (spec.mtp_pattern, spec.mtp_depth, spec.text) == ("*E", 1, pattern + "/*E")


@pytest.mark.parametrize("field", ["head_dim", "attention_head_dim"])
def test_both_names_of_the_head_size(field: str) -> None:
    assert nemotron_h.parse(config(head_dim=...) | {field: 96}).head_dim == 96


def test_absent_optionals_have_the_published_defaults() -> None:
    spec = nemotron_h.parse(
        config(
            head_dim=..., conv_kernel=..., moe_latent_size=..., moe_shared_expert_intermediate_size=...,
            num_nextn_predict_layers=..., mtp_hybrid_override_pattern=...,
        )
    )  # fmt: skip
    assert (spec.head_dim, spec.conv_kernel, spec.latent, spec.shared_ffn) == (128, 4, 0, 0)
    assert (spec.mtp_pattern, spec.mtp_depth, spec.mtp_repeated, spec.text) == ("", 0, None, "ME*-")
    assert (spec.tied, spec.attention_bias, spec.mlp_bias, spec.conv_bias) == (False, False, False, True)


@pytest.mark.parametrize("nothing", [..., None])
def test_null_is_absent(nothing: object) -> None:
    changes = {
        "moe_latent_size": nothing,
        "num_nextn_predict_layers": nothing,
        "tie_word_embeddings": nothing,
    }
    spec = nemotron_h.parse(config(**changes))
    assert (spec.latent, spec.mtp_depth, spec.tied) == (0, 0, False)


def test_no_shared_experts() -> None:
    assert nemotron_h.parse(config(n_shared_experts=0)).shared_ffn == 0
    assert nemotron_h.parse(config(n_shared_experts=1)).shared_ffn == 10240


def test_sizes_of_absent_kinds_are_not_asked_for() -> None:
    spec = nemotron_h.parse(
        {"hybrid_override_pattern": "-", "hidden_size": 8, "vocab_size": 9, "intermediate_size": 7}
    )
    assert (spec.heads, spec.groups, spec.head_dim, spec.mamba_heads, spec.experts) == (0, 0, 0, 0, 0)
    with_mtp = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*"}
    with pytest.raises(ConfigError, match="`num_attention_heads` is missing"):
        nemotron_h.parse(
            {"hybrid_override_pattern": "-", "hidden_size": 8, "vocab_size": 9, "intermediate_size": 7}
            | with_mtp
        )


def test_n_groups_of_mamba_is_not_n_group_of_the_router() -> None:
    assert nemotron_h.parse(config(n_groups=8, n_group=2)).mamba_groups == 8


# --- what is refused -------------------------------------------------------------------------------


def refusal(given_: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        nemotron_h.parse(given_)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (
            {"layers_block_type": ["mamba"] * 4},
            ["hybrid_override_pattern says ME*-", "layers_block_type says MMMM"],
        ),
        ({"layer_types": ["moe"]}, ["hybrid_override_pattern says ME*-", "layer_types says E"]),
        (
            {"mtp_layers_block_type": ["moe", "attention"]},
            ["mtp_hybrid_override_pattern says *E", "mtp_layers_block_type says E*"],
        ),
        ({"attention_head_dim": 64}, ["head_dim=128", "attention_head_dim=64"]),
        ({"num_hidden_layers": 5}, ["`num_hidden_layers` is 5", "the pattern has 4 layers"]),
        ({"num_key_value_heads": 5}, ["num_attention_heads=64", "num_key_value_heads=5"]),
        ({"n_groups": 7}, ["mamba_num_heads=256", "n_groups=7"]),
    ],
)
def test_contradictions_are_refused_naming_both(changes: dict[str, Any], names: list[str]) -> None:
    message = refusal(config(**changes))
    assert [name for name in names if name not in message] == []


@pytest.mark.parametrize(
    ("changes", "strange"),
    [
        ({"hybrid_override_pattern": "MEG*+"}, "`hybrid_override_pattern` holds '+, G'"),
        ({"hybrid_override_pattern": "ME/*E"}, "`hybrid_override_pattern` holds '/'"),
        ({"hybrid_override_pattern": "me"}, "`hybrid_override_pattern` holds 'e, m'"),
        ({"hybrid_override_pattern": ""}, "`hybrid_override_pattern` holds ''"),
        (
            {"hybrid_override_pattern": ..., "layers_block_type": ["mamba", "sliding_attention"]},
            "`layers_block_type` holds 'sliding_attention'",
        ),
        ({"hybrid_override_pattern": ..., "layers_block_type": "mamba"}, "`layers_block_type` holds 'mamba'"),
        ({"hybrid_override_pattern": ..., "layers_block_type": []}, "`layers_block_type` holds []"),
        ({"hybrid_override_pattern": ..., "layer_types": [{}, None, 3]}, "`layer_types` holds '3, None, {}'"),
        ({"mtp_hybrid_override_pattern": "*E?"}, "`mtp_hybrid_override_pattern` holds '?'"),
        (
            {"hybrid_override_pattern": ...},
            "`hybrid_override_pattern` is missing (also as layers_block_type, layer_types)",
        ),
        (
            {"mtp_hybrid_override_pattern": ...},
            "`mtp_hybrid_override_pattern` is missing (also as mtp_layers_block_type)",
        ),
    ],
)
def test_unknown_layers_are_refused_by_name(changes: dict[str, Any], strange: str) -> None:
    assert strange in refusal(config(**changes))


def test_everything_that_is_missing_is_named_at_once() -> None:
    message = refusal({"hybrid_override_pattern": "ME*-"})
    needed = [
        "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "mamba_num_heads",
        "mamba_head_dim", "n_groups", "ssm_state_size", "intermediate_size", "n_routed_experts",
        "moe_intermediate_size",
    ]  # fmt: skip
    assert [name for name in needed if f"`{name}` is missing" not in message] == []
    assert message.startswith("config.json does not describe a model that can be converted: ")


@pytest.mark.parametrize("value", [0, -1, 2.0, "8192", True, [8192], 2**40])
def test_a_size_that_is_no_whole_number_is_refused(value: object) -> None:
    assert f"`hidden_size` is {value!r}, expected a whole number of at least 1" in refusal(
        config(hidden_size=value)
    )


@pytest.mark.parametrize("field", ["tie_word_embeddings", "use_conv_bias", "mlp_bias", "attention_bias"])
def test_a_flag_that_is_no_flag_is_refused(field: str) -> None:
    assert f"`{field}` is 'yes', expected true or false" in refusal(config(**{field: "yes"}))


@pytest.mark.parametrize("field", ["use_bias", "mamba_proj_bias"])
def test_biases_that_megatron_has_not_are_refused(field: str) -> None:
    assert f"`{field}` is true" in refusal(config(**{field: True}))


def test_the_family_is_found_by_architecture_or_by_model_type() -> None:
    assert find_family({"architectures": ["NemotronHForCausalLM"]}).NAME == "nemotron_h"
    assert find_family({"architectures": None, "model_type": "nemotron_h"}).NAME == "nemotron_h"
    for unknown in ({"architectures": ["GemmaForCausalLM"]}, {}, {"architectures": "NemotronHForCausalLM"}):
        with pytest.raises(ConfigError, match="no family in convtools knows this architecture"):
            find_family(unknown)


# --- the tables of random models -------------------------------------------------------------------


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """A random small model: any pattern, any MTP pattern and depth, with and without its options."""
    depth = draw(st.integers(0, 3))
    mtp = {
        "num_nextn_predict_layers": depth,
        "mtp_hybrid_override_pattern": draw(st.text("ME*-", min_size=1, max_size=3)),
    }
    if draw(st.booleans()):
        mtp["mtp_use_repeated_layer"] = draw(st.booleans())
    small = st.integers(1, 3)
    groups, mamba_groups = draw(small), draw(small)
    chosen = {
        "hidden_size": draw(small),
        "vocab_size": draw(st.integers(1, 6)),
        "num_key_value_heads": groups,
        "num_attention_heads": groups * draw(small),
        "head_dim": draw(small),
        "n_groups": mamba_groups,
        "mamba_num_heads": mamba_groups * draw(small),
        "mamba_head_dim": draw(small),
        "ssm_state_size": draw(small),
        "conv_kernel": draw(small),
        "use_conv_bias": draw(st.booleans()),
        "intermediate_size": draw(small),
        "n_routed_experts": draw(small),
        "moe_intermediate_size": draw(small),
        "moe_shared_expert_intermediate_size": draw(st.integers(0, 2)),
        "moe_latent_size": draw(st.integers(0, 2)),
        "attention_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
    }
    spec = nemotron_h.parse(config(draw(st.text("ME*-", min_size=1, max_size=6)), **mtp, **chosen))
    return replace(spec, mlp_bias=draw(st.booleans()))


def names_by_hand(spec: Spec, spelling: Spelling) -> set[str]:
    """Every Hugging Face name of a model, from the published naming."""
    depths = min(spec.mtp_depth, 1) if spec.mtp_repeated else spec.mtp_depth
    prefixes = [(f"{spelling.prefix}layers.{i}.", kind) for i, kind in enumerate(spec.pattern)]
    prefixes += [(f"mtp.layers.{i}.", kind) for i, kind in enumerate(spec.mtp_pattern * depths)]
    out = {spelling.prefix + spelling.embedding, f"{spelling.prefix}norm_f.weight"}
    out |= set() if spec.tied else {"lm_head.weight"}
    for at, kind in prefixes:
        inside = {
            "M": [
                "in_proj.weight",
                "conv1d.weight",
                "A_log",
                "D",
                "dt_bias",
                "norm.weight",
                "out_proj.weight",
            ]
            + ["conv1d.bias"] * spec.conv_bias,
            "*": [f"{x}_proj.{k}" for x in "qkvo" for k in ["weight"] + ["bias"] * spec.attention_bias],
            "-": [f"{x}_proj.{k}" for x in ("up", "down") for k in ["weight"] + ["bias"] * spec.mlp_bias],
            "E": ["gate.weight", "gate.e_score_correction_bias"]
            + ["fc1_latent_proj.weight", "fc2_latent_proj.weight"] * bool(spec.latent)
            + ["shared_experts.up_proj.weight", "shared_experts.down_proj.weight"] * bool(spec.shared_ffn),
        }[kind]
        if kind == "E" and spelling.stacked_experts:
            inside += ["experts.up_proj", "experts.down_proj"]
        elif kind == "E":
            inside += [f"experts.{e}.{x}_proj.weight" for e in range(spec.experts) for x in ("up", "down")]
        out |= {f"{at}norm.weight", *(f"{at}mixer.{name}" for name in inside)}
    for o in range(depths):
        first, last = o * len(spec.mtp_pattern), (o + 1) * len(spec.mtp_pattern) - 1
        out |= {f"mtp.layers.{first}.{name}.weight" for name in ("eh_proj", "enorm", "hnorm")}
        out.add(f"mtp.layers.{last}.final_layernorm.weight")
    return out


SPELLED = st.builds(
    Spelling,
    prefix=st.sampled_from(["backbone.", "model."]),
    embedding=st.sampled_from(["embeddings.weight", "embedding.weight"]),
    stacked_experts=st.booleans(),
)


@settings(deadline=None, max_examples=100)
@given(specs(), SPELLED, st.integers(0, 3))
def test_every_table_is_a_bijection(spec: Spec, spelling: Spelling, padding: int) -> None:
    table = Table.of(nemotron_h.rows(spec, spelling, spec.vocab + padding))
    assert set(table.hf) == names_by_hand(spec, spelling)
    table.check()
    if padding:
        with pytest.raises(
            MappingError, match=rf"word_embeddings.weight`: element \[{spec.vocab}, 0\] is held by nothing"
        ):
            table.mapping.check()
    else:
        table.mapping.check()


@settings(deadline=None, max_examples=100)
@given(specs(), SPELLED)
def test_the_spelling_is_read_back_from_the_names(spec: Spec, spelling: Spelling) -> None:
    table = Table.of(nemotron_h.rows(spec, spelling, spec.vocab))
    again = nemotron_h.spelling(spec, table.hf)
    assert list(Table.of(nemotron_h.rows(spec, again, spec.vocab)).hf.items()) == list(table.hf.items())
    from_mcore = nemotron_h.mcore_spelling(spec, table.params)
    params = Table.of(nemotron_h.rows(spec, from_mcore, spec.vocab)).params
    assert {n: p.shape for n, p in params.items()} == {n: p.shape for n, p in table.params.items()}


def test_a_config_silent_about_repetition_is_settled_by_the_names() -> None:
    spec = nemotron_h.parse(config("M", num_nextn_predict_layers=3))
    assert spec.mtp_repeated is None
    one = {n for n in Table.of(nemotron_h.rows(spec, Spelling(mtp_layers=1), spec.vocab)).hf}
    assert max(int(n.split(".")[2]) for n in one if n.startswith("mtp.")) == 1
    assert nemotron_h.spelling(spec, one).mtp_layers == 1
    three = Table.of(nemotron_h.rows(spec, Spelling(), spec.vocab)).hf
    assert max(int(n.split(".")[2]) for n in three if n.startswith("mtp.")) == 5
    assert nemotron_h.spelling(spec, three).mtp_layers is None


@pytest.mark.parametrize("names", [["x.weight"], ["backbone.a", "model.b"], []])
def test_an_unclear_prefix_is_refused(names: list[str]) -> None:
    with pytest.raises(AccountingError, match="the layers' prefix is unclear"):
        nemotron_h.spelling(nemotron_h.parse(config()), names)


def test_a_tied_models_head_is_a_copy_only_where_the_file_has_one() -> None:
    spec = nemotron_h.parse(config(tie_word_embeddings=True))
    names = ["backbone.embeddings.weight", "lm_head.weight"]
    (copy,) = nemotron_h.copies(spec, nemotron_h.spelling(spec, names))
    assert (copy.name, copy.of) == ("lm_head.weight", "backbone.embeddings.weight")
    assert nemotron_h.copies(spec, nemotron_h.spelling(spec, names[:1])) == ()
    untied = nemotron_h.parse(config())
    assert nemotron_h.copies(untied, nemotron_h.spelling(untied, names)) == ()


# --- against checkpoints that real Megatron-Bridge wrote --------------------------------------------


@pytest.mark.parametrize(
    "case", sorted({x.case_root for x in layouts("nemotron") if x.hf}), ids=lambda p: p.name
)
def test_names_and_shapes_are_those_of_a_real_checkpoint(case: Path) -> None:
    folder = case / "hf"
    spec = nemotron_h.parse(json.loads((folder / "config.json").read_text()))
    real = {name: shape for name, (_, shape, _) in read_safetensors(folder / "model.safetensors").items()}
    table = Table.of(nemotron_h.rows(spec, nemotron_h.spelling(spec, real), 256))
    assert dict(table.hf) == real
    table.mapping.check()


@pytest.mark.parametrize("case", ["nemotron_mtp", "nemotron_tp4", "nemotron_dense_mtp"])
def test_transformers_own_config_says_the_same(case: str) -> None:
    folder = ORACLE / case / "hf"
    ours, theirs = (
        nemotron_h.parse(json.loads((folder / name).read_text()) | {"vocab_size": 250})
        for name in ("config.json", "config_transformers.json")
    )
    assert ours == theirs
    assert ours.text == json.loads((ORACLE / case / "manifest.json").read_text())["hybrid_layer_pattern"]
