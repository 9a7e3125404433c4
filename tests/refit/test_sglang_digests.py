"""What SGLang keeps of a checkpoint, against the same written with torch's chunk and cat; and the verdicts."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from convtools.equality.canonical import open_side
from convtools.equality.options import CompareOptions
from convtools.equality.verdict import Comparison
from convtools.errors import UsageError
from convtools.refit.errors import RefitError
from convtools.refit.live_compare import compare_live
from convtools.refit.sinks import sglang_facts
from convtools.refit.sinks.sglang_compare import compare_digests
from convtools.refit.sinks.sglang_facts import Facts
from tests.refit.sglang_server import SHAPES, FakeSGLang

Named = dict[str, torch.Tensor]
Engine = list[Named]
"""SGLang's parameters, by rank."""
MEANS = "SGLang's digests of its own parameters (64 bits of SHA-256 each)"
LAYER = "model.layers.0."
HIDDEN, HEAD = 8, 4


def random(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> Named:
    made = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=made).to(dtype) for name, shape in shapes.items()}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[
        :16
    ]


def padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([tensor, torch.zeros(rows - len(tensor), *tensor.shape[1:], dtype=tensor.dtype)])


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


LLAMA = {
    "model.embed_tokens.weight": (131, HIDDEN), "lm_head.weight": (131, HIDDEN), "model.norm.weight": (HIDDEN,),
    f"{LAYER}input_layernorm.weight": (HIDDEN,), f"{LAYER}post_attention_layernorm.weight": (HIDDEN,),
    f"{LAYER}self_attn.q_proj.weight": (4 * HEAD, HIDDEN), f"{LAYER}self_attn.k_proj.weight": (HEAD, HIDDEN),
    f"{LAYER}self_attn.v_proj.weight": (HEAD, HIDDEN), f"{LAYER}self_attn.o_proj.weight": (HIDDEN, 4 * HEAD),
    f"{LAYER}mlp.gate_proj.weight": (12, HIDDEN), f"{LAYER}mlp.up_proj.weight": (12, HIDDEN),
    f"{LAYER}mlp.down_proj.weight": (HIDDEN, 12),
}  # fmt: skip
LLAMA_CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 1}


def llama_engine(w: Named, tp: int) -> Engine:
    """One key-value head, which every rank has; a vocabulary that is padded."""

    def rank(r: int) -> Named:
        a, m = f"{LAYER}self_attn.", f"{LAYER}mlp."
        rows: Callable[[str], torch.Tensor] = lambda n: w[f"{n}.weight"].chunk(tp)[r]  # noqa: E731
        kv = [w[f"{a}{k}_proj.weight"] for k in "kv"]
        return {
            "model.embed_tokens.weight": padded(w["model.embed_tokens.weight"], 192).chunk(tp)[r],
            f"{a}qkv_proj.weight": torch.cat([rows(f"{a}q_proj"), *kv]),
            f"{a}o_proj.weight": w[f"{a}o_proj.weight"].chunk(tp, 1)[r],
            f"{m}gate_up_proj.weight": torch.cat([rows(f"{m}gate_proj"), rows(f"{m}up_proj")]),
            f"{m}down_proj.weight": w[f"{m}down_proj.weight"].chunk(tp, 1)[r],
            **{n: w[n] for n in w if "norm" in n},
            "lm_head.weight": padded(w["lm_head.weight"], 192).chunk(tp)[r],
        }  # fmt: skip

    return [rank(r) for r in range(tp)]


def moe_engine(w: Named, tp: int) -> Engine:
    def rank(r: int) -> Named:
        e = f"{LAYER}mlp.experts."
        each = [[w[f"{e}{i}.{k}_proj.weight"] for k in ("gate", "up", "down")] for i in range(3)]
        ups = [torch.cat([gate.chunk(tp)[r], up.chunk(tp)[r]]) for gate, up, _ in each]
        return {
            f"{e}w13_weight": torch.stack(ups),
            f"{e}w2_weight": torch.stack([down.chunk(tp, 1)[r] for _, _, down in each]),
            f"{LAYER}mlp.gate.weight": w[f"{LAYER}mlp.gate.weight"],
            f"{LAYER}self_attn.k_norm.weight": w[f"{LAYER}self_attn.k_norm.weight"],
        }

    return [rank(r) for r in range(tp)]


MOE = {f"{LAYER}mlp.gate.weight": (3, HIDDEN), f"{LAYER}self_attn.k_norm.weight": (HEAD,)} | {
    f"{LAYER}mlp.experts.{e}.{k}_proj.weight": (HIDDEN, 4) if k == "down" else (4, HIDDEN)
    for e in range(3) for k in ("gate", "up", "down")
}  # fmt: skip
INNER, STATE, HEADS = 8, 2, 4


def mamba(groups: int) -> dict[str, tuple[int, ...]]:
    m, conv = "backbone.layers.0.mixer.", INNER + 2 * groups * STATE
    return {
        f"{m}in_proj.weight": (INNER + conv + HEADS, HIDDEN), f"{m}conv1d.weight": (conv, 1, 4),
        f"{m}conv1d.bias": (conv,), f"{m}A_log": (HEADS,), f"{m}D": (HEADS,), f"{m}dt_bias": (HEADS,),
        f"{m}norm.weight": (INNER,), f"{m}out_proj.weight": (HIDDEN, INNER),
        "backbone.layers.0.norm.weight": (HIDDEN,), "backbone.layers.1.mixer.gate.weight": (3, HIDDEN),
        "backbone.layers.1.mixer.gate.e_score_correction_bias": (3,),
        "backbone.layers.1.mixer.experts.0.up_proj.weight": (4, HIDDEN),
        "backbone.layers.1.mixer.experts.0.down_proj.weight": (HIDDEN, 4),
    }  # fmt: skip


def nemotron_engine(w: Named, tp: int, groups: int) -> Engine:
    gs = groups * STATE

    def sections(tensor: torch.Tensor, sizes: list[int], r: int) -> torch.Tensor:
        parts = tensor.split(sizes)
        return torch.cat(
            [p if groups == 1 and n == gs else p.chunk(tp)[r] for p, n in zip(parts, sizes, strict=True)]
        )

    def rank(r: int) -> Named:
        b, m, e = "backbone.layers.0.mixer.", f"{LAYER}mixer.", "model.layers.1.mixer."
        conv = [INNER, gs, gs]
        out = {
            f"{m}A": -torch.exp(w[f"{b}A_log"].chunk(tp)[r].float()),
            f"{m}in_proj.weight": sections(w[f"{b}in_proj.weight"], [INNER, *conv, HEADS], r),
            f"{m}conv1d.weight": sections(w[f"{b}conv1d.weight"], conv, r),
            f"{m}conv1d.bias": sections(w[f"{b}conv1d.bias"], conv, r),
            f"{m}out_proj.weight": w[f"{b}out_proj.weight"].chunk(tp, 1)[r],
            f"{LAYER}norm.weight": w["backbone.layers.0.norm.weight"],
            f"{e}gate.weight": w[f"backbone.{e[6:]}gate.weight"],
            f"{e}gate.e_score_correction_bias": w[f"backbone.{e[6:]}gate.e_score_correction_bias"].float(),
            f"{e}experts.w13_weight": w[f"backbone.{e[6:]}experts.0.up_proj.weight"].chunk(tp)[r],
            f"{e}experts.w2_weight": w[f"backbone.{e[6:]}experts.0.down_proj.weight"].chunk(tp, 1)[r],
        }
        return out | {f"{m}{k}": w[f"{b}{k}"].chunk(tp)[r] for k in ("D", "dt_bias", "norm.weight")}

    return [rank(r) for r in range(tp)]


def case(kind: str, tp: int) -> tuple[Named, Engine, str, dict[str, Any]]:
    if kind == "llama":
        w = random(LLAMA)
        return w, llama_engine(w, tp), "LlamaForCausalLM", LLAMA_CONFIG
    if kind == "moe":
        w = random(MOE)
        return w, moe_engine(w, tp), "Qwen3MoeForCausalLM", {}
    groups = int(kind[-1])
    w = random(mamba(groups))
    return w, nemotron_engine(w, tp, groups), "NemotronHForCausalLM", {"n_groups": groups}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "moe", "nemotron 1", "nemotron 2"])
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


def together(w: Named) -> list[set[str]]:
    """Tensors that SGLang keeps in one parameter."""
    marks = [
        ("q_proj", "k_proj", "v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("experts", "gate_proj", "up_proj"),
    ]
    groups = [{n for n in w if any(m in n for m in of) and "experts" not in n} for of in marks[:2]]
    groups += [{n for n in w if "experts." in n and ("down_proj" in n) is down} for down in (True, False)]
    return [*groups, *({n} for n in w)]


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
    without = compared(w, facts(llama_engine(w, 2), architecture))
    assert without.equal is None and "config does not say num_key_value_heads" in without.notes[0]


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
    assert found.verdict == (
        f"not equal: of {MEANS} 1 is another: `{LAYER}self_attn.qkv_proj.weight` "
        f"(of `{LAYER}self_attn.k_proj.weight`, `{LAYER}self_attn.q_proj.weight`, `{LAYER}self_attn.v_proj.weight`)"
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
