"""What the engine holds: proved when it starts, poisoned where it may be a mix, flushed with every push."""

import doctest
from pathlib import Path
from typing import Any

import pytest

from convtools.engine import places
from convtools.engine.loading import check_covered, load, prove
from convtools.engine.prefixes import PrefixCache
from convtools.engine.reference import ReferenceEngine
from convtools.errors import CheckpointError, ConvtoolsError, UsageError
from convtools.refit.errors import NotServing, RefitError
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from convtools.stores.hf import open_hf
from tests.engine.checkpoints import make, rewrite, tensors

PROMPT = [3, 1, 4, 1, 5]


def torn(engine: ReferenceEngine, source: dict[str, Any]) -> None:
    """A push that fails after it has written most of the model."""
    import torch

    broken = {n: t.clone() for n, t in source.items()}
    list(broken.values())[-1].view(-1)[-1] = torch.nan
    with (
        WeightSync(broken, [LocalSink(engine.refit_dir)], bucket_bytes=1024) as sync,
        pytest.raises(RefitError, match="NaN"),
    ):
        sync.push(1)


def test_poisoned_it_never_answers_until_a_full_push(llamas: tuple[Path, Path]) -> None:
    with ReferenceEngine(llamas[0], mode="in-place", wait=5) as engine:
        source = tensors(llamas[1])
        torn(engine, source)
        assert (engine.state, engine.version) == ("poisoned", 0)
        with pytest.raises(NotServing, match=r"may hold a mix.*(\n.*)*push all weights"):
            engine.generate(PROMPT)
        assert engine.info()["reason"]
        with WeightSync(source, [LocalSink(engine.refit_dir)]) as sync:
            sync.push(2)
            assert sync.verify().equal
        with ReferenceEngine(llamas[1], version=2) as fresh:
            assert engine.generate(PROMPT) == fresh.generate(PROMPT)


@pytest.mark.parametrize("mode", ["shadow", "in-place-undo"])
def test_a_push_that_fails_changes_no_answer(mode: str, llamas: tuple[Path, Path]) -> None:
    with ReferenceEngine(llamas[0], mode=mode) as engine:
        before = engine.generate(PROMPT)
        torn(engine, tensors(llamas[1]))
        assert (engine.state, engine.generate(PROMPT)) == ("clean", before)
        engine.prefixes.flush()
        assert engine.generate(PROMPT) == before


def test_a_push_forgets_prompts(llamas: tuple[Path, Path]) -> None:
    with ReferenceEngine(llamas[1]) as fresh:
        wanted = fresh.generate(PROMPT)
    with (
        ReferenceEngine(llamas[0]) as engine,
        WeightSync(str(llamas[1]), [LocalSink(engine.refit_dir)]) as sync,
    ):
        before = engine.generate(PROMPT)
        assert (len(engine.prefixes), engine.prefixes.hits) == (1, 0)
        assert engine.generate(PROMPT) == before and engine.prefixes.hits == 1
        assert sync.push(1).sinks[0].flushed
        assert len(engine.prefixes) == 0
        after = engine.generate(PROMPT)
        assert (after.ids, after.logprobs) == (wanted.ids, wanted.logprobs)


def test_without_a_flush_a_stale_prompt_shows(llamas: tuple[Path, Path]) -> None:
    """Not how to do it, but proof that what is flushed is what would have been wrong."""
    with ReferenceEngine(llamas[1]) as fresh:
        wanted = fresh.generate(PROMPT)
    with ReferenceEngine(llamas[0]) as engine:
        before = engine.generate(PROMPT)
        with WeightSync(str(llamas[1]), [LocalSink(engine.refit_dir)], flush=False) as sync:
            report = sync.push(1)
        assert "flush" in report.unchecked and not report.sinks[0].flushed
        after = engine.generate(PROMPT)
        assert after.logprobs[0][0] == before.logprobs[0][0], "the first token is still the old weights'"
        assert after.logprobs != wanted.logprobs
        engine.prefixes.flush()
        assert engine.generate(PROMPT).logprobs == wanted.logprobs


def test_prompts_make_room_for_one_another() -> None:
    cache = PrefixCache(tokens=10)
    for i in range(6):
        cache.put(((i, i), (i,)), i, [i])
    assert [cache.get(((i, i), (i,))) for i in (0, 2)] == [None, None]
    found = cache.get(((3, 3), (3,)))
    assert found == (3, [3]) and len(cache) == 3
    found[1].append(0)
    assert cache.get(((3, 3), (3,))) == (3, [3]), "what the caller does with it stays with him"
    cache.put((tuple(range(11)),), 0, 0)
    assert len(cache) == 3
    cache.put(((3, 3), (3,)), 4, [4])
    assert len(cache) == 3 and cache.get(((3, 3), (3,))) == (4, [4])


def test_a_checkpoint_that_does_not_fill_the_model_is_refused(
    tmp_path: Path, llamas: tuple[Path, Path]
) -> None:
    named = tensors(llamas[0])
    del named["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"does not fill\n.*\n.*`model.layers.1.mlp.up_proj.weight`$"):
        load(rewrite(llamas[0], tmp_path / "less", named))


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    root = make(tmp_path / "m", "Qwen3MoeForCausalLM", 1)
    named = tensors(root)
    del named["model.layers.0.mlp.experts.5.gate_proj.weight"]
    with pytest.raises(ConvtoolsError):
        load(rewrite(root, tmp_path / "less", named))


def test_a_tensor_without_a_place_is_refused(tmp_path: Path, llamas: tuple[Path, Path]) -> None:
    named = tensors(llamas[0])
    named["model.layers.0.self_attn.gate.weight"] = named["model.norm.weight"].clone()
    with pytest.raises(CheckpointError, match=r"no place for\n.*\n.*`model.layers.0.self_attn.gate.weight`$"):
        load(rewrite(llamas[0], tmp_path / "more", named))


def test_a_map_that_is_wrong_does_not_prove(llamas: tuple[Path, Path]) -> None:
    loaded, stored = load(llamas[0]), open_hf(llamas[0])
    prove(loaded.named, stored)
    one, two = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    views = dict(loaded.named)
    views[one], views[two] = views[two], views[one]
    with pytest.raises(CheckpointError, match="mapped back") as caught:
        prove(views, stored)
    assert f"`{one}` has other bytes" in str(caught.value) and f"`{two}` has other bytes" in str(caught.value)
    views = dict(loaded.named) | {one: loaded.named[one].t()}
    with pytest.raises(CheckpointError, match=r"mlp.gate_proj.weight` is bfloat16 \["):
        prove(views, stored)
    square = "model.layers.0.self_attn.q_proj.weight"
    views = dict(loaded.named) | {square: loaded.named[square].t().contiguous().t()}
    with pytest.raises(CheckpointError, match=r"q_proj.weight` is not contiguous"):
        prove(views, stored)
    own = dict(loaded.model.state_dict(keep_vars=True))
    check_covered(loaded.named, own, stored)
    with pytest.raises(CheckpointError, match="does not fill"):
        check_covered({n: t for n, t in loaded.named.items() if n != one}, own, stored)
    with pytest.raises(CheckpointError, match="same memory"):
        check_covered(dict(loaded.named) | {"half": loaded.named[one][:3]}, own, stored)


def test_the_examples_of_places() -> None:
    found = doctest.testmod(places)
    assert found.attempted == 1 and found.failed == 0


def test_numbers_are_kept_in_the_dtype_of_the_file(tmp_path: Path) -> None:
    """transformers makes the router of a bf16 file fp32, and the A_log of a file that has it in fp32 bf16."""
    import torch

    root = make(tmp_path / "m", "NemotronHForCausalLM", 1)
    named = tensors(root)
    gate, decay = "backbone.layers.1.mixer.gate.weight", "backbone.layers.0.mixer.A_log"
    assert (named[gate].dtype, named[decay].dtype) == (torch.float32, torch.bfloat16)
    named[gate] = named[gate].to(torch.bfloat16)
    named[decay] = named[decay].float() + 1e-5
    with ReferenceEngine(rewrite(root, tmp_path / "mixed", named)) as engine:
        held = engine.loaded.named
        assert (held[gate].dtype, held[decay].dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(held[decay], named[decay])
        with WeightSync(named, [LocalSink(engine.refit_dir)]) as sync:
            assert sync.verify().equal and sync.check().ok
        assert len(engine.generate(PROMPT).ids[0]) == 16


def test_dtypes_that_do_not_compute_are_refused_at_the_start(
    tmp_path: Path, llamas: tuple[Path, Path]
) -> None:
    named = tensors(llamas[0])
    name = "model.layers.0.mlp.up_proj.weight"
    named[name] = named[name].float() + 1e-5
    with pytest.raises(UsageError, match="as they are stored"):
        load(rewrite(llamas[0], tmp_path / "mixed", named))


def test_what_transformers_cannot_load(tmp_path: Path, llamas: tuple[Path, Path]) -> None:
    strange = rewrite(llamas[0], tmp_path / "strange", tensors(llamas[0]))
    (strange / "config.json").write_text('{"model_type": "no such", "architectures": ["NoSuch"]}')
    with pytest.raises(UsageError, match="transformers cannot load it"):
        load(strange)
    with pytest.raises(UsageError, match="there is no folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no such mode"):
        ReferenceEngine(llamas[0], mode="shade")
