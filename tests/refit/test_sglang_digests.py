"""SGLang's digests of its own parameters against a checkpoint: never more is said than is known."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import convtools
from convtools.equality.canonical import open_side
from convtools.equality.options import CompareOptions
from convtools.equality.verdict import Comparison
from convtools.errors import UsageError
from convtools.refit.errors import RefitError
from convtools.refit.live_compare import compare_live
from convtools.refit.sinks import sglang_facts
from convtools.refit.sinks.sglang_compare import compare_digests
from convtools.refit.sinks.sglang_facts import Facts
from tests.refit.sglang_models import HEAD, HIDDEN, LAYER, Engine, Named, case, llama_engine, random, together
from tests.refit.sglang_server import SHAPES, FakeSGLang

MEANS = "SGLang's digests of its own parameters (64 bits of SHA-256 each)"


def digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).digest()[:8].hex()


def facts(engine: Engine, architecture: str, **more: Any) -> Facts:
    ranks = tuple({name: digest(tensor) for name, tensor in rank.items()} for rank in engine)
    made = Facts(architecture, len(engine), "BF16", "3", "", ranks, "", (), False)
    return made._replace(**more)


def compared(
    named: Named, said: Facts, config: dict[str, Any] | None = None, engine: str = "b", **options: Any
) -> Comparison:
    side = replace(open_side(named), config=config or {})
    return compare_digests(side, said, "http://e", CompareOptions(**options), engine=engine)


def faulty(found: Comparison) -> dict[str, str]:
    return {r.name: r.verdict for r in found.tensors if r.verdict not in ("identical", "within tolerance")}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "moe", "nemotron 2", "nemotron 4"])
def test_every_tensor_is_found_where_sglang_keeps_it(kind: str, tp: int) -> None:
    """All equal; and one bit of any tensor shows in its own parameter, and in no other."""
    w, engine, architecture, config = case(kind, tp)
    said = facts(engine, architecture)
    found = compared(w, said, config)
    assert (faulty(found), found.equal, found.exit_code) == ({}, True, 0)
    where = " on each of 2 ranks" if tp == 2 else ""
    assert found.verdict.startswith(f"equal by {MEANS}{where}: {len(w)} tensors")
    for name in w:
        other = w | {name: w[name].clone()}
        other[name].view(torch.uint8).view(-1)[-1] ^= 1
        one = compared(other, said, config)
        if name.endswith("A_log"):  # which exp the server has computed is not known
            assert (faulty(one), one.equal) == ({name: "could not be read"}, None)
            assert any(n.startswith(f"`{name}`: nothing is known: its digest is none of") for n in one.notes)
        else:
            assert name in faulty(one) and one.exit_code == 1 and set(faulty(one).values()) == {"differs"}
            assert len(faulty(one)) == max(len(group) for group in together(w) if name in group)
            assert f"`{name}`" in one.verdict or len(faulty(one)) > 4


def test_what_a_server_keeps_in_another_form_is_said() -> None:
    w, engine, architecture, config = case("nemotron 2", 1)
    router, bias = (f"backbone.layers.1.mixer.gate.{k}" for k in ("weight", "e_score_correction_bias"))
    w[router] = w[router].float()  # of 16 bits still
    found = compared(w, facts(engine, architecture), config)
    assert found.equal is True and "; 3 tensors as SGLang keeps them, see the notes" in found.verdict
    verdicts = {r.name: (r.verdict, r.cause) for r in found.tensors}
    assert (
        verdicts[router][1]
        == "SGLang's `model.layers.1.mixer.gate.weight` is kept as BF16, in which nothing of it is lost"
    )
    assert verdicts["backbone.layers.0.mixer.A_log"][0] == "within tolerance"
    assert f"`{bias}`: kept as F32, in which nothing of it is lost" in found.notes
    w[router] = w[router] * (1 + 2**-20)
    found = compared(w, facts(engine, architecture), config)
    assert found.equal is True and f"`{router}`: kept as BF16, compared as rounded to it" in found.notes
    w[router] = w[router] * 1.1
    assert faulty(compared(w, facts(engine, architecture), config)) == {router: "differs"}


def test_a_server_whose_dtype_is_not_seen() -> None:
    w, engine, architecture, config = case("llama", 2)
    half = [{n: t.half() for n, t in rank.items()} for rank in engine]
    for one, equal in ((engine, True), (half, True)):
        assert compared(w, facts(one, architecture, dtype=None), config).equal is equal
    other = w | {"model.norm.weight": w["model.norm.weight"] + 1}
    assert faulty(compared(other, facts(engine, architecture, dtype=None), config)) == {
        "model.norm.weight": "differs"
    }


def test_another_digest_proves_nothing_where_it_is_not_known_how_it_is_kept() -> None:
    w, engine, architecture, config = case("llama", 1)
    other = w | {"model.norm.weight": w["model.norm.weight"] + 1}
    doubted = facts(engine, architecture, doubts=("it is served with ep_size 2",))
    assert compared(w, doubted, config).equal is True
    found = compared(other, doubted, config)
    assert (found.equal, faulty(found)) == (None, {"model.norm.weight": "could not be read"})
    assert found.verdict == (
        f"could not tell: 11 tensors equal by {MEANS}; of 1 tensor nothing is known: `model.norm.weight`"
    )
    assert "is another, which proves nothing: it is served with ep_size 2" in found.notes[0]

    packs = facts(engine, architecture, packs=True)  # a norm is never packed, another matrix may be
    assert faulty(compared(other, packs, config)) == {"model.norm.weight": "differs"}
    down = f"{LAYER}mlp.down_proj.weight"
    found = compared(w | {down: w[down] + 1}, packs, config)
    assert faulty(found) == {down: "could not be read"}

    blind = compared(w, facts(engine, architecture, blind="SGLang on `cuda` has another hash"), config)
    assert (blind.equal, blind.verdict) == (None, "could not tell: SGLang on `cuda` has another hash")
    strange = compared(w, facts(engine, "GrokForCausalLM"), config)
    assert strange.verdict == "could not tell: no table of what SGLang keeps of `GrokForCausalLM`"


def test_what_sglang_pads_on_a_cpu_is_not_guessed_at() -> None:
    """Heads that the ranks do not share evenly, and widths that are no multiple of 32 a rank."""
    w, engine, architecture, config = case("llama", 2)
    said = facts(engine, architecture)
    without = compared(w, said)
    assert without.equal is None and "config does not say num_attention_heads" in without.notes[0]
    one = compared(w, said, config | {"num_key_value_heads": 1})
    assert set(faulty(one)) == {f"{LAYER}self_attn.{k}_proj.weight" for k in "qkvo"}
    assert one.equal is None and "pads 1 key-value heads for 2 ranks" in " ".join(one.notes)
    groups = case("nemotron 2", 2)
    one = compared(groups[0], facts(groups[1], groups[2]), {"n_groups": 1})
    assert one.equal is None and "1 is not divided evenly by 2 ranks" in " ".join(one.notes)
    m = f"{LAYER}mlp."
    narrow = w | {f"{m}{k}_proj.weight": w[f"{m}{k}_proj.weight"][:60] for k in ("gate", "up")}
    narrow[f"{m}down_proj.weight"] = w[f"{m}down_proj.weight"][:, :60].contiguous()
    one = compared(narrow, said, config)
    assert set(faulty(one).values()) == {"could not be read"} and len(faulty(one)) == 3
    assert "pads a width of 60 to 32 for each of its ranks" in " ".join(one.notes)


def test_what_one_side_lacks() -> None:
    w, engine, architecture, config = case("llama", 1)
    more = w | {
        "model.layers.1.mlp.down_proj.weight": w[f"{LAYER}mlp.down_proj.weight"],
        "mtp.norm.weight": w["model.norm.weight"],
        f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    assert faulty(compared(more, facts(engine, architecture), config, engine="a")) == {
        "model.layers.1.mlp.down_proj.weight": "missing in A",
        "mtp.norm.weight": "missing in A",
        f"{LAYER}self_attn.rotary_emb.inv_freq": "could not be read",
    }
    less = {n: t for n, t in w.items() if n != "model.norm.weight"}
    found = compared(less, facts(engine, architecture), config)
    assert (faulty(found), found.exit_code) == ({"model.norm.weight": "missing in A"}, 1)
    assert found.verdict == "not equal: 1 tensor missing in A: `model.norm.weight`"
    skipped = compared(more, facts(engine, architecture), config, skip=("mtp.*", "*layers.1.*", "*inv_freq"))
    assert skipped.equal is True and skipped.verdict.endswith("12 tensors, 3 tensors not compared")
    with pytest.raises(UsageError, match="matches no tensor"):
        compared(w, facts(engine, architecture), config, only="nothing.*")


def test_half_of_a_parameter_cannot_be_judged() -> None:
    """Its digest covers the other half."""
    w, engine, architecture, config = case("llama", 1)
    said, q = facts(engine, architecture), f"{LAYER}self_attn.q_proj.weight"
    assert compared(w, said, config, only="*q_proj*").equal is True
    found = compared(w | {q: w[q] + 1}, said, config, only="*q_proj*")
    assert (found.equal, "which is not compared" in found.notes[-1]) == (None, True)


@pytest.mark.parametrize("served", ["tied", "own"])
def test_tied_heads(served: str) -> None:
    w, engine, architecture, config = case("llama", 2)
    embedding = w["model.embed_tokens.weight"]
    w["lm_head.weight"] = embedding
    engine = llama_engine(w, 2)
    if served == "tied":
        for rank in engine:
            del rank["lm_head.weight"]
    said, tied = facts(engine, architecture), config | {"tie_word_embeddings": True}
    alone = {n: t for n, t in w.items() if n != "lm_head.weight"}
    assert compared(w, said, tied).equal is True and compared(alone, said, tied).equal is True
    other = w | {"lm_head.weight": embedding + 1}
    assert faulty(compared(other, said, tied)) == {"lm_head.weight": "differs"}
    if served == "own":
        assert faulty(compared(alone, said, config)) == {"lm_head.weight": "missing in A"}


def test_a_megatron_checkpoint(tmp_path: Path) -> None:
    """Its shards, cut for other ranks than the server's."""
    from safetensors.torch import save_file

    w, engine, architecture, config = case("llama", 2)
    hf, root = tmp_path / "hf", tmp_path / "megatron"
    hf.mkdir()
    save_file(w, hf / "model.safetensors", {"format": "pt"})
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 64, "head_dim": HEAD, "vocab_size": 131}
    said = {
        "architectures": [architecture],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
    }
    more = {
        "tie_word_embeddings": False,
        "rope_theta": 1e4,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
    }
    (hf / "config.json").write_text(json.dumps(said | sizes | more | config | {"torch_dtype": "bfloat16"}))
    convtools.convert(hf, root, convtools.Options(to="torch_dist", tp=2, fsync=False, workers=1))
    for served, equal in ((engine, True), (llama_engine({n: t + 1 for n, t in w.items()}, 2), False)):
        found = compare_digests(
            open_side(str(root)), facts(served, architecture), "http://e", CompareOptions()
        )
        assert (found.equal, found.a_format, len(found.tensors)) == (equal, "torch_dist", len(w))


@pytest.fixture
def server() -> Iterator[FakeSGLang]:
    made = FakeSGLang()
    yield made
    made.close()


@pytest.fixture
def checkpoint(tmp_path: Path, server: FakeSGLang) -> str:
    """What the server holds, as a folder."""
    from safetensors.torch import save_file

    w = random(SHAPES, torch.float32)
    server.weights = {name: tensor.numpy().tobytes() for name, tensor in w.items()}
    save_file(w, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "num_attention_heads": 2}')
    return str(tmp_path)


def test_over_http(server: FakeSGLang, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_facts, "_has_amx", lambda: False)
    for url in (f"sglang+{server.url}", server.url):
        found = compare_live(checkpoint, url)
        assert (found.equal, found.b_format) == (True, "engine") and found.b.endswith("at version 0")
        assert compare_live(url, checkpoint).a_format == "engine"
    name = f"{LAYER}self_attn.k_proj.weight"
    server.weights[name] = bytes(len(server.weights[name]))
    found = compare_live(checkpoint, server.url)
    assert set(faulty(found)) == {f"{LAYER}self_attn.{k}_proj.weight" for k in "qkv"}
    behind = ", ".join(f"`{LAYER}self_attn.{k}_proj.weight`" for k in "kqv")
    assert found.verdict == (
        f"not equal: of {MEANS} 1 is another: `{LAYER}self_attn.qkv_proj.weight` (of {behind})"
    )
    assert {path for path, _ in server.calls} == {"/weights_checker"}, "nothing else is asked of it"


def test_a_server_that_holds_no_version(server: FakeSGLang, checkpoint: str) -> None:
    server.version = "convtools updating 7 to 8 by 3f0c4d1a2b5e until 1795996305"
    with pytest.raises(RefitError, match="it is updating: what it holds is no version"):
        compare_live(checkpoint, server.url)
    server.version = "rc-1"  # anyone's text
    assert compare_live(checkpoint, server.url).b.endswith("at version rc-1")
    server.info |= {"device": "cuda"}
    assert "another hash than on a CPU" in compare_live(checkpoint, server.url).verdict
    server.info |= {"device": "cpu", "ep_size": 2, "version": "0.6.0"}
    server.weights["model.norm.weight"] = bytes(64)
    found = compare_live(checkpoint, server.url)
    assert found.equal is None and "it is SGLang 0.6.0" in found.notes[0] and "ep_size 2" in found.notes[0]


def test_weights_that_change_meanwhile(
    server: FakeSGLang, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from convtools.refit.sinks import sglang_compare

    def raised(*given: Any, **more: Any) -> Any:
        server.version = "9"
        return compare_digests(*given, **more)

    monkeypatch.setattr(sglang_compare, "compare_digests", raised)
    with pytest.raises(RefitError, match="took other weights while it was compared"):
        compare_live(checkpoint, server.url)
