"""Names of modules in `quantization_config`: whatever the entry, the kept modules are treated as before."""

import fnmatch
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from convtools.errors import ConfigError
from convtools.slicing.layers import Layers, find_layers
from convtools.slicing.module_names import renumber_modules
from tests.convert.small import filled, write_small_hf
from tests.slicing.cutting import cut

PARTS = (
    "self_attn.q_proj",
    "self_attn.o_proj",
    "mlp.down_proj",
    "mlp.experts.0.up_proj",
    "mlp.experts.10.up_proj",
)
PREFIXES = ("model.layers.", "backbone.layers.", "model.language_model.layers.", "transformer.h.")


def model(
    count: int, prefix: str = "model.layers.", tail: int = 0, mtp: bool = False
) -> tuple[Layers, tuple[str, ...]]:
    names = [f"{prefix}{i}.{part}.weight" for i in range(count + tail) for part in PARTS]
    names += ["lm_head.weight", "model.embed_tokens.weight"]
    names += [f"mtp.layers.{i}.{part}.weight" for i in range(2) for part in PARTS] if mtp else []
    config = {"num_hidden_layers": count, "num_nextn_predict_layers": tail}
    return find_layers(names, config), tuple(names)


def renumbered(entries: Any, keep: list[int], count: int = 12, **options: Any) -> Any:
    prefix, tail, mtp = (
        options.pop(k, d) for k, d in (("prefix", "model.layers."), ("tail", 0), ("mtp", False))
    )
    layers, names = model(count, prefix, tail, mtp)
    return renumber_modules(entries, layers, keep, names, **options)


@pytest.mark.parametrize(
    ("entries", "keep", "want"),
    [
        # exact names; layer 1 is no prefix of 10
        (["model.layers.1.mlp", "model.layers.10.mlp", "lm_head"], [10, 3], ["model.layers.0.mlp",
         "lm_head"]),
        (["model.layers.1"], [0, 10, 11], []),
        (["model.layers.1"], [0, 1, 11], ["model.layers.1"]),
        (["layers.1.mlp", "layers.11.mlp"], [11], ["layers.0.mlp"]),
        (["model.layers.2.self_attn*"], [5, 2], ["model.layers.1.self_attn*"]),
        (["model.layers.2.self_attn"], [2, 2], ["model.layers.0.self_attn", "model.layers.1.self_attn"]),
        # regular expressions with a number
        ([r"re:model\.layers\.3\.mlp\..*"], [4, 3], [r"re:model\.layers\.1\.mlp\..*"]),
        ([r"re:.*layers\.3\..*"], [4], []),
        (["re:^model.layers.3$"], [3], ["re:^model.layers.0$"]),
        # patterns of all layers stay as they are
        ([r"re:.*mlp.*", "*.q_proj", "model.layers.*.mlp.*", "lm_head"], [3],
         [r"re:.*mlp.*", "*.q_proj", "model.layers.*.mlp.*", "lm_head"]),
        ([r"re:model\.layers\.\d+\.mlp.*"], [7, 3], [r"re:model\.layers\.\d+\.mlp.*"]),
        # patterns of some layers are named out
        ([r"re:model\.layers\.[0-4]\.self_attn\.q_proj$"], [4, 5], ["model.layers.0.self_attn.q_proj"]),
        (["model.layers.1?.mlp.down_proj"], [1, 11], ["model.layers.1.mlp.down_proj"]),
        ([r"re:model\.layers\.(1|2)\.mlp\.down_proj$"], [5, 6], []),
    ],
)  # fmt: skip
def test_entries(entries: list[str], keep: list[int], want: list[str]) -> None:
    assert renumbered(entries, keep) == want


def test_keys_are_renumbered_too() -> None:
    quantized = {
        "quant_algo": "MIXED", "kv": None, "exclude": ["model.layers.1.*", "model.layers.11.*"],
        "quantized_layers": {
            "model.layers.1.mlp.down_proj": {"quant_algo": "FP8"},
            "model.layers.11.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
            "lm_head": {"quant_algo": "FP8"},
        },
    }  # fmt: skip
    made = renumbered(quantized, [11, 0])
    assert made == {
        "quant_algo": "MIXED", "kv": None, "exclude": ["model.layers.0.*"],
        "quantized_layers": {
            "model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
            "lm_head": {"quant_algo": "FP8"},
        },
    }  # fmt: skip
    assert list(made) == list(quantized)


def test_mtp_entries_go_with_the_head() -> None:
    entries = [
        "mtp.layers.0.self_attn.q_proj",
        "re:^mtp\\..*",
        "mtp*",
        "mtp",
        "model.layers.12.mlp.down_proj",
        "lm_head",
    ]
    assert renumbered(entries, [5], tail=1, mtp=True) == [
        *entries[:4],
        "model.layers.1.mlp.down_proj",
        "lm_head",
    ]
    assert renumbered(entries, [5], tail=1, mtp=True, drop_mtp=True) == ["lm_head"]
    assert renumbered(["model.layers.5.mlp", "mtp.layers.5.mlp"], [5], mtp=True) == [
        "model.layers.0.mlp",
        "mtp.layers.5.mlp",
    ]


def test_a_glob_without_a_dot_means_more_layers_than_it_seems() -> None:
    """Engines take `layers.1*` for 10 and 11, too: what they ignored stays ignored, by name."""
    assert renumbered(["model.layers.1*"], [11, 0]) == [f"model.layers.0.{part}" for part in PARTS]
    assert renumbered(["model.layers.1*"], [0, 11]) == ["model.layers.1*"]
    assert renumbered(["model.layers.1*"], [0, 2]) == []


TOWER = tuple(f"vision_tower.encoder.layers.{i}.fc1.weight" for i in range(12))


@pytest.mark.parametrize(
    "entry", ["vision_tower.encoder.layers.9.fc1", r"re:vision_tower\.encoder\.layers\.9\..*",
     "mtp.layers.9.fc1",
              r"re:.*vision.*layers\.[0-9]\..*", "vision_tower.encoder.layers.*",
               "model.visual.blocks.3.fc1"],
)  # fmt: skip
def test_other_stacks_have_numbers_of_their_own(entry: str) -> None:
    layers, names = model(12)
    assert renumber_modules([entry], layers, [3], names + TOWER) == [entry]


@pytest.mark.parametrize(
    "entry", [r"re:model.layers.(a+)+$", r"re:.*.*.*.*.*layers\.[", "re:(", r"re:layers\.(.*)*x"]
)
def test_costly_and_damaged_patterns_are_refused_at_once(entry: str) -> None:
    began = time.monotonic()
    if entry == "re:(":
        assert renumbered([entry], [1]) == [entry], "it says nothing of layers"
        return
    with pytest.raises(ConfigError, match="cannot be renumbered"):
        renumbered([entry], [1])
    assert time.monotonic() - began < 1


def ignored(entries: list[str], module: str) -> bool:
    """As engines read such a list: names, beginnings of names, globs and regular expressions."""
    for entry in entries:
        if entry.startswith("re:"):
            if re.match(entry[3:], module):
                return True
        elif any(c in entry for c in "*?["):
            if fnmatch.fnmatchcase(module, entry):
                return True
        elif module == entry or module.startswith(entry + "."):
            return True
    return False


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, list[int], list[str]]:
    prefix = draw(st.sampled_from(PREFIXES))
    count = draw(st.integers(1, 13))
    keep = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=5))
    part = st.sampled_from([*PARTS, "self_attn", "mlp", "mlp.experts.0"])
    layer = st.integers(0, 13)
    escaped = prefix.replace(".", r"\.")
    entry = st.one_of(
        st.builds(lambda i, p: f"{prefix}{i}.{p}", layer, part),
        st.builds(lambda i: f"{prefix}{i}", layer),
        st.builds(lambda i, p: f"{prefix}{i}.{p}*", layer, part),
        st.builds(lambda i: f"{prefix}{i}.*", layer),
        st.builds(lambda i: f"{prefix}{i}*", layer),
        st.builds(lambda i: f"*.{i}.mlp.*", layer),
        st.builds(lambda p: f"{prefix}*.{p}", part),
        st.builds(lambda i, p: rf"re:{escaped}{i}\.{p}.*", layer, part),
        st.builds(lambda i: rf"re:.*layers\.{i}\..*", layer),
        st.builds(lambda a, b, p: rf"re:{escaped}({a}|{b})\.{p}.*", layer, layer, part),
        st.builds(lambda a, b: rf"re:{escaped}[{min(a, b, 9)}-9]\.mlp.*", layer, layer),
        st.builds(lambda p: rf"re:.*\.{p}$", part),
        st.builds(lambda i: rf"re:{escaped}{i}", layer),
        st.builds(lambda i: rf"re:{escaped}{i}.*", layer),
        st.builds(lambda i, p: f"re:{prefix}{i}.{p}", layer, part),
        st.builds(lambda a, b, p: rf"re:{escaped}{a}\.{p}|{escaped}{b}\.{p}", layer, layer, part),
        st.builds(lambda i: rf"re:.*\.{i}\.mlp.*", layer),
        st.sampled_from(
            [r"re:.*experts.*", "lm_head", "*lm_head", r"re:.*lm_head", "*", "re:.*", "*.experts.1*"]
        ),
    )
    return prefix, count, keep, draw(st.lists(entry, max_size=5))


@given(cases())
def test_a_kept_module_is_treated_as_in_the_source_b55(case: tuple[str, int, list[int], list[str]]) -> None:
    prefix, count, keep, entries = case
    layers, names = model(count, prefix)
    after = renumber_modules(entries, layers, keep, names)
    for new, old in enumerate(keep):
        for part in PARTS:
            assert ignored(after, f"{prefix}{new}.{part}") == ignored(entries, f"{prefix}{old}.{part}"), (
                part,
                new,
                after,
            )
    for module in ("lm_head", "model.embed_tokens"):
        assert ignored(after, module) == ignored(entries, module)


def test_the_file_beside_the_config_b55(tmp_path: Path) -> None:
    """ModelOpt's own file, and the config: both are cut."""
    content = filled({f"model.layers.{i}.mlp.up_proj.weight": ("BF16", (3, 5)) for i in range(12)})
    config = {
        "num_hidden_layers": 12,
        "quantization_config": {"ignore": ["model.layers.1.mlp*", "model.layers.11.mlp*"]},
    }
    src = write_small_hf(tmp_path / "src", config, content)
    theirs = {"quantization": {"quant_algo": None, "exclude_modules": ["model.layers.11.*", "lm_head"]}}
    (src / "hf_quant_config.json").write_text(json.dumps(theirs))
    cut(src, tmp_path / "out", layers="10,11")
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"] == {
        "ignore": ["model.layers.1.mlp*"]
    }
    made = json.loads((tmp_path / "out/hf_quant_config.json").read_text())
    assert made["quantization"]["exclude_modules"] == ["model.layers.1.*", "lm_head"]
