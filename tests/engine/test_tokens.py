"""Its tokens are transformers' own, and after a push those of an engine started on the new weights."""

from pathlib import Path
from typing import Any

import pytest

from convtools.engine.reference import ReferenceEngine
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from tests.engine.checkpoints import EAGER, FIXTURE, altered, make, tensors
from tests.families.tiny_configs import TINY

NATIVE = [name for name, tiny in TINY.items() if tiny.native]
LATENT = {"moe_latent_size": 15}
TIED = {"tie_word_embeddings": True}
PUSHED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3 tied": ("Qwen3ForCausalLM", TIED),
    "qwen3 moe": ("Qwen3MoeForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {}),
    "qwen3 next": ("Qwen3NextForCausalLM", {}),
    "deepseek": ("DeepseekV3ForCausalLM", {}),
    "gpt-oss": ("GptOssForCausalLM", {}),
    "nemotron latent": ("NemotronHForCausalLM", LATENT),
}
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 35], [8, 9, 7]]


def answer(engine: ReferenceEngine) -> Any:
    """Greedy tokens of three prompts, two of one length, with logprobs."""
    return engine.generate(PROMPTS, max_new_tokens=8)


def push(engine: ReferenceEngine, source: Path, version: int) -> None:
    with WeightSync(str(source), [LocalSink(engine.refit_dir)], bucket_bytes=4096) as sync:
        sync.push(version)
        assert sync.verify().equal


@pytest.mark.parametrize("architecture", NATIVE)
def test_greedy_tokens_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    import torch
    import transformers

    root = make(tmp_path / "m", architecture, 1)
    with ReferenceEngine(root) as engine:
        made = answer(engine)
    model = getattr(transformers, architecture).from_pretrained(root, dtype="auto", **EAGER)
    for rows, at in ((PROMPTS[:2], (0, 1)), (PROMPTS[2:], (2,))):
        given = torch.tensor(rows)
        out = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=8, do_sample=False,
            eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        wanted = out.sequences[:, given.shape[1] :]
        assert [made.ids[i] for i in at] == wanted.tolist()
        logprobs = torch.log_softmax(torch.stack(out.logits, 1).float(), -1)
        chosen = logprobs.gather(-1, wanted[..., None])[..., 0]
        assert [made.logprobs[i] for i in at] == chosen.tolist()
    assert made.versions == [[0] * 8] * 3


@pytest.mark.parametrize("name", PUSHED)
def test_after_a_push_it_is_a_fresh_engine(name: str, tmp_path: Path) -> None:
    old = make(tmp_path / "old", PUSHED[name][0], 1, PUSHED[name][1])
    new = altered(old, tmp_path / "new")
    with ReferenceEngine(new, version=5) as fresh:
        wanted = answer(fresh)
    with ReferenceEngine(old) as engine:
        before = answer(engine)
        assert before.ids != wanted.ids
        push(engine, new, 5)
        assert answer(engine) == wanted
        assert wanted.versions == [[5] * 8] * 3
        push(engine, old, 6)
        assert (answer(engine).ids, answer(engine).logprobs) == (before.ids, before.logprobs)


def test_what_transformers_does_not_know_is_carried_and_verified(tmp_path: Path) -> None:
    """MTP: no part of any token, and yet pushed, kept and compared to the last bit."""
    mtp = {n for n in tensors(FIXTURE) if n.startswith("mtp.")}
    new = altered(FIXTURE, tmp_path / "new")
    with ReferenceEngine(new) as fresh:
        wanted = answer(fresh)
    with ReferenceEngine(FIXTURE) as engine:
        assert set(engine.info()["carried"]) == mtp and len(mtp) == 32  # type: ignore[call-overload]
        push(engine, new, 1)
        assert answer(engine).ids == wanted.ids
        source = tensors(new)
        with WeightSync(source, [LocalSink(engine.refit_dir)]) as sync:
            assert sync.verify().equal and sync.check().ok
            name = "mtp.layers.1.mixer.experts.7.down_proj.weight"
            source[name].view(-1)[-1] *= -1
            assert sync.verify().differing == {str(engine.refit_dir): (name,)}
            sync.push(2)
            assert sync.verify().equal
        assert answer(engine).ids == wanted.ids


def test_a_tied_head_may_be_pushed_too(tmp_path: Path) -> None:
    old = make(tmp_path / "old", "Qwen3ForCausalLM", 1, TIED)
    new = tensors(altered(old, tmp_path / "new"))
    with ReferenceEngine(old) as engine:
        both = new | {"lm_head.weight": new["model.embed_tokens.weight"].clone()}
        with WeightSync(both, [LocalSink(engine.refit_dir)]) as sync:
            sync.push(1)
        with ReferenceEngine(tmp_path / "new") as fresh:
            assert answer(engine).ids == answer(fresh).ids


def test_drawing(llamas: tuple[Path, Path]) -> None:
    with ReferenceEngine(llamas[0]) as engine:
        drawn = [
            engine.generate([PROMPTS[0]] * 3, max_new_tokens=20, temperature=1, seed=s) for s in (1, 1, 2)
        ]
        assert drawn[0] == drawn[1] != drawn[2]
        assert len({tuple(ids) for ids in drawn[0].ids}) == 3, "each prompt draws its own numbers"
        cold = engine.generate(PROMPTS[0], max_new_tokens=20, temperature=1e-4, seed=1)
        greedy = engine.generate(PROMPTS[0], max_new_tokens=20)
        assert cold == greedy
        stopped = engine.generate(PROMPTS[:2], max_new_tokens=20, stop_ids=[greedy.ids[0][4]])
        assert stopped.ids[0] == greedy.ids[0][: greedy.ids[0].index(greedy.ids[0][4]) + 1]
        assert len(stopped.ids[0]) == len(stopped.logprobs[0]) == len(stopped.versions[0])
