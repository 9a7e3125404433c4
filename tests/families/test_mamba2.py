"""Mamba-2 alone: transformers' own model there and back, each rank's rows by hand, what is refused."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import convtools
from convtools.errors import AccountingError, ConfigError, ConvtoolsError
from convtools.families import mamba2
from convtools.families.table import Table
from tests.convert.small import read_dist
from tests.nemotron_checkpoints import Tensors, write_hf
from tests.tensors import differences, read_hf, read_rank

CONFIG: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "vocab_size": 23, "hidden_size": 28,
    "num_hidden_layers": 4, "num_heads": 8, "head_dim": 7, "expand": 2, "n_groups": 4, "state_size": 9,
    "conv_kernel": 3, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-5,
}  # fmt: skip


def inventory(c: dict[str, Any]) -> Tensors:
    """Every tensor of the model, as transformers names it, by hand."""
    heads, hidden = c["num_heads"], c["hidden_size"]
    inner, states = heads * c["head_dim"], c["n_groups"] * c["state_size"]
    out = {"backbone.embeddings.weight": (c["vocab_size"], hidden), "backbone.norm_f.weight": (hidden,)}
    for i in range(c["num_hidden_layers"]):
        at = f"backbone.layers.{i}."
        out |= {
            f"{at}norm.weight": (hidden,),
            f"{at}mixer.A_log": (heads,),
            f"{at}mixer.D": (heads,),
            f"{at}mixer.dt_bias": (heads,),
            f"{at}mixer.conv1d.weight": (inner + 2 * states, 1, c["conv_kernel"]),
            f"{at}mixer.conv1d.bias": (inner + 2 * states,),
            f"{at}mixer.in_proj.weight": (2 * inner + 2 * states + heads, hidden),
            f"{at}mixer.norm.weight": (inner,),
            f"{at}mixer.out_proj.weight": (hidden, inner),
        }
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (c["vocab_size"], hidden)
    return {name: ("BF16", shape) for name, shape in out.items()}


def there_and_back(src: Path, work: Path, **options: Any) -> Path:
    convtools.convert(src, work / "mcore", convtools.Options(**({"to": "torch_dist"} | options)))
    convtools.convert(work / "mcore", work / "back", convtools.Options(to="hf"))
    return work / "back"


def transformers_model(**changes: Any) -> Any:
    import torch
    from transformers import Mamba2Config, Mamba2ForCausalLM

    names = set(CONFIG) - {"architectures", "model_type"}
    torch.manual_seed(0)
    config = Mamba2Config(**{n: CONFIG[n] for n in names} | {"chunk_size": 8} | changes)
    model = Mamba2ForCausalLM(config).eval()
    with torch.no_grad():  # norms and biases begin as ones and zeros, which hide a mix-up
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(torch.arange(20).reshape(2, 10) % 23, use_cache=False).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kept", [True, False], ids=["config kept", "config derived"])
def test_transformers_own_model_there_and_back(tied: bool, kept: bool, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = transformers_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    spec = mamba2.parse(config)
    written = read_hf(tmp_path / "hf")
    expected = {n: shape for n, (_, shape) in inventory(CONFIG | {"tie_word_embeddings": tied}).items()}
    assert {n: shape for n, (_, shape, _) in written.items()} == expected
    assert Table.of(mamba2.rows(spec, mamba2.Spelling(), 23)).hf == expected
    options = convtools.Options(to="torch_dist", tp=2, pp=2)
    convtools.convert(tmp_path / "hf", tmp_path / "mcore", options)
    if not kept:
        shutil.rmtree(tmp_path / "mcore/iter_0000001/hf")
    convtools.convert(tmp_path / "mcore", tmp_path / "back", convtools.Options(to="hf"))
    assert differences(written, read_hf(tmp_path / "back")) == []
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto").eval()
    assert type(again) is type(model)
    assert torch.equal(logits(again), logits(model))


def test_a_tied_head_that_is_stored_all_the_same_comes_back(tmp_path: Path) -> None:
    config = CONFIG | {"tie_word_embeddings": True}
    src = write_hf(tmp_path / "hf", config, inventory(config))
    from safetensors.torch import load_file, save_file

    tensors = load_file(src / "model.safetensors")
    tensors["lm_head.weight"] = tensors["backbone.embeddings.weight"].clone()
    save_file(tensors, src / "model.safetensors", {"format": "pt"})
    assert differences(read_hf(src), read_hf(there_and_back(src, tmp_path, tp=2))) == []


@pytest.mark.parametrize("tied", [False, True])
def test_empty_states_that_megatron_asks_for(tied: bool, tmp_path: Path) -> None:
    """The head's too where it is tied: the hybrid model's `sharded_state_dict` keeps it, a GPT's drops it."""
    config = CONFIG | {"tie_word_embeddings": tied}
    src = write_hf(tmp_path / "hf", config, inventory(config))
    convtools.convert(src, tmp_path / "m", convtools.Options(to="torch_dist", tp=2, pp=2))
    _, objects = read_dist(tmp_path / "m/iter_0000001")
    linears = [f"decoder.layers.{i}.mixer.{x}_proj" for i in range(4) for x in ("in", "out")]
    modules = [*linears, "decoder.final_norm", "output_layer"]
    assert sorted(objects) == sorted(f"{module}._extra_state/shard_0_1" for module in modules)
    convtools.convert(src, tmp_path / "t", convtools.Options(to="torch", tp=2, pp=2))
    for stage, more in enumerate([[], ["decoder.final_norm", "output_layer"]]):
        rank = tmp_path / f"t/iter_0000001/mp_rank_00_00{stage}/model_optim_rng.pt"
        assert sorted(read_rank(rank)[2]) == sorted(f"{m}._extra_state" for m in [*linears[:4], *more])


# Rows of z, x, B, C, dt: 56, 56, 36, 36 and 8 of them, 192 in all.
IN_PROJ_TP2 = [
    [*range(0, 28), *range(56, 84), *range(112, 130), *range(148, 166), *range(184, 188)],
    [*range(28, 56), *range(84, 112), *range(130, 148), *range(166, 184), *range(188, 192)],
]
CONV_TP2 = [
    [*range(0, 28), *range(56, 74), *range(92, 110)],
    [*range(28, 56), *range(74, 92), *range(110, 128)],
]
HALVES = {"A_log": 4, "D": 4, "dt_bias": 4, "norm.weight": 28}


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_of_a_rank_at_tp2(rank: int, tmp_path: Path) -> None:
    src = write_hf(tmp_path / "hf", CONFIG, inventory(CONFIG))
    convtools.convert(src, tmp_path / "m", convtools.Options(to="torch", tp=2, pp=2))
    _, held, _ = read_rank(tmp_path / f"m/iter_0000001/mp_rank_0{rank}_001/model_optim_rng.pt")
    whole = {n: np.frombuffer(data, "<u2").reshape(shape) for n, (_, shape, data) in read_hf(src).items()}
    part = {n: np.frombuffer(data, "<u2").reshape(shape) for n, (_, shape, data) in held.items()}
    hf, mcore = "backbone.layers.3.", "decoder.layers.1."  # the second layer of the second stage
    expected = {
        "mixer.in_proj.weight": whole[f"{hf}mixer.in_proj.weight"][IN_PROJ_TP2[rank]],
        "mixer.conv1d_weight": whole[f"{hf}mixer.conv1d.weight"][CONV_TP2[rank]],
        "mixer.conv1d_bias": whole[f"{hf}mixer.conv1d.bias"][CONV_TP2[rank]],
        "mixer.out_proj.weight": whole[f"{hf}mixer.out_proj.weight"][:, rank * 28 : rank * 28 + 28],
        "mixer.in_proj.layer_norm_weight": whole[f"{hf}norm.weight"],
        **{f"mixer.{n}": whole[f"{hf}mixer.{n}"][rank * k : rank * k + k] for n, k in HALVES.items()},
    }
    assert {n.removeprefix(mcore) for n in part if n.startswith(mcore)} == set(expected)
    for name, want in expected.items():
        assert part[mcore + name].tolist() == want.tolist(), name
    assert part["decoder.final_norm.weight"].tolist() == whole["backbone.norm_f.weight"].tolist()
    assert {n for n in part if "layers" not in n} == {"decoder.final_norm.weight", "output_layer.weight"}


@settings(max_examples=25)
@given(
    heads=st.integers(1, 4), groups=st.sampled_from([1, 2]), head_dim=st.integers(1, 5),
    state=st.integers(1, 5), layers=st.integers(1, 3), vocab=st.integers(1, 40), tied=st.booleans(),
    conv_kernel=st.integers(1, 4), split=st.booleans(), to=st.sampled_from(["torch_dist", "torch"]),
)  # fmt: skip
def test_any_sizes_there_and_back(
    heads: int, groups: int, head_dim: int, state: int, layers: int, vocab: int, tied: bool,
    conv_kernel: int, split: bool, to: str,
) -> None:  # fmt: skip
    config = CONFIG | {
        "num_heads": heads * groups, "n_groups": groups, "head_dim": head_dim, "state_size": state,
        "num_hidden_layers": layers, "vocab_size": vocab, "tie_word_embeddings": tied, "expand": 1,
        "hidden_size": heads * groups * head_dim, "conv_kernel": conv_kernel,
    }  # fmt: skip
    sizes = {"tp": groups if split else 1, "pp": layers if split else 1}
    with tempfile.TemporaryDirectory() as folder:
        src = write_hf(Path(folder) / "hf", config, inventory(config))
        back = there_and_back(src, Path(folder), to=to, **sizes)
        assert differences(read_hf(src), read_hf(back)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bias": True}, "`use_bias` is true: Megatron's Mamba mixer has no bias on in_proj"),
        ({"use_conv_bias": False}, "`use_conv_bias` is false"),
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'"),
        ({"time_step_limit": [0.0, 0.1]}, r"`time_step_limit` is \[0.0, 0.1\]"),
        ({"layer_norm_epsilon": 1e-6}, "`layer_norm_epsilon` is 1e-06: .* fixes 1e-05"),
        ({"d_model": 28}, "`d_model` is mamba_ssm's own spelling"),
        ({"n_groups": 3}, "num_heads=8 is not a multiple of n_groups=3"),
        ({"expand": 3}, r"expand \* hidden_size is 84, num_heads \* head_dim is 56"),
        ({"state_size": None, "num_heads": None}, "`num_heads` is missing; `state_size` is missing"),
    ],
)
def test_configs_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mamba2.parse(CONFIG | change)


@pytest.mark.parametrize("limit", [[0.0, float("inf")], [0.0, {"__float__": "Infinity"}], None])
def test_spellings_of_no_limit(limit: Any) -> None:
    assert mamba2.parse(CONFIG | {"time_step_limit": limit}) == mamba2.parse(CONFIG)


def test_names_of_mamba_ssm_are_refused(tmp_path: Path) -> None:
    tensors = inventory(CONFIG)
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    src = write_hf(tmp_path / "hf", CONFIG, tensors)
    with pytest.raises(AccountingError, match="mamba_ssm's own names"):
        convtools.convert(src, tmp_path / "m", convtools.Options(to="torch_dist"))


def test_a_config_of_mamba_ssm_is_refused(tmp_path: Path) -> None:
    config = {"d_model": 28, "n_layer": 4, "vocab_size": 23, "ssm_cfg": {"layer": "Mamba2"}}
    src = write_hf(tmp_path / "hf", config, inventory(CONFIG))
    with pytest.raises(ConfigError, match="`d_model` is mamba_ssm's own spelling: convert to transformers'"):
        convtools.convert(src, tmp_path / "m", convtools.Options(to="torch_dist"))


def test_what_megatron_cannot_cut_is_refused(tmp_path: Path) -> None:
    config = CONFIG | {"n_groups": 1}
    src = write_hf(tmp_path / "hf", config, inventory(config))
    with pytest.raises(ConvtoolsError, match="tp=2 does not divide n_groups=1"):
        convtools.convert(src, tmp_path / "m", convtools.Options(to="torch_dist", tp=2))


def test_the_config_from_args() -> None:
    spec = mamba2.parse(CONFIG)
    args = mamba2.megatron_args(
        CONFIG | {"residual_in_fp32": True, "chunk_size": 64}, spec, mamba2.Spelling()
    )
    shapes = {"decoder.layers.0.mixer.conv1d.weight.x": (56, 1, 3)}
    config, missing = mamba2.hf_config(args, shapes)
    assert missing == []
    assert config | CONFIG == config
    assert (config["residual_in_fp32"], config["chunk_size"]) == (True, 64)
    assert mamba2.hf_config(args | {"hybrid_layer_pattern": "MM*M"}, shapes)[1] == [
        "another architecture, by its args"
    ]
    assert mamba2.hf_config(args | {"mamba_num_heads": None}, shapes)[1] == ["num_heads", "expand"]
    assert mamba2.hf_config(args | {"norm_epsilon": 1e-6}, shapes)[1] == [
        "norm_epsilon=1e-06, expected 1e-05"
    ]
    assert mamba2.hf_config(args, {})[1] == ["conv_kernel"]
