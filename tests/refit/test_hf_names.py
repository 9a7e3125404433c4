"""What a transformers model holds, under the names and in the dtypes of the checkpoint it writes itself."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import convtools
from convtools.errors import AccountingError, CheckpointError, ConvtoolsError, UsageError
from convtools.layout.region import Region
from convtools.refit.applier import ShadowApplier
from convtools.refit.hf_places import Place, part_of, region_of
from convtools.refit.receiver import Receiver
from convtools.refit.sinks.base import DirectSink
from convtools.refit.sync import WeightSync
from convtools.refit.weights import TensorWeights
from tests.refit.hf_models import CONFIGS, model_of, saved


class Policy(torch.nn.Module):
    """A model with a value head, as trainers write them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.policy, self.v_head = model, torch.nn.Linear(16, 1)


def differing(ours: dict[str, Any], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names that one side has only, and tensors that are not the same bytes."""
    odd = set(ours) ^ set(theirs)
    return sorted(odd | {n for n in set(ours) - odd if ours[n].dtype != theirs[n].dtype
                         or not torch.equal(ours[n], theirs[n])})  # fmt: skip


def storages(tensors: Any) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_bytes_are_those_that_transformers_writes(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    theirs = saved(model, tmp_path)
    ours = convtools.hf_tensors(model, tmp_path)
    assert differing(ours, theirs) == []
    assert storages(ours.values()) <= storages(model.state_dict().values()), "views, no copies"
    assert differing(convtools.hf_tensors(model.state_dict(), str(tmp_path)), theirs) == []
    first = next(n for n in ours if n.endswith("layers.1.self_attn.o_proj.weight") or ".experts.2.up" in n)
    with torch.no_grad():
        ours[first].zero_()
    assert differing(convtools.hf_tensors(model, tmp_path), theirs) == [first]


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "GptOss"])
def test_a_config_gives_the_same_names(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    config = model.config.to_dict()
    assert differing(convtools.hf_tensors(model, config), saved(model, tmp_path)) == []


@pytest.mark.parametrize("name", CONFIGS)
def test_floats_are_cast_where_the_checkpoint_says_so(name: str, tmp_path: Path) -> None:
    """A router's bias of Nemotron-H is float32 in memory and on disk."""
    model = model_of(name)
    theirs = saved(model, tmp_path, torch.bfloat16)
    ours = convtools.hf_tensors(model, tmp_path, dtype=torch.bfloat16)
    assert differing(ours, theirs) == []
    kept = {n for n, t in ours.items() if t.dtype == torch.float32}
    bias = {"backbone.layers.1.mixer.gate.e_score_correction_bias"}
    assert kept == (bias if name == "NemotronH" else set())


def test_a_config_tells_some_dtypes_only(tmp_path: Path) -> None:
    llama, nemotron = model_of("Llama"), model_of("NemotronH")
    ours = convtools.hf_tensors(llama, llama.config.to_dict(), dtype=torch.bfloat16)
    assert differing(ours, saved(llama, tmp_path, torch.bfloat16)) == []
    with pytest.raises(UsageError, match=r"does not tell whether `backbone.layers.0.mixer.A_log` is kept"):
        convtools.hf_tensors(nemotron, nemotron.config.to_dict(), dtype=torch.bfloat16)


def wrapped(how: str, model: Any, tmp_path: Path) -> Any:
    if how == "compiled layer":
        model.model.layers[0] = torch.compile(model.model.layers[0])
        return model
    if how == "compile":
        return torch.compile(model)
    if how == "activation checkpointing":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
        return model.model  # and without a head of its own: what is missing is said below
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        return torch.compile(ddp) if how == "compiled ddp" else ddp
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "how", ["compile", "compiled layer", "ddp", "compiled ddp", "activation checkpointing"]
)
def test_wrappers_are_taken_off(how: str, tmp_path: Path) -> None:
    model = model_of("Qwen3Moe")
    theirs = saved(model, tmp_path / "ckpt")
    named = wrapped(how, model, tmp_path)
    assert set(named.state_dict()) != set(model_of("Qwen3Moe").state_dict())
    if how == "activation checkpointing":
        ours = convtools.hf_tensors(named, tmp_path / "ckpt", leave_out="lm_head.*")
        del theirs["lm_head.weight"]
    else:
        ours = convtools.hf_tensors(named, tmp_path / "ckpt")
    assert differing(ours, theirs) == []


def test_a_model_inside_another_module(tmp_path: Path) -> None:
    """What lies outside is left out by name, never silently."""
    model = model_of("Qwen3Moe")
    theirs = saved(model, tmp_path)
    policy = torch.compile(Policy(torch.compile(model)))
    ours = convtools.hf_tensors(policy, tmp_path, prefix="policy.", leave_out=["v_head.*"])
    assert differing(ours, theirs) == []

    def refused(**options: Any) -> str:
        with pytest.raises(ConvtoolsError) as error:
            convtools.hf_tensors(policy, tmp_path, **options)
        return f"{type(error.value).__name__}: {error.value}"

    assert re.search(r"AccountingError: .*what to do: prefix=\"policy.\"", refused(), re.S)
    outside = refused(prefix="policy.")
    assert re.search(r"UsageError: tensors outside `policy.`.*`v_head.weight`, `v_head.bias`", outside, re.S)
    assert 'leave_out=["v_head.*"]' in outside
    assert "no tensor's name begins with `actor.`" in refused(prefix="actor.")
    idle = refused(prefix="policy.", leave_out=["v_head.*", "critic.*"])
    assert re.search(r"nothing is there to leave out.*`critic.\*`", idle, re.S)


@pytest.mark.parametrize("both", [False, True])
def test_tied_names_stay_tied(both: bool, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = model_of("Llama", tie_word_embeddings=True)
    theirs = saved(model, tmp_path, torch.bfloat16)
    assert "lm_head.weight" not in theirs
    if both:
        theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"].clone()
        save_file(theirs, tmp_path / "model.safetensors", {"format": "pt"})
    ours = convtools.hf_tensors(model, tmp_path, dtype=torch.bfloat16)
    assert differing(ours, theirs) == []
    if both:
        assert ours["lm_head.weight"].data_ptr() == ours["model.embed_tokens.weight"].data_ptr()
    untied = model_of("Llama")
    if not both:
        with pytest.raises(AccountingError, match=r"`lm_head.weight` has 384 elements that the checkpoint"):
            convtools.hf_tensors(untied, tmp_path)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    model = model_of("Qwen3Moe")
    saved(model, tmp_path)
    state = model.state_dict()

    def refused(state: Any, **options: Any) -> str:
        with pytest.raises(AccountingError) as error:
            convtools.hf_tensors(state, tmp_path, **options)
        return str(error.value.found)

    norm, fused = "model.layers.1.input_layernorm.weight", "model.layers.0.mlp.experts.gate_up_proj"
    assert refused({n: t for n, t in state.items() if n != norm}) == f"not in the model: `{norm}`"
    assert refused(state | {"x": torch.ones(3)}) == "`x` has 3 elements that the checkpoint has not"
    assert refused(state | {norm: torch.ones(3)}) == f"`{norm}` is [3] in the model, not [16]"
    one_more = torch.zeros(6, 12, 16)
    assert refused(state | {fused: one_more}) == f"`{fused}` has 192 elements that the checkpoint has not"
    fewer = refused(state | {fused: one_more[:4]})
    assert fewer == ", ".join(
        f"not in the model: `{fused.replace('gate_up_proj', f'4.{n}_proj.weight')}`" for n in ("gate", "up")
    )
    gone = refused(state, leave_out=["*.layers.0.mlp.experts.3.gate_proj.weight"])
    assert gone == f"`{fused}` has 96 elements that the checkpoint has not"
    left = convtools.hf_tensors(model, tmp_path, leave_out=["model.layers.0.mlp.experts.*"])
    assert not any(".0.mlp.experts" in n for n in left) and any(".1.mlp.experts" in n for n in left)


def test_what_transformers_does_not_hold(tmp_path: Path) -> None:
    """MTP, and the scales of quantized experts: refused by name; left out if one says so."""
    from safetensors.torch import save_file

    model = model_of("Llama")
    more = {"mtp.layers.0.enorm.weight": torch.ones(4), "model.layers.0.mlp.down_proj_scales": torch.ones(3)}
    theirs = saved(model, tmp_path)
    save_file(theirs | more, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(AccountingError) as error:
        convtools.hf_tensors(model, tmp_path)
    assert set(str(error.value.found).split(", ")) == {f"not in the model: `{n}`" for n in more}
    assert differing(convtools.hf_tensors(model, tmp_path, leave_out=["mtp.*", "*_scales"]), theirs) == []
    adapters = model.state_dict() | {"model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 2)}
    with pytest.raises(AccountingError, match="merge the adapters into the weights first"):
        convtools.hf_tensors(adapters, tmp_path, leave_out=["mtp.*", "*_scales"])


def test_a_dtype_that_nothing_has_is_refused(tmp_path: Path) -> None:
    model = model_of("Llama")
    saved(model, tmp_path)
    with pytest.raises(UsageError, match="the checkpoint has no tensor of BF16"):
        convtools.hf_tensors(model, tmp_path, dtype=torch.bfloat16)
    for dtype in (torch.int8, "bfloat16"):
        with pytest.raises(UsageError, match="no dtype to cast to"):
            convtools.hf_tensors(model, tmp_path, dtype=dtype)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="cannot read the checkpoint folder"):
        convtools.hf_tensors(model, tmp_path / "none")
    with pytest.raises(UsageError, match="no checkpoint"):
        convtools.hf_tensors(model, None)
    with pytest.raises(UsageError, match="no module and no named tensors"):
        convtools.hf_tensors(3, tmp_path)


def test_masters_in_float32_are_pushed_to_an_engine_of_bfloat16(tmp_path: Path) -> None:
    model = model_of("Qwen3Moe")
    theirs = saved(model, tmp_path, torch.bfloat16)
    engine = {n: t.clone() for n, t in theirs.items()}
    sinks = [DirectSink(Receiver(ShadowApplier(TensorWeights(engine))))]
    source = torch.compile(model)
    with WeightSync(lambda: convtools.hf_tensors(source, tmp_path, dtype=torch.bfloat16), sinks) as sync:
        assert sync.verify().equal, "before anything was pushed"
        for tensor in engine.values():
            tensor.zero_()
        assert sync.push(1).version == 1 and sync.verify().equal
        assert differing(engine, theirs) == []
        with torch.no_grad():
            model.model.layers[1].mlp.experts.down_proj[3] += 1
        sync.push(2)
    assert differing(engine, theirs) == ["model.layers.1.mlp.experts.3.down_proj.weight"]
    with pytest.raises(ConvtoolsError, match=r"convtools\.hf_tensors\(model, checkpoint, dtype="):
        WeightSync(model, sinks).push(3)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    """A shape, and the regions that a grid cuts it into; some are empty."""
    shape = draw(st.integers(1, 5)), 2 * draw(st.integers(1, 4)), draw(st.integers(1, 4))
    grid: list[list[tuple[int, int]]] = []
    for n in shape:
        at = sorted([0, *draw(st.lists(st.integers(0, n), max_size=2)), n])
        grid.append(list(pairwise(at)))
    corners = [(a, b, c) for a in grid[0] for b in grid[1] for c in grid[2]]
    return shape, [Region(tuple(x for x, _ in c), tuple(y - x for x, y in c)) for c in corners]


@settings(max_examples=150, deadline=None)
@given(cuts(), st.booleans())
def test_parts_of_all_ranks_make_up_every_expert(
    cut: tuple[tuple[int, ...], list[Region]], gated: bool
) -> None:
    """Against slices of the whole, however it is cut."""
    (experts, rows, cols), held = cut
    whole = torch.arange(experts * rows * cols).reshape(experts, rows, cols)
    for expert in range(experts):
        for half in (0, 1) if gated else (None,):
            region = region_of(Place("x", expert, half), (experts, rows, cols))
            assert region is not None
            wanted = whole[expert] if half is None else whole[expert].chunk(2)[half]
            made = torch.full_like(wanted, -1)
            for has in held:
                part = part_of(region, has, 1)
                if part is None:
                    continue
                local = whole[slices(has)][slices(part.local)]
                assert local.shape == (1, *part.region.sizes) and (made[slices(part.region)] == -1).all()
                made[slices(part.region)] = local[0]
            assert torch.equal(made, wanted)
    assert region_of(Place("x", experts), (experts, rows, cols)) is None


def slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(region.offsets, region.ends, strict=True))
