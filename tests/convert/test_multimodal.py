"""Language models inside larger ones: towers pass HF -> HF, are refused towards Megatron; names come back."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import convtools
from convtools.errors import AccountingError, CheckpointError, ConfigError, ConvtoolsError, UsageError
from tests.convert.small import files, filled, read_dist, torch_files, write_small_hf
from tests.families.tiny_configs import TINY as ENTRIES, described, inventory as own_inventory, near_one
from tests.nemotron_checkpoints import TINY, Tensors, inventory
from tests.tensors import Content, differences, read_hf, read_rank

TEXT: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 6, "hidden_size": 16, "vocab_size": 40,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
    "rope_parameters": {"rope_theta": 1234567.0, "rope_type": "default"},
}  # fmt: skip
TOWER: Tensors = {
    "model.visual.blocks.0.w": ("BF16", (3, 5)), "model.visual.pos": ("F32", (7,)),
    "multi_modal_projector.linear_1.bias": ("BF16", (16,)), "image_newline": ("BF16", (16,)),
    "vision_tower.position_ids": ("I32", (1, 4)), "vision_tower.scale": ("F16", ()),
    "vision_tower.nothing": ("BF16", (0, 4)),
}  # fmt: skip
PREFIXES = ["", "model.language_model.", "language_model."]


def language(tied: bool = False) -> Tensors:
    """Every tensor of TEXT's model under its own names, by hand."""
    out: Tensors = {"model.embed_tokens.weight": ("BF16", (40, 16))}
    for i in range(6):
        at = f"model.layers.{i}."
        for name, shape in {
            "input_layernorm": (16,), "post_attention_layernorm": (16,), "self_attn.q_proj": (16, 16),
            "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16), "self_attn.o_proj": (16, 16),
            "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24),
        }.items():  # fmt: skip
            out[f"{at}{name}.weight"] = ("BF16", shape)
    out["model.norm.weight"] = ("BF16", (16,))
    return out if tied else out | {"lm_head.weight": ("BF16", (40, 16))}


def respelled(content: Content, prefix: str) -> Content:
    """The language model's own names as a file under this prefix has them."""
    if prefix == "model.language_model.":
        return {re.sub(r"^model\.", prefix, name): value for name, value in content.items()}
    return {prefix + name: value for name, value in content.items()}


def nested(tied: bool | None = False, text: dict[str, Any] = TEXT, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
        "tie_word_embeddings": tied, "hidden_size": 999, "vision_config": {"hidden_size": 3},
        "text_config": text,
    } | more  # fmt: skip


def chosen(to: str, **more: Any) -> convtools.Options:
    return convtools.Options(to=to, fsync=False, workers=1, **more)


def assert_same(src: Path, back: Path) -> None:
    assert differences(read_hf(src), read_hf(back)) == []
    assert files(src) == files(back)


# --- what transformers writes ----------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "vocab_size": 40, "max_position_embeddings": 64,
}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 16, "num_heads": 2, "depth": 1}
TILES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "image_size": 8, "patch_size": 4}  # fmt: skip
QWEN3_VISION = VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
SAVED: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "Qwen3-VL": (
        "Qwen3VL",
        {"text_config": SIZES | {"head_dim": 6}, "vision_config": QWEN3_VISION},
        {"model.visual.": 27},
    ),
    "Qwen3-VL, tied": (
        "Qwen3VL",
        {"text_config": SIZES | {"head_dim": 6}, "vision_config": QWEN3_VISION, "tie_word_embeddings": True},
        {"model.visual.": 27},
    ),
    "Qwen2.5-VL": ("Qwen2_5_VL", {"text_config": SIZES, "vision_config": VISION}, {"visual.": 18}),
    "LLaVA": (
        "Llava",
        {"text_config": SIZES | {"model_type": "llama"},
         "vision_config": TILES | {"model_type": "clip_vision_model", "projection_dim": 8}},
        {"multi_modal_projector.": 4, "vision_tower.": 23},
    ),
    "Mistral3": (
        "Mistral3",
        {"text_config": SIZES | {"model_type": "mistral", "head_dim": 4},
         "vision_config": TILES | {"model_type": "pixtral"}},
        {"multi_modal_projector.": 4, "vision_tower.": 11},
    ),
}  # fmt: skip


def saved(case: str, root: Path) -> tuple[Path, dict[str, int]]:
    """A tiny random model as transformers saves it, and how many tensors of it lie under which name."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    name, config, outside = SAVED[case]
    torch.manual_seed(0)
    cls = getattr(transformers, f"{name}ForConditionalGeneration")
    model = cls(getattr(transformers, f"{name}Config")(**config)).to(torch.bfloat16)
    model.save_pretrained(root)
    return root, outside


def text_alone(root: Path, outside: dict[str, int], to: Path) -> Path:
    """The same folder without its towers."""
    left = {n: v for n, v in read_hf(root).items() if not n.startswith(tuple(outside))}
    return write_small_hf(to, json.loads((root / "config.json").read_text()), left)


@pytest.mark.parametrize("case", SAVED)
def test_what_transformers_saves_passes_unchanged(case: str, tmp_path: Path) -> None:
    src, outside = saved(case, tmp_path / "src")
    report = convtools.convert(src, tmp_path / "out", chosen("hf", max_shard_size="4KB"))
    assert_same(src, tmp_path / "out")
    assert report.files > 5
    assert report.notes == tuple(
        f"{count} tensors under `{under}` passed through unchanged: outside the language model"
        for under, count in outside.items()
    )
    assert report.hf_tensors == len(read_hf(src))


@pytest.mark.parametrize("case", SAVED)
def test_the_text_part_of_what_transformers_saves(case: str, tmp_path: Path) -> None:
    """Its Megatron form is that of the language model alone, saved by itself."""
    src, outside = saved(case, tmp_path / "vl")
    src = text_alone(src, outside, tmp_path / "src")
    own = {}
    for name, value in read_hf(src).items():
        own[name.replace("model.language_model.", "model.").removeprefix("language_model.")] = value
    text = json.loads((src / "config.json").read_text())["text_config"]
    text["tie_word_embeddings"] = "lm_head.weight" not in own
    kind = {"Qwen3VL": "Qwen3", "Qwen2_5_VL": "Qwen2", "Llava": "Llama", "Mistral3": "Mistral"}
    text["architectures"] = [f"{kind[SAVED[case][0]]}ForCausalLM"]
    alone = write_small_hf(tmp_path / "alone", text, own)
    for folder in (src, alone):
        convtools.convert(folder, tmp_path / f"m-{folder.name}", chosen("torch_dist", tp=2))
    made, single = (read_dist(tmp_path / f"m-{f}/iter_0000001")[0] for f in ("src", "alone"))
    assert differences(made, single) == [] and len(made) > 5
    convtools.convert(tmp_path / "m-src", tmp_path / "back", chosen("hf"))
    assert_same(src, tmp_path / "back")


@pytest.mark.parametrize("to", ["torch_dist", "torch"])
def test_towers_are_refused_by_name_towards_megatron(to: str, tmp_path: Path) -> None:
    src, _ = saved("Mistral3", tmp_path / "src")
    with pytest.raises(AccountingError) as error:
        convtools.convert(src, tmp_path / "out", chosen(to))
    for words in (
        "15 tensors lie outside the language model", "11 tensors under `vision_tower.`",
        "`multi_modal_projector.linear_1.weight`", "... and 7 more", "--to hf",
    ):  # fmt: skip
        assert words in str(error.value)
    assert not (tmp_path / "out").exists()


# --- all prefixes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("to", ["torch_dist", "torch"])
@pytest.mark.parametrize("flat", [False, True])
def test_names_and_config_come_back(prefix: str, to: str, flat: bool, tmp_path: Path) -> None:
    config = TEXT | {"architectures": ["LlamaForCausalLM"]} if flat else nested()
    src = write_small_hf(tmp_path / "src", config, respelled(filled(language()), prefix))
    (src / "tokenizer.json").write_text("{}")
    convtools.convert(src, tmp_path / "m", chosen(to, tp=2, pp=3))
    convtools.convert(tmp_path / "m", tmp_path / "back", chosen("hf"))
    assert_same(src, tmp_path / "back")
    other = "torch" if to == "torch_dist" else "torch_dist"
    convtools.convert(tmp_path / "m", tmp_path / "m2", chosen(other))
    convtools.convert(tmp_path / "m2", tmp_path / "back2", chosen("hf"))
    assert_same(src, tmp_path / "back2")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_b10_a_tied_head_under_a_prefix(prefix: str, pp: int, flat: bool, head: bool, tmp_path: Path) -> None:
    """The last stage's copy is the embedding, and the file gets a head of its own only where it had one."""
    own = filled(language(tied=True))
    embedding = own["model.embed_tokens.weight"]
    if head:
        own["lm_head.weight"] = embedding
    config = nested(True)
    if flat:
        config = TEXT | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    src = write_small_hf(tmp_path / "src", config, respelled(own, prefix))
    convtools.convert(src, tmp_path / "m", chosen("torch", pp=pp, padded_vocab_size=48))
    ranks = [read_rank(path) for path in torch_files(tmp_path / "m/iter_0000001")]
    padded = ("BF16", (48, 16), embedding[2] + bytes(8 * 16 * 2))
    assert ranks[0][1]["embedding.word_embeddings.weight"] == padded
    assert [r[1].get("output_layer.weight") for r in ranks] == (
        [None] if pp == 1 else [None] * (pp - 1) + [padded]
    )
    assert ranks[0][0]["args"].untie_embeddings_and_output_weights is False
    assert ranks[0][0]["args"].rotary_base == 1234567.0
    convtools.convert(tmp_path / "m", tmp_path / "back", chosen("hf"))
    assert_same(src, tmp_path / "back")


def test_two_heads_stay_two_where_the_section_says_untied(tmp_path: Path) -> None:
    """As transformers 5 does: what is there twice and differs is not tied, whatever the top says."""
    config = nested(True, TEXT | {"tie_word_embeddings": False})
    src = write_small_hf(tmp_path / "src", config, respelled(filled(language()), "language_model."))
    convtools.convert(src, tmp_path / "m", chosen("torch_dist"))
    assert "output_layer.weight" in read_dist(tmp_path / "m/iter_0000001")[0]
    convtools.convert(tmp_path / "m", tmp_path / "back", chosen("hf"))
    assert_same(src, tmp_path / "back")


@pytest.mark.parametrize("section", ["llm_config", "text_config"])
def test_nemotron_h_inside_a_larger_model(section: str, tmp_path: Path) -> None:
    text = TINY | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E", "architectures": None}
    config = {"architectures": ["NemotronH_Nano_VL_V2"], section: text}
    own = respelled(filled(inventory(text)), "language_model.")
    assert {"language_model.backbone.embeddings.weight", "language_model.lm_head.weight",
            "language_model.mtp.layers.0.eh_proj.weight"} < own.keys()  # fmt: skip
    src = write_small_hf(tmp_path / "src", config, own)
    convtools.convert(src, tmp_path / "m", chosen("torch_dist", tp=2))
    convtools.convert(tmp_path / "m", tmp_path / "back", chosen("hf"))
    assert_same(src, tmp_path / "back")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("architecture", sorted(ENTRIES))
def test_every_architecture_inside_a_larger_model(architecture: str, prefix: str, tmp_path: Path) -> None:
    model = described(architecture, {}, ENTRIES[architecture].spellings[-1])
    own = near_one(model, filled(own_inventory(model)))
    own |= {copy.name: own[copy.of] for copy in model.copies()}
    own = {
        re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", name): value for name, value in own.items()
    }
    config = {"architectures": ["SomeVLForConditionalGeneration"], "text_config": model.config}
    content = respelled(own, prefix)
    src = write_small_hf(tmp_path / "src", config, content)
    convtools.convert(src, tmp_path / "m", chosen("torch_dist"))
    convtools.convert(tmp_path / "m", tmp_path / "back", chosen("hf"))
    assert_same(src, tmp_path / "back")
    towers = write_small_hf(tmp_path / "towers", config, content | filled({"visual.w": ("BF16", (2, 3))}))
    assert convtools.convert(towers, tmp_path / "out", chosen("hf")).hf_tensors >= len(own) - len(
        model.copies()
    )
    assert_same(towers, tmp_path / "out")


# --- towers of any dtype and shape -----------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model."])
def test_odd_towers_pass_unchanged(prefix: str, tmp_path: Path) -> None:
    content = respelled(filled(language()), prefix) | filled(TOWER, seed=1)
    src = write_small_hf(tmp_path / "src", nested(), content)
    report = convtools.convert(src, tmp_path / "out", chosen("hf"))
    assert_same(src, tmp_path / "out")
    assert [note.split(" passed")[0] for note in report.notes] == [
        "2 tensors under `model.visual.`", "1 tensor under `multi_modal_projector.`",
        "1 tensor `image_newline`", "3 tensors under `vision_tower.`",
    ]  # fmt: skip


def test_a_cast_is_refused_where_there_are_towers(tmp_path: Path) -> None:
    content = respelled(filled(language()), "language_model.") | filled(TOWER)
    src = write_small_hf(tmp_path / "src", nested(), content)
    with pytest.raises(UsageError, match=r"3 tensors under `vision_tower\.` would have to be cast too"):
        convtools.convert(src, tmp_path / "out", chosen("hf", dtype="fp32"))


def test_a_cast_of_a_nested_model_without_towers(tmp_path: Path) -> None:
    content = respelled(filled(language()), "language_model.")
    src = write_small_hf(tmp_path / "src", nested(), content)
    convtools.convert(src, tmp_path / "out", chosen("hf", dtype="fp32"))
    made = read_hf(tmp_path / "out")
    for name, (_, shape, data) in content.items():
        halves = [bytes(2) + data[i : i + 2] for i in range(0, len(data), 2)]
        assert made[name] == ("F32", shape, b"".join(halves))
    assert json.loads((tmp_path / "out/config.json").read_text())["text_config"]["dtype"] == "float32"


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "strange"),
    [
        ("model.language_model.", "language_model.lm_head.weight"),
        ("model.language_model.", "model.language_model.layers.6.input_layernorm.weight"),
        ("model.language_model.", "model.norm.weight"),
        ("model.language_model.", "mtp.layers.0.eh_proj.weight"),
        ("language_model.", "lm_head.weight"),
        ("language_model.", "language_model.vision.weight"),
        ("", "model.visual.weight"),
    ],
)
def test_what_is_no_tower_does_not_pass(prefix: str, strange: str, tmp_path: Path) -> None:
    content = respelled(filled(language()), prefix) | filled({strange: ("BF16", (16,))})
    src = write_small_hf(tmp_path / "src", nested(), content)
    with pytest.raises(AccountingError, match=re.escape(f"not in this model: `{strange}` [16]")):
        convtools.convert(src, tmp_path / "out", chosen("hf"))


def test_a_flat_config_has_no_towers(tmp_path: Path) -> None:
    config = TEXT | {"architectures": ["LlamaForCausalLM"]}
    src = write_small_hf(tmp_path / "src", config, filled(language() | TOWER))
    with pytest.raises(AccountingError, match=r"not in this model: `vision_tower\.scale`"):
        convtools.convert(src, tmp_path / "out", chosen("hf"))


def test_a_missing_tensor_is_named_as_the_file_would_have_it(tmp_path: Path) -> None:
    content = respelled(filled(language()), "model.language_model.")
    del content["model.language_model.layers.5.mlp.up_proj.weight"]
    src = write_small_hf(tmp_path / "src", nested(), content)
    with pytest.raises(
        AccountingError, match=r"missing: `model\.language_model\.layers\.5\.mlp\.up_proj\.weight`"
    ):
        convtools.convert(src, tmp_path / "out", chosen("hf"))


def test_a_dtype_of_the_tops_that_the_weights_do_not_have(tmp_path: Path) -> None:
    config = nested(dtype="float16")
    src = write_small_hf(tmp_path / "src", config, respelled(filled(language()), "language_model."))
    with pytest.raises(AccountingError, match=r"config\.json says float16, but most tensors"):
        convtools.convert(src, tmp_path / "out", chosen("hf"))


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    """A Megatron checkpoint of a nested model; its kept `hf` folder."""
    src = write_small_hf(tmp_path / "src", nested(), respelled(filled(language()), "language_model."))
    convtools.convert(src, tmp_path / "m", chosen("torch_dist"))
    return tmp_path / "m/iter_0000001/hf"


@pytest.mark.parametrize(
    "wrapping",
    [
        {"prefix": "../../"}, {"prefix": ["model."]}, {"prefix": {}}, {"untied": 1}, {"suffix": ""},
        [], None, "x",
        {"prefix": "vision." * 10_000},
    ],
)  # fmt: skip
def test_a_hostile_note(wrapping: Any, megatron: Path) -> None:
    note = json.loads((megatron / ".convtools.json").read_text())
    assert note["wrapping"] == {"prefix": "language_model.", "untied": False}
    (megatron / ".convtools.json").write_text(json.dumps(note | {"wrapping": wrapping}))
    with pytest.raises(CheckpointError, match="note of the Hugging Face spelling") as error:
        convtools.convert(megatron.parents[1], megatron.parents[2] / "out", chosen("hf"))
    assert len(str(error.value)) < 500


def test_without_a_note_nothing_is_guessed(megatron: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no note says how its names begin"):
        convtools.convert(tmp_path / "m", tmp_path / "out", chosen("hf", hf_config=str(tmp_path / "src")))
    (megatron / ".convtools.json").unlink()
    with pytest.raises(ConvtoolsError, match="no note says how its names begin") as error:
        convtools.convert(tmp_path / "m", tmp_path / "out", chosen("hf"))
    assert "--hf-config" in str(error.value)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_text(json.dumps(TEXT | {"architectures": ["LlamaForCausalLM"]}))
    convtools.convert(tmp_path / "m", tmp_path / "out", chosen("hf", hf_config=str(alone)))
    assert differences(read_hf(tmp_path / "out"), filled(language())) == []


def test_inspect_sees_the_language_model(tmp_path: Path) -> None:
    content = respelled(filled(language()), "language_model.") | filled(TOWER)
    src = write_small_hf(tmp_path / "src", nested(), content)
    found = convtools.inspect(src)
    assert (found.family, found.layers, found.pattern) == ("llama", 6, "*- x 6")
    assert found.architectures == ("LlavaForConditionalGeneration",)
