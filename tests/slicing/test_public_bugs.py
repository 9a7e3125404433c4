"""Public failures of other slicers and loaders, by their number, on whole checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest

from convtools.errors import ConfigError, ConvtoolsError, UsageError
from convtools.slicing.verification import verify_slice
from tests.convert.small import filled, write_safetensors, write_small_hf
from tests.families.tiny_configs import described, inventory
from tests.nemotron_checkpoints import TINY as NEMOTRON, inventory as nemotron
from tests.slicing.cutting import by_hand, cut
from tests.tensors import Content, differences, read_hf

GPT = "model.layers."
LLAMA = filled(inventory(described("LlamaForCausalLM", {}, {})))
LLAMA_CONFIG = dict(described("LlamaForCausalLM", {}, {}).config)


def sharded(root: Path, files: dict[str, Content], weight_map: dict[str, str]) -> Path:
    root.mkdir()
    (root / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    for file, content in files.items():
        write_safetensors(root / file, content)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return root


def stale(content: Content) -> Content:
    return {name: (dtype, shape, bytes(len(data))) for name, (dtype, shape, data) in content.items()}


def test_tensors_that_the_index_did_not_assign_are_not_taken_b36(tmp_path: Path) -> None:
    names = sorted(LLAMA)
    half = names[: len(names) // 2]
    one = {n: LLAMA[n] for n in half} | stale({n: LLAMA[n] for n in names[-3:]})
    two = {n: LLAMA[n] for n in names if n not in half}
    files = {"model-00001-of-00002.safetensors": one, "model-00002-of-00002.safetensors": two}
    src = sharded(tmp_path / "src", files, {n: f for f, c in files.items() for n in c if c[n] == LLAMA[n]})
    report = cut(src, tmp_path / "out", layers="3,0")
    assert differences(by_hand(LLAMA, [3, 0], prefix=GPT), read_hf(tmp_path / "out")) == []
    said = [name for name, reason in report.left_out if reason == "the index does not assign it there"]
    assert said == [f"{n} in model-00001-of-00002.safetensors" for n in names[-3:]]


def test_a_second_copy_is_named_and_left_b37(tmp_path: Path) -> None:
    other = {f"layers.{i}.attention.wq.weight": ("BF16", (2, 2), bytes(8)) for i in range(4)}
    names = sorted(LLAMA)
    files = {
        "model-00001-of-00002.safetensors": {n: LLAMA[n] for n in names[::2]},
        "model-00002-of-00002.safetensors": {n: LLAMA[n] for n in names[1::2]},
    }
    src = sharded(tmp_path / "src", files, {n: f for f, c in files.items() for n in c})
    more = {
        "consolidated.safetensors": other,
        "model-00001-of-00003.safetensors": stale(files["model-00001-of-00002.safetensors"]),
    }
    for file, content in more.items():
        write_safetensors(src / file, content)
    report = cut(src, tmp_path / "out", layers="1")
    assert differences(by_hand(LLAMA, [1], prefix=GPT), read_hf(tmp_path / "out")) == []
    assert more.keys() <= {name for name, _ in report.left_out}
    assert not [p for p in (tmp_path / "out").iterdir() if p.name in more]


@pytest.mark.parametrize("where", ["", "text_config"])
@pytest.mark.parametrize("extra", [0, 1, 2])
def test_per_layer_lists_with_an_entry_for_mtp_b58(where: str, extra: int, tmp_path: Path) -> None:
    text: dict[str, Any] = {
        "num_hidden_layers": 5, "num_nextn_predict_layers": 1, "sliding_window_list": list(range(5 + extra)),
        "layer_types": [f"kind{i}" for i in range(5 + extra)],
         "mlp_layer_types": ["dense"] * 2 + ["sparse"] * (3 + extra),
    }  # fmt: skip
    names = {f"{GPT}{i}.mlp.{part}.weight": ("BF16", (2, 3)) for i in range(6)
             for part in (("up_proj",) if i < 2 else ("gate", "experts.0.up_proj"))}  # fmt: skip
    src = write_small_hf(tmp_path / "src", {where: text} if where else text, filled(names))
    if extra == 2:
        with pytest.raises(ConfigError, match="has 7 entries"):
            cut(src, tmp_path / "out", layers="1,4")
        return
    report = cut(src, tmp_path / "out", layers="1,4")
    made = json.loads((tmp_path / "out/config.json").read_text())
    made = made[where] if where else made
    tail = [5][:extra]
    assert made["layer_types"] == ["kind1", "kind4"] + [f"kind{i}" for i in tail]
    assert made["mlp_layer_types"] == ["dense", "sparse", *(["sparse"] * extra)]
    assert made["sliding_window_list"] == [1, 4, *tail]
    assert bool(extra) == any("`layer_types` goes on behind the last layer, for MTP: kept so" in n or
                              "layer_types` goes on behind" in n for n in report.notes)  # fmt: skip
    assert f"{GPT}2.mlp.gate.weight" in read_hf(tmp_path / "out"), "MTP follows behind the last layer"


@pytest.mark.parametrize("mark", ["", "|"])
def test_the_pattern_is_cut_with_the_layers_b59(mark: str, tmp_path: Path) -> None:
    pattern = "ME*-ME*-M"
    config = NEMOTRON | {"hybrid_override_pattern": pattern, "num_hidden_layers": 9}
    src = write_small_hf(tmp_path / "src", config, filled(nemotron(config)))
    marked = config | {"hybrid_override_pattern": f"ME*-{mark}ME*-M"}
    (src / "config.json").write_text(json.dumps(marked))
    cut(src, tmp_path / "out", layers="1,2,7")
    made = json.loads((tmp_path / "out/config.json").read_text())
    assert (made["hybrid_override_pattern"], made["num_hidden_layers"]) == ("E*-", 3)
    held = read_hf(tmp_path / "out")
    assert "backbone.layers.0.mixer.gate.weight" in held and "backbone.layers.1.mixer.q_proj.weight" in held
    assert "backbone.layers.2.mixer.up_proj.weight" in held and not [n for n in held if "in_proj" in n]


def test_no_number_of_layers_is_invented_b60(tmp_path: Path) -> None:
    words = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
    config = {k: v for k, v in NEMOTRON.items() if k not in ("hybrid_override_pattern", "num_hidden_layers")}
    config["layers_block_type"] = [words[c] for c in "ME*-"]
    src = write_small_hf(tmp_path / "src", config, filled(nemotron(NEMOTRON)))
    cut(src, tmp_path / "out", layers="2,3")
    made = json.loads((tmp_path / "out/config.json").read_text())
    assert made == config | {"layers_block_type": ["attention", "mlp"]}
    (src / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    with pytest.raises(ConfigError, match="contradicts itself about its number of layers"):
        cut(src, tmp_path / "other", layers="0")


def test_each_layer_has_its_own_tensors_b63(tmp_path: Path) -> None:
    model = described("Qwen3NextForCausalLM", {}, {})
    content = filled(inventory(model))
    extra = {f"{GPT}2.linear_attn.strange": ("BF16", (3,), bytes(6))}
    config = {k: v for k, v in model.config.items() if k not in ("architectures", "model_type")}
    src = write_small_hf(tmp_path / "src", config, content | extra)
    cut(src, tmp_path / "out", layers="3,2")
    held = read_hf(tmp_path / "out")
    assert differences(by_hand(content | extra, [3, 2], prefix=GPT), held) == []
    assert f"{GPT}1.linear_attn.strange" in held and f"{GPT}0.self_attn.q_proj.weight" in held


def test_a_layer_that_is_listed_twice_is_there_twice_b64(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 5, "first_k_dense_replace": 2, "num_nextn_predict_layers": 1}
    model = described("DeepseekV3ForCausalLM", changes, {})
    content = filled(inventory(model))
    src = write_small_hf(tmp_path / "src", dict(model.config), content)
    report = cut(src, tmp_path / "out", layers="0-2,2-4")
    keep = [0, 1, 2, 2, 3, 4]
    want = by_hand({n: v for n, v in content.items() if f"{GPT}5." not in n}, keep, prefix=GPT)
    want |= {n.replace(f"{GPT}5.", f"{GPT}6."): v for n, v in content.items() if n.startswith(f"{GPT}5.")}
    assert differences(want, read_hf(tmp_path / "out")) == []
    assert report.payload_nbytes == sum(len(data) for _, _, data in want.values())


@pytest.mark.parametrize("text", ["0:0", "3:3", "2-1", "0-99", "4", "", "1,"])
def test_ranges_that_are_none_say_the_rule_b65(text: str, tmp_path: Path) -> None:
    src = write_small_hf(tmp_path / "src", LLAMA_CONFIG, LLAMA)
    with pytest.raises(UsageError, match=r"inclusive|both"):
        cut(src, tmp_path / "out", layers=text)
    assert [line.source for line in cut(src, tmp_path / "out", layers="3-3,0-1").layers] == [3, 0, 1]


@pytest.mark.parametrize(("said", "named"), [(3, "does not have: 3"), (5, "without any tensor: 4")])
def test_a_count_that_is_off_by_one_b68(said: int, named: str, tmp_path: Path) -> None:
    src = write_small_hf(tmp_path / "src", LLAMA_CONFIG | {"num_hidden_layers": said}, LLAMA)
    with pytest.raises(ConvtoolsError, match=named):
        cut(src, tmp_path / "out", layers="0")
    (src / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    cut(src, tmp_path / "whole", layers="0-3")
    (tmp_path / "whole/config.json").write_text(json.dumps(LLAMA_CONFIG | {"num_hidden_layers": said}))
    assert [fault.tensor for fault in verify_slice(tmp_path / "whole").faults] == ["config.json"]
    manifest = json.loads((tmp_path / "whole/convtools.manifest.json").read_text())
    (tmp_path / "whole/convtools.manifest.json").write_text(json.dumps(manifest | {"config": None}))
    with pytest.raises(ConvtoolsError, match=named):
        verify_slice(tmp_path / "whole")


@pytest.mark.parametrize(
    ("model_type", "layers", "types"),
    [
        ("gemma3_text", "5,6,11", ["full_attention", "sliding_attention", "full_attention"]),
        ("gemma3_text", "0-6", None),
        ("gemma3_text", "5,11", ["full_attention"] * 2),
        ("unheard_of", "5,6,11", ()),
        ("unheard_of", "0-5", None),
    ],
)
def test_sliding_windows_stay_what_they_were_b70(
    model_type: str, layers: str, types: Any, tmp_path: Path
) -> None:
    config = {
        "model_type": model_type,
        "num_hidden_layers": 12,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    }
    names = {f"{GPT}{i}.self_attn.q_proj.weight": ("BF16", (2, 3)) for i in range(12)}
    src = write_small_hf(tmp_path / "src", config, filled(names))
    if types == ():
        with pytest.raises(ConfigError, match="cannot say what these layers are: `sliding_window_pattern` 6"):
            cut(src, tmp_path / "out", layers=layers)
        return
    report = cut(src, tmp_path / "out", layers=layers)
    made = json.loads((tmp_path / "out/config.json").read_text())
    assert made.get("layer_types") == types and made["sliding_window_pattern"] == 6
    if layers == "5,11":
        assert "no layer of the slice is any more: sliding attention" in report.notes


@pytest.mark.parametrize(("layers", "first"), [("1,2,4", 1), ("2,3", 0), ("0,1", 2), ("2,0", None)])
def test_dense_layers_before_moe_b71(layers: str, first: int | None, tmp_path: Path) -> None:
    model = described("DeepseekV3ForCausalLM", {"num_hidden_layers": 5, "first_k_dense_replace": 2}, {})
    src = write_small_hf(tmp_path / "src", dict(model.config), filled(inventory(model)))
    if first is None:
        with pytest.raises(ConfigError, match="cannot say what these layers are: `first_k_dense_replace` 2"):
            cut(src, tmp_path / "out", layers=layers)
        return
    report = cut(src, tmp_path / "out", layers=layers)
    assert json.loads((tmp_path / "out/config.json").read_text())["first_k_dense_replace"] == first
    assert report.checked.startswith("every tensor is what")
