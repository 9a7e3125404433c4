"""Experts by name or fused in one 3-D tensor: what a rank holds is the same, whatever the spelling.

`gate_up_proj [E, 2 * ffn, width]` holds an expert's gate rows, then its up rows. Numbers B15, B16,
B19 and B21 are those of public failures. Random models and layouts are in `test_every_family.py`.
"""

import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convtools
from convtools.errors import AccountingError
from convtools.families.table import Table
from tests.convert.small import filled, read_dist, torch_files, write_small_hf
from tests.families.test_rank_rows import EXPERTS, GROUPED, SEQUENTIAL, Model, numbered
from tests.families.tiny_configs import TINY, described, inventory
from tests.tensors import Content, differences, read_hf, read_rank

EP, ETP_NOT_TP = {"tp": 1, "ep": 3, "etp": 1}, {"tp": 2, "ep": 3, "etp": 1}
ETP2 = {"tp": 2, "ep": 3, "etp": 2}
MOE = [
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "MixtralForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM",
]  # fmt: skip
"""The families of `families/gpt.py` that have experts."""
SMALL: dict[str, Any] = {
    "num_hidden_layers": 3, "num_experts": None, "num_local_experts": 12, "n_routed_experts": None,
    "moe_intermediate_size": 18,
}  # fmt: skip
NAMES = {"MixtralForCausalLM": ("block_sparse_moe.", "w1", "w3", "w2")}
PUBLISHED = ("mlp.", "gate_proj", "up_proj", "down_proj")
LAYER = 2

each_family = pytest.mark.parametrize("architecture", MOE)


def changes(architecture: str) -> dict[str, Any]:
    """12 experts, 18 wide."""
    return SMALL | ({"intermediate_size": 18} if architecture == "MixtralForCausalLM" else {})


class Numbered(Model):
    """A model of a GPT family whose tensors' elements are numbered."""

    def __init__(self, architecture: str, spelling: dict[str, Any]) -> None:
        model = described(architecture, changes(architecture), spelling)
        self.spec = model.spec
        self.table = Table.of(model.family.rows(model.spec, model.spelling, 48))
        self.hf = {n: numbered(i, s) for i, (n, s) in enumerate(self.table.hf.items())}
        for name, shape in self.table.hf.items():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # every row of every expert
                flat = (shape[0] * shape[1], shape[2])
                self.hf[name] = numbered(list(self.table.hf).index(name), flat).reshape(shape)


def halves(model: Numbered, architecture: str, e: int, fused: bool) -> tuple[np.ndarray, ...]:
    """(gate, up, down) of an expert as the file has them."""
    module, *names = NAMES.get(architecture, PUBLISHED)
    at = f"model.layers.{LAYER}."
    if fused:
        both = model.hf[f"{at}mlp.experts.gate_up_proj"][e]
        return both[0:18], both[18:36], model.hf[f"{at}mlp.experts.down_proj"][e]
    return tuple(model.hf[f"{at}{module}experts.{e}.{name}.weight"] for name in names)


@each_family
@pytest.mark.parametrize("fused", [False, True], ids=["by name", "fused"])
@pytest.mark.parametrize(("sizes", "expected"), EXPERTS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_B16_B19_local_expert_i_of_ep_rank_r_is_expert_4r_plus_i(
    architecture: str, fused: bool, sizes: dict[str, int], expected: list[tuple[list[int], slice]]
) -> None:
    """`expected` spells out, rank by rank, the global experts and the part of their width."""
    model = Numbered(architecture, {"fused_experts": fused})
    if "num_attention_heads" in TINY[architecture].config and sizes["tp"] == 4:
        sizes = sizes | {"tp": 2, "etp": 2}
        expected = expected[:2]
    for style, fc in (
        (GROUPED, f"decoder.layers.{LAYER}.mlp.experts.linear_fc{{}}.weight{{}}"),
        (SEQUENTIAL, f"decoder.layers.{LAYER}.mlp.experts.local_experts.{{1}}.linear_fc{{0}}.weight"),
    ):
        for held, (experts, part) in zip(model.ranks(style, **sizes), expected, strict=True):
            for local, e in enumerate(experts):
                gate, up, down = halves(model, architecture, e, fused)
                assert held[fc.format(1, local)].tolist() == [*gate[part].tolist(), *up[part].tolist()]
                assert held[fc.format(2, local)].tolist() == down[:, part].tolist()
            assert fc.format(1, len(experts)) not in held


def fused(content: Content, architecture: str) -> Content:
    """The same experts in 3-D tensors, put together here by hand."""
    module, *names = NAMES.get(architecture, PUBLISHED)
    out: Content = {}
    for name, (dtype, shape, data) in content.items():
        if f".{module}experts." not in name:
            out[name.replace(f".{module}", ".mlp.")] = (dtype, shape, data)
            continue
        at = name.partition(f"{module}experts.")[0]
        if f"{at}mlp.experts.down_proj" in out:
            continue
        gate, up, down = ([content[f"{at}{module}experts.{e}.{n}.weight"] for e in range(12)] for n in names)
        rows, width = gate[0][1]
        both = b"".join(g[2] + u[2] for g, u in zip(gate, up, strict=True))
        out[f"{at}mlp.experts.gate_up_proj"] = (dtype, (12, 2 * rows, width), both)
        out[f"{at}mlp.experts.down_proj"] = (dtype, (12, width, rows), b"".join(d[2] for d in down))
    return out


def shuffled(content: Content) -> Content:
    names = list(content)
    random.Random(5).shuffle(names)
    return {name: content[name] for name in names}


def convert(src: Path, dst: Path, to: str, **more: Any) -> Path:
    convtools.convert(src, dst, convtools.Options(to=to, fsync=False, workers=1, **more))
    return dst


def megatron(root: Path, to: str) -> list[Content]:
    """What Megatron finds there: keys, or a rank after the other."""
    if to == "torch_dist":
        return [read_dist(root / "iter_0000001")[0]]
    return [read_rank(path)[1] for path in torch_files(root / "iter_0000001")]


@each_family
@pytest.mark.parametrize(("to", "sizes"), list(product(["torch_dist", "torch"], [EP, ETP_NOT_TP, ETP2])))
def test_B15_B21_fused_and_by_name_give_the_same_megatron_bytes(
    architecture: str, to: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    """By name the keys come in any order: expert 10 is not the third. Both come back as they came."""
    model = described(architecture, changes(architecture), {})
    by_name = filled(inventory(model), 3)
    forms = {"names": shuffled(by_name), "fused": fused(by_name, architecture)}
    found = {}
    for form, content in forms.items():
        src = write_small_hf(tmp_path / form, dict(model.config), content)
        there = convert(src, tmp_path / f"{form}.{to}", to, **sizes)
        found[form] = megatron(there, to)
        back = convert(there, tmp_path / f"{form}.back", "hf")
        assert differences(content, read_hf(back)) == []
    for a, b in zip(*found.values(), strict=True):
        assert differences(a, b) == []
    stack = f"decoder.layers.{LAYER}.mlp.experts.experts.linear_fc2.weight"
    if to == "torch_dist" and stack in found["fused"][0]:  # row e of the stack is expert e
        assert found["fused"][0][stack][2] == forms["fused"][f"model.layers.{LAYER}.mlp.experts.down_proj"][2]


@each_family
def test_a_fused_file_that_lacks_a_layers_experts_is_refused(architecture: str, tmp_path: Path) -> None:
    """So is one whose layers are spelled in two ways: which of them is right is not for us to say."""
    model = described(architecture, changes(architecture), {})
    content = fused(filled(inventory(model)), architecture)
    lost = f"model.layers.{LAYER}.mlp.experts.gate_up_proj"
    del content[lost]
    src = write_small_hf(tmp_path / "hf", dict(model.config), content)
    with pytest.raises(AccountingError, match=f"missing: `{lost}`"):
        convert(src, tmp_path / "out", "torch_dist")


@each_family
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_both_forms_that_transformers_saves(architecture: str, tmp_path: Path) -> None:
    """`save_original_format=False` writes experts as they are in memory: fused."""
    torch = pytest.importorskip("torch")
    hf = pytest.importorskip("transformers")
    hf.logging.disable_progress_bar()
    config = hf.AutoConfig.for_model(**TINY[architecture].config)
    model = getattr(hf, architecture)._from_config(config, dtype=torch.bfloat16)
    for i, tensor in enumerate(model.state_dict().values()):
        tensor.normal_(generator=torch.Generator().manual_seed(i))
    found, spelled = [], []
    for original in (True, False):
        src = tmp_path / f"hf {original}"
        model.save_pretrained(src, save_original_format=original)
        there = convert(src, tmp_path / f"m {original}", "torch_dist", **EP)
        back = convert(there, tmp_path / f"back {original}", "hf")
        assert differences(read_hf(src), read_hf(back)) == []
        found += megatron(there, "torch_dist")
        spelled.append(any(name.endswith(".mlp.experts.gate_up_proj") for name in read_hf(back)))
    assert spelled == [False, True]
    assert differences(*found) == []
