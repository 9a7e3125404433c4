"""The first N experts: router rows, biases, expert tensors and counts go together, and nothing else does."""

import json
from pathlib import Path
from typing import Any

import pytest

from convtools.errors import AccountingError, ConfigError, UsageError
from convtools.slicing.config_cut import Changes
from convtools.slicing.experts import (
    Part,
    check_experts,
    cut_expert_counts,
    expert_count,
    experts_kept,
    fewest_experts,
)
from tests.commands import SMALL
from tests.convert.small import filled, write_small_hf
from tests.families.tiny_configs import TINY, described, inventory
from tests.nemotron_checkpoints import inventory as nemotron
from tests.slicing.cutting import cut
from tests.tensors import read_hf

Shapes = dict[str, tuple[int, ...]]
E, N = 12, 3


def kept(shapes: Shapes, count: int = E, keep: int = N) -> dict[str, int | None]:
    return {name: part.rows for name, part in experts_kept(shapes, count, keep).items()}


ROUTED: list[tuple[str, Shapes]] = [  # the module, its router: all rows of experts
    ("DeepSeek", {"mlp.gate.weight": (E, 5), "mlp.gate.e_score_correction_bias": (E,)}),
    ("Nemotron", {"mixer.gate.weight": (E, 5), "mixer.gate.e_score_correction_bias": (E,)}),
    ("Mixtral", {"block_sparse_moe.gate.weight": (E, 5)}),
    ("gpt-oss", {"mlp.router.weight": (E, 5), "mlp.router.bias": (E,)}),
    ("Llama 4", {"feed_forward.router.weight": (E, 5)}),
    ("Hunyuan", {"mlp.gate.wg.weight": (E, 5)}),
    ("MiniMax M2", {"block_sparse_moe.gate.weight": (E, 5), "block_sparse_moe.e_score_correction_bias": (E,
     )}),
    ("Afmoe", {"mlp.router.gate.weight": (E, 5), "mlp.expert_bias": (E,)}),
    ("LFM2", {"feed_forward.gate.weight": (E, 5), "feed_forward.expert_bias": (E,)}),
    ("Dbrx", {"ffn.router.layer.weight": (E, 5)}),
    ("Ling", {"mlp.gate.weight": (E, 5), "mlp.gate.expert_bias": (E,)}),
    ("Gemma 4", {"moe.router.proj.weight": (E, 5), "moe.per_expert_scale": (E,)}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "router"), ROUTED, ids=[name for name, _ in ROUTED])
@pytest.mark.parametrize("prefix", ["model.layers.1.", "mtp.layers.0.", "model.language_model.layers.11."])
def test_routers_in_every_spelling(name: str, router: Shapes, prefix: str) -> None:
    home = next(iter(router)).partition(".")[0]
    each = {f"{home}.experts.{i}.{part}.weight": (7, 5) for i in range(E) for part in ("w1", "w2")}
    fused = {f"{home}.experts.gate_up_proj": (E, 5, 14), f"{home}.experts.down_proj": (E, 7, 5),
             f"{home}.experts.gate_up_proj_bias": (E, 14), f"{home}.experts.down_proj.weight": (E, 5, 7),
             f"{home}.experts.gate_up_proj_blocks": (E, 14, 1, 16),
              f"{home}.experts.gate_up_proj_scales": (E, 14, 1)}  # fmt: skip
    other = {f"{home}.shared_experts.up_proj.weight": (E, 5), f"{home}.shared_expert_gate.weight": (1, E),
             f"{home}.fc1_latent_proj.weight": (E, 5), f"{home}.fc2_latent_proj.weight": (5, E),
             f"{home}.shared_mlp.up_proj.weight": (E, E), f"{home}.norm.weight": (E,),
             "self_attn.q_proj.weight": (E, E), "router_norm.weight": (E,)}  # fmt: skip
    for experts in (each, fused):
        found = kept({prefix + n: shape for n, shape in (router | experts | other).items()})
        want = dict.fromkeys(router, N) | dict.fromkeys(other, None)
        want |= dict.fromkeys(fused, N) if experts is fused else dict.fromkeys(list(each)[: 2 * N], None)
        assert found == {prefix + n: rows for n, rows in want.items()}


def test_granite_and_step_keep_experts_in_no_module_of_their_own() -> None:
    granite = {"a.block_sparse_moe.router.layer.weight": (E, 5),
     "a.block_sparse_moe.input_linear.weight": (E, 14, 5),
               "a.block_sparse_moe.output_linear.weight": (E, 5, 7), "a.shared_mlp.input_linear.weight": (E,
                5)}  # fmt: skip
    assert list(kept(granite).values()) == [N, N, N, None]
    step = {"a.moe.gate.weight": (E, 5), "a.moe.router_bias": (E,), "a.moe.up_proj.weight": (E, 7, 5),
            "a.share_expert.up_proj.weight": (E, 5)}  # fmt: skip
    assert list(kept(step).values()) == [N, N, N, None]


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (
            {"mlp.gate.weight": (E, 5), "mlp.experts.0.w1": (7, 5), "mlp.magic": (E, 2)},
            "`a.mlp.magic` [12, 2]",
        ),
        ({"mlp.gate.weight": (E, 5), "mlp.experts.0.w1": (7, 5), "mlp.magic": (2, E)}, "number of experts"),
        (
            {"mlp.gate.weight": (E + 1, 5), "mlp.experts.0.w1": (7, 5)},
            "`a.mlp.gate.weight` [13, 5]: expected 12",
        ),
        ({"mlp.gate.weight": (E, 5), "mlp.experts.12.w1": (7, 5)}, "the config has 12 experts"),
        ({"mlp.gate.weight": (E, 5), "mlp.experts.w1": (E * 7, 5)}, "expected 12 first"),
        ({"mlp.experts.0.w1": (7, 5), "mlp.experts.1.w1": (7, 5)}, "experts without a known router"),
        (
            {"mlp.gate.moe_statics.e_score_correction_bias": (1, E), "mlp.experts.0.w1": (7, 5)},
            "[1, 12]: expected 12",
        ),
        ({"mlp.up_proj.weight": (7, 5)}, "no tensor is a routed expert's"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(shapes: Shapes, says: str) -> None:
    with pytest.raises(AccountingError) as caught:
        kept({f"a.{name}": shape for name, shape in shapes.items()})
    assert says in str(caught.value)


def test_a_scalar_scale_of_all_experts_stays() -> None:
    shapes: Shapes = {"mlp.gate.weight": (E, 5), "mlp.experts.0.w1": (7, 5), "mlp.experts.0.w1_scale": ()}
    assert experts_kept(shapes, E, N)["mlp.experts.0.w1_scale"] == Part(None)


COUNTS: list[tuple[dict[str, Any], int, dict[str, Any]]] = [
    ({"n_routed_experts": 64, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}, 16,
     {"n_routed_experts": 16}),
    ({"n_routed_experts": 64, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}, 8,
     {"n_routed_experts": 8, "n_group": 4}),
    ({"n_routed_experts": 64, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}, 4,
     {"n_routed_experts": 4, "n_group": 2, "topk_group": 2, "num_experts_per_tok": 4}),
    ({"n_routed_experts": 64, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 1}, 16,
     {"n_routed_experts": 16, "num_experts_per_tok": 2}),
    ({"n_routed_experts": 64, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}, 1,
     {"n_routed_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}),
    ({"n_routed_experts": 64, "num_experts_per_tok": 8, "num_expert_group": 8, "topk_group": 4}, 6,
     {"n_routed_experts": 6, "num_expert_group": 3, "topk_group": 3, "num_experts_per_tok": 6}),
    ({"n_routed_experts": 256, "num_experts_per_tok": 8, "model_type": "deepseek_v3"}, 16,
     {"n_routed_experts": 16}),
    ({"n_routed_experts": 256, "num_experts_per_tok": 8, "model_type": "deepseek_v3"}, 4,
     {"n_routed_experts": 4, "n_group": 2, "topk_group": 2, "num_experts_per_tok": 4}),
    ({"num_experts": 8, "num_experts_per_tok": 2, "num_local_experts": 8}, 2, {"num_experts": 2,
     "num_local_experts": 2}),
    ({"moe_num_experts": 8, "moe_k": 6}, 2, {"moe_num_experts": 2, "moe_k": 2}),
    ({"num_experts": 8, "moe_topk": [1, 3, 2]}, 2, {"num_experts": 2, "moe_topk": [1, 2, 2]}),
    ({"num_experts": 8, "num_experts_per_tok": 2}, 8, {}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "keep", "changed"), COUNTS, ids=str)
def test_counts_groups_and_topk(text: dict[str, Any], keep: int, changed: dict[str, Any]) -> None:
    after, changes = dict(text), Changes()
    cut_expert_counts(after, keep, changes)
    assert after == text | changed
    clipped = changed.keys() & {"num_experts_per_tok", "moe_k", "moe_topk", "n_group"}
    assert all(any(f"`{key}` is clipped" in note for note in changes.notes) for key in clipped)


@pytest.mark.parametrize(
    ("text", "least"),
    [
        ({"model_type": "deepseek_v3", "n_group": 8}, 2),
        ({"model_type": "glm4_moe", "n_group": 1}, 2),
        ({"model_type": "nemotron_h"}, 2),
        ({"model_type": "kimi_k2", "n_group": 1, "topk_method": "noaux_tc"}, 2),
        ({"model_type": "phimoe"}, 2),
        ({"model_type": "jamba"}, 2),
        ({"model_type": "deepseek_v2", "n_group": 8, "topk_method": "group_limited_greedy"}, 1),
        ({"model_type": "minimax_m2"}, 1),
        ({"model_type": "qwen3_moe"}, 1),
    ],
    ids=str,
)
def test_the_fewest_experts_that_a_router_works_with(text: dict[str, Any], least: int) -> None:
    assert fewest_experts(text)[0] == least
    check_experts(least, 8, text)
    if least > 1:
        with pytest.raises(UsageError, match="--experts 1 is too few") as caught:
            check_experts(1, 8, text)
        assert f"at least {least}: the " in str(caught.value)


def test_a_token_s_number_of_experts_that_the_config_does_not_say() -> None:
    changes = Changes()
    cut_expert_counts({"num_experts": 8}, 2, changes)
    assert [n for n in changes.notes if "does not say how many experts a token goes to" in n] == changes.notes


def test_counts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="contradicts itself"):
        expert_count({"num_experts": 8, "num_local_experts": 4})
    with pytest.raises(UsageError, match="this model has no routed experts"):
        expert_count({})
    with pytest.raises(UsageError) as caught:
        expert_count({"num_experts": [4, 8]})
    assert "`num_experts` gives each layer a number of its own" in str(caught.value)


@pytest.mark.parametrize("name", [n for n in TINY if any("expert" in k for k in TINY[n].config)])
def test_every_family_with_experts(name: str, tmp_path: Path) -> None:
    """All spellings of each family; the first rows, all the bytes of what stays, and a table that agrees."""
    for i, spelling in enumerate(TINY[name].spellings):
        model = described(name, {}, spelling)
        content = filled(inventory(model))
        src = write_small_hf(tmp_path / f"src{i}", dict(model.config), content)
        every = (
            f"0-{len(model.config.get('layers_block_type') or range(model.config['num_hidden_layers'])) - 1}"
        )
        report = cut(src, tmp_path / f"out{i}", layers=every, experts=2)
        assert report.checked.startswith("every tensor is what")
        held = read_hf(tmp_path / f"out{i}")
        fewer = 0
        for tensor, (dtype, shape, data) in held.items():
            assert dtype == content[tensor][0] and data == content[tensor][2][: len(data)]
            assert shape[1:] == content[tensor][1][1:]
            fewer += shape != content[tensor][1]
        assert fewer and all("experts" in n or "experts" in name for n in content.keys() - held.keys())


@pytest.mark.parametrize("experts", [0, 5, -1, 2**40])
def test_numbers_that_are_not_there(experts: int, tmp_path: Path) -> None:
    src = write_small_hf(tmp_path / "src", SMALL, filled(nemotron(SMALL)))
    with pytest.raises(UsageError, match=f"--experts {experts}"):
        cut(src, tmp_path / "out", experts=experts)


def test_latent_projections_as_wide_as_there_are_experts_and_mtp(tmp_path: Path) -> None:
    config = SMALL | {
        "n_routed_experts": 8, "moe_latent_size": 8, "moe_shared_expert_intermediate_size": 8,
         "moe_intermediate_size": 8,
        "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E",
    }  # fmt: skip
    content = filled(nemotron(config))
    src = write_small_hf(tmp_path / "src", config, content)
    cut(src, tmp_path / "out", experts=2)
    held = read_hf(tmp_path / "out")
    assert held["mtp.layers.1.mixer.gate.weight"][1] == (2, 16)
    assert (
        held["backbone.layers.1.mixer.fc1_latent_proj.weight"]
        == content["backbone.layers.1.mixer.fc1_latent_proj.weight"]
    )
    assert (
        not [n for n in held if ".experts.2." in n] and "mtp.layers.1.mixer.experts.1.up_proj.weight" in held
    )
    made = json.loads((tmp_path / "out/config.json").read_text())
    assert made["n_routed_experts"] == 2 and made["moe_latent_size"] == 8
