"""Agreement with transformers: it saves what our tables say, and after a journey it is the same model.

A tiny random model of every architecture that transformers has: each tensor that it saves is in the
table under its name and shape, and no other; through either Megatron format and back, the files are
the same byte for byte, transformers loads them without a complaint, and the logits are bitwise the same.
"""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import convtools
from convtools.conversion.api import open_source
from tests.convert.small import files
from tests.families.tiny_configs import TINY, Config
from tests.tensors import differences, read_hf

pytestmark = [
    # transformers, and torch through it, warn of their own future
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers.*"),
]

NATIVE = [name for name, tiny in TINY.items() if tiny.native]
CASES = [(name, i) for name in NATIVE for i in range(len(TINY[name].variants))]
IDS = [f"{name} {i}" for name, i in CASES]
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""Plain loops over heads and experts: grouped kernels want sizes that are multiples of 16 bytes."""
LAYOUT = {"tp": 2, "pp": 2, "ep": 2, "etp": 1}
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 35], [8, 9, 7, 9, 3, 2, 3, 8, 4, 36]]


@pytest.fixture(scope="module")
def hf() -> Iterator[ModuleType]:
    """transformers, which is never to ask the network for anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        transformers = pytest.importorskip("transformers")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        yield transformers


def made(hf: ModuleType, architecture: str, changes: Config, dtype: str) -> Any:
    """A random model; all that it would save is random, so that no two tensors could be swapped unseen."""
    import torch

    fields = TINY[architecture].config | changes
    config = hf.AutoConfig.for_model(**fields)
    model = getattr(hf, architecture)._from_config(config, dtype=getattr(torch, dtype), **EAGER)
    generator = torch.Generator().manual_seed(len(architecture))
    for name, tensor in model.state_dict().items():
        assert tensor.is_floating_point(), f"{name} is {tensor.dtype}: no table expects that"
        tensor.copy_(torch.empty(tensor.shape).normal_(0.1, 0.4, generator=generator))
        if name.endswith("linear_attn.norm.weight"):  # where 1 comes off and on exactly
            tensor.copy_(torch.empty(tensor.shape).uniform_(0.5, 2, generator=generator))
    return model.eval()


def logits(hf: ModuleType, architecture: str, root: Path) -> Any:
    """What the saved model says to TOKENS; loading it must leave nothing to be remarked."""
    import torch

    model, info = getattr(hf, architecture).from_pretrained(
        root, dtype="auto", output_loading_info=True, **EAGER
    )
    assert {key: list(found) for key, found in info.items() if found} == {}
    with torch.no_grad():
        out = model.eval()(torch.tensor(TOKENS), use_cache=False).logits
    assert out.isfinite().all()
    return out


def options(to: str, **more: Any) -> convtools.Options:
    return convtools.Options(to=to, fsync=False, workers=1, **more)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("architecture", "variant"), CASES, ids=IDS)
def test_the_same_model_after_a_journey(
    hf: ModuleType, architecture: str, variant: int, dtype: str, tmp_path: Path
) -> None:
    import torch

    tiny, src = TINY[architecture], tmp_path / "src"
    model = made(hf, architecture, tiny.variants[variant], dtype)
    model.save_pretrained(src, max_shard_size="20KB" if dtype == "float32" else "5GB")
    held = read_hf(src)
    assert len({data for _, _, data in held.values()}) == len(held), "two tensors that could be swapped"

    # the names and shapes that the table says, and in fp32 just what the entry says
    source = open_source(src)
    copies = {copy.name: source.table.hf[copy.of] for copy in source.model.copies()}
    assert dict(source.table.hf) | copies == {name: shape for name, (_, shape, _) in held.items()}
    usual = {"bfloat16": "BF16", "float32": "F32"}[dtype]
    wider = {name for name, (found, _, _) in held.items() if found != usual}
    assert wider == {n for n in held if n.endswith(tiny.fp32)} if usual == "BF16" else not wider

    with torch.no_grad():
        before = model(torch.tensor(TOKENS), use_cache=False).logits
    assert torch.equal(before, logits(hf, architecture, src))
    for to in ("torch_dist", "torch"):
        there, back = tmp_path / to, tmp_path / f"{to} back"
        convtools.convert(src, there, options(to, **LAYOUT, mixed_dtypes=bool(wider)))
        convtools.convert(there, back, options("hf", mixed_dtypes=bool(wider)))
        assert differences(held, read_hf(back)) == []
        assert files(src) == files(back)
        assert torch.equal(before, logits(hf, architecture, back))


def test_no_two_of_its_sizes_are_equal() -> None:
    """Equal sizes would hide a transpose. Heads and such may repeat; what tensors are made of may not."""
    wide = ("hidden_size", "vocab_size", "intermediate_size", "moe_intermediate_size")
    for name, tiny in TINY.items():
        sizes = [tiny.config[field] for field in wide if field in tiny.config]
        if {"head_dim", "num_attention_heads"} <= tiny.config.keys():
            sizes.append(tiny.config["head_dim"] * tiny.config["num_attention_heads"])
        assert len(set(sizes)) == len(sizes), name


def test_which_architectures_transformers_has(hf: ModuleType) -> None:
    """An entry that says it has none is checked by no model: it must be true."""
    assert [name for name in TINY if hasattr(hf, name)] == NATIVE
