"""Slices and Megatron: from its checkpoints, and into them and back, every bit."""

import json
from pathlib import Path
from typing import Any

import pytest

import convtools
from convtools.errors import UsageError
from convtools.slicing.verification import verify_slice
from tests.convert.small import filled, write_small_hf
from tests.families.tiny_configs import TINY, described, inventory, near_one
from tests.oracle_cases import Layout, layouts
from tests.slicing.cutting import by_hand, cut
from tests.tensors import Content, differences, read_hf

CASES = {
    x.case: x
    for x in layouts("nemotron_mtp", "qwen3_moe", "qwen3_next", "gpt_oss", "llama", "deepseek")
    if x.hf
}


def dist(layout: Layout) -> Path:
    return layout.root / "torch_dist"


def held(root: Path) -> Content:
    """What a slice holds, without a tied head's copy, and norms that Megatron-Bridge rounded."""
    tied = json.loads((root / "config.json").read_text()).get("tie_word_embeddings")
    gone = ("linear_attn.norm.weight", *(["lm_head.weight"] if tied else []))
    return {name: value for name, value in read_hf(root).items() if not name.endswith(gone)}


LISTS = {
    "deepseek_v3": "0,2", "gpt_oss": "1", "llama3_tied": "1", "nemotron_mtp": "0-3", "qwen3_moe": "1",
    "qwen3_next": "3,1",
}  # fmt: skip


@pytest.mark.parametrize("layout", CASES.values(), ids=str)
def test_a_slice_of_torch_dist_is_that_of_its_hf_twin(layout: Layout, tmp_path: Path) -> None:
    assert layout.hf
    ways: dict[str, dict[str, Any]] = {"cover": {}, "list": {"layers": LISTS[layout.case]}}
    ways["no mtp"] = {"mtp": "drop"}
    if "expert" in (layout.hf / "config.json").read_text():
        ways["experts"] = {"experts": 2, "layers": LISTS[layout.case]}
    for name, options in ways.items():
        theirs, ours = tmp_path / f"{name} hf", tmp_path / f"{name} dist"
        want = cut(layout.hf, theirs, **options)
        got = cut(dist(layout), ours, hf_config=layout.hf, allow_inexact=True, **options)
        assert [line[:3] for line in got.layers] == [line[:3] for line in want.layers]
        assert differences(held(theirs), held(ours)) == []
        assert json.loads((ours / "config.json").read_text()) == json.loads(
            (theirs / "config.json").read_text()
        )
        assert want.config_changes == got.config_changes
        other = [fault.tensor for fault in verify_slice(ours, str(layout.hf)).faults]
        assert all(name.endswith("linear_attn.norm.weight") for name in other)
        assert verify_slice(ours).whole and verify_slice(theirs, str(layout.hf)).whole


def test_a_torch_dist_layer_cannot_be_listed_twice(tmp_path: Path) -> None:
    layout = CASES["llama3_tied"]
    with pytest.raises(UsageError, match="listed twice"):
        cut(dist(layout), tmp_path / "out", hf_config=layout.hf, layers="0,0")


def round_trip(src: Path, room: Path, **options: Any) -> None:
    """Into Megatron's layout and back: bit for bit the same."""
    there, back = room / "dist", room / "back"
    made = convtools.Options(to="torch_dist", fsync=False, workers=1, **options)
    convtools.convert(src, there, made)
    convtools.convert(there, back, convtools.Options(to="hf", fsync=False, workers=1))
    assert differences(read_hf(src), read_hf(back)) == []


def test_the_slice_of_nemotron_converts_at_tp2_pp2_ep2(tmp_path: Path) -> None:
    layout = CASES["nemotron_mtp"]
    assert layout.hf
    report = cut(layout.hf, tmp_path / "slice")
    assert report.mtp_tensors > 0 and len(report.layers) % 2 == 0
    round_trip(tmp_path / "slice", tmp_path, tp=2, pp=2, ep=2, etp=1)


@pytest.mark.parametrize(
    ("name", "changes", "layers"),
    [
        ("DeepseekV3ForCausalLM", {"num_hidden_layers": 7, "first_k_dense_replace": 2,
         "num_nextn_predict_layers": 1}, "1,3,4,6"),
        ("Qwen3MoeForCausalLM", {"num_hidden_layers": 7, "mlp_only_layers": [0, 4]}, "0,2-4"),
        ("GptOssForCausalLM", {"num_hidden_layers": 12}, "10,3"),
        ("Qwen3NextForCausalLM", {"mlp_only_layers": [1]}, "0-3"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("experts", [None, 2])
def test_slices_convert_at_tp2_pp2_ep2(
    name: str, changes: dict[str, Any], layers: str, experts: int | None, tmp_path: Path
) -> None:
    model = described(name, changes, {})
    content = near_one(model, filled(inventory(model)))
    src = write_small_hf(tmp_path / "src", dict(model.config), content)
    report = cut(src, tmp_path / "slice", layers=layers, experts=experts)
    assert report.checked.startswith("every tensor is what")
    if experts is None:
        keep = [line.source for line in report.layers]
        want = by_hand(content, keep, prefix="model.layers.")
        if "num_nextn_predict_layers" in changes:
            want |= {n.replace("layers.7.", "layers.4."): v for n, v in content.items() if "layers.7." in n}
        assert differences(want, read_hf(tmp_path / "slice")) == []
    round_trip(tmp_path / "slice", tmp_path, tp=2, pp=2, ep=2, etp=1, mixed_dtypes=True)


VISION: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 6, "layer_types": ["a"] * 4}


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_a_multimodal_model_keeps_its_tower(prefix: str, tmp_path: Path) -> None:
    tiny = TINY["LlamaForCausalLM"]
    head = {"prefix": prefix} if prefix.startswith("language") else {}
    model = described("LlamaForCausalLM", {}, head)
    content = filled(inventory(model))
    if head:
        content["language_model.lm_head.weight"] = content.pop("lm_head.weight")
    else:
        content = {n.replace("model.", prefix, 1): v for n, v in content.items()}
    tower = filled({f"model.visual.blocks.{i}.attn.qkv.weight": ("BF16", (18, 6)) for i in range(4)}
                   | {f"model.vision_tower.encoder.layers.{i}.mlp.fc1.weight": ("BF16", (9,
                    6)) for i in range(4)}, 5)  # fmt: skip
    config = {
        "architectures": ["SomethingForConditionalGeneration"], "model_type": "something",
        "text_config": dict(tiny.config), "vision_config": VISION, "image_token_id": 3,
    }  # fmt: skip
    src = write_small_hf(tmp_path / "src", config, content | tower)
    report = cut(src, tmp_path / "out", layers="3,1")
    assert (
        differences(by_hand(content, [3, 1], prefix=f"{prefix}layers.") | tower, read_hf(tmp_path / "out"))
        == []
    )
    config["text_config"]["num_hidden_layers"] = 2
    assert json.loads((tmp_path / "out/config.json").read_text()) == config
    assert report.other_nbytes >= sum(len(data) for _, _, data in tower.values())
