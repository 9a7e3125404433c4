"""HF to anything and back is bit-identical, for random models and layouts that divide; others are refused."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import lcm, prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

import convtools
from convtools.errors import ParallelError
from tests.convert.small import files, filled, stacked, write_small_hf
from tests.nemotron_checkpoints import TINY, inventory, write_hf
from tests.tensors import Content, differences, read_hf, read_safetensors

LETTERS = "ME*-"
WIDE = TINY | {
    "n_groups": 4,
    "time_step_limit": [0.0, float("inf")],
    "unknown_field": [float("nan"), -float("inf"), "\u00e9", None],
}
SIDE = {
    "tokenizer.json": b'{"a": 1}\n',
    "tokenizer_config.json": b"{}",
    "modeling_nemotron_h.py": b"raise SystemExit('never run')\n",
    "nested/deep/notes.txt": bytes(range(256)),
    "generation_config.json": b'{"eos": Infinity}',
}

Model = tuple[dict[str, Any], Content]


@st.composite
def models(draw: st.DrawFn) -> Model:
    """(config, its tensors): every choice that changes which tensors there are, or what they are called."""
    pattern = draw(st.text(LETTERS, min_size=1, max_size=4))
    config = WIDE | {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
    config["vocab_size"] = draw(st.sampled_from([5, 23, 128]))
    config["num_nextn_predict_layers"] = depth = draw(st.integers(0, 3))
    if depth:
        config["mtp_hybrid_override_pattern"] = draw(st.text(LETTERS, min_size=1, max_size=2))
        config["mtp_use_repeated_layer"] = draw(st.sampled_from([None, True, False]))
    config["moe_latent_size"] = draw(st.sampled_from([None, 8]))
    config["moe_shared_expert_intermediate_size"] = draw(st.sampled_from([0, 20]))
    config["tie_word_embeddings"] = draw(st.booleans())
    prefix = draw(st.sampled_from(["backbone.", "model."]))
    wide, in_fp32 = draw(st.sampled_from(["BF16", "F16", "F32"])), draw(st.booleans())
    dtype = {"BF16": wide, "F32": "F32" if in_fp32 else wide}
    tensors = {
        n: ("F32" if n.endswith("e_score_correction_bias") else dtype[d], s)
        for n, (d, s) in inventory(config, prefix).items()
    }
    content = filled(tensors, seed=draw(st.integers(0, 99)))
    if draw(st.booleans()):
        content = stacked(content)
    if config["tie_word_embeddings"] and draw(st.booleans()):
        content["lm_head.weight"] = content[f"{prefix}embeddings.weight"]
    return config, content


def sizes(draw: st.DrawFn, model: Model, legacy: bool) -> dict[str, int]:
    """A layout that divides: all that tp, ep and etp must divide is a multiple of 4."""
    layers = len(model[0]["hybrid_override_pattern"])
    tp = draw(st.sampled_from([1, 2, 4]))
    out = {"tp": tp, "pp": draw(st.sampled_from([n for n in (1, 2, 3, 4) if layers % n == 0]))}
    out["ep"] = draw(st.sampled_from([1, 2, 4]))
    out["etp"] = etp = draw(st.sampled_from([1, 2, 4]))
    ranks = lcm(tp, out["ep"] * etp)
    if legacy and len({(r % tp, r // etp % out["ep"]) for r in range(ranks)}) < ranks:
        out["etp"] = tp  # file names hold no etp: two ranks would share one
    return out


def chosen(to: str, **more: Any) -> convtools.Options:
    return convtools.Options(to=to, fsync=False, workers=1, **more)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Model, convtools.Options]:
    """A model and a Megatron target for it."""
    model = draw(models())
    to = draw(st.sampled_from(["torch_dist", "torch"]))
    more: dict[str, Any] = {}
    if to == "torch":
        more["expert_layout"] = draw(st.sampled_from(["grouped", "sequential"]))
        more["mcore_version"] = draw(st.sampled_from(["0.16", "0.19"]))
    if to == "torch" or draw(st.booleans()):
        more |= sizes(draw, model, to == "torch")
    more["make_vocab_size_divisible_by"] = draw(st.sampled_from([1, 8, 128]))
    return model, chosen(to, **more)


@contextmanager
def place(model: Model) -> Iterator[tuple[Path, Path]]:
    """(a fresh folder, a checkpoint of the model in it, side files and all)."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        src = write_small_hf(root / "src", *model)
        for name, data in SIDE.items():
            (src / name).parent.mkdir(parents=True, exist_ok=True)
            (src / name).write_bytes(data)
        yield root, src


def assert_same(src: Path, back: Path) -> None:
    assert differences(read_hf(src), read_hf(back)) == []
    assert files(src) == files(back)


@settings(max_examples=60)
@given(cases())
def test_hf_to_megatron_and_back(case: tuple[Model, convtools.Options]) -> None:
    model, options = case
    with place(model) as (root, src):
        before = files(src)
        report = convtools.convert(src, root / "there", options)
        assert report.hf_tensors == len(model[1]) - (
            "lm_head.weight" in model[1] and model[0]["tie_word_embeddings"]
        )
        back = convtools.convert(root / "there", root / "back", chosen("hf"))
        assert all(p.nonzero_rows == 0 for p in back.padding)
        assert_same(src, root / "back")
        assert files(src) == before


@st.composite
def chains(draw: st.DrawFn) -> tuple[Model, list[convtools.Options]]:
    """A model and two to four Megatron targets in a row."""
    model = draw(models())
    steps = []
    for _ in range(draw(st.integers(2, 4))):
        to = draw(st.sampled_from(["torch_dist", "torch"]))
        steps.append(chosen(to, **sizes(draw, model, to == "torch")))
    return model, steps


@settings(max_examples=20)
@given(chains())
def test_megatron_to_megatron_to_hf(case: tuple[Model, list[convtools.Options]]) -> None:
    model, steps = case
    with place(model) as (root, src):
        at = src
        for i, options in enumerate(steps):
            convtools.convert(at, root / str(i), options)
            at = root / str(i)
        convtools.convert(at, root / "back", chosen("hf"))
        assert_same(src, root / "back")


def test_the_chain_of_tp_2_and_tp_4(tmp_path: Path) -> None:
    config = WIDE | {"num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "M-"}
    src = write_small_hf(tmp_path / "src", config, filled(inventory(config)))
    convtools.convert(src, tmp_path / "a", chosen("torch_dist", tp=2, pp=2))
    convtools.convert(tmp_path / "a", tmp_path / "b", chosen("torch", tp=4))
    convtools.convert(tmp_path / "b", tmp_path / "c", chosen("torch_dist"))
    convtools.convert(tmp_path / "c", tmp_path / "back", chosen("hf"))
    assert_same(src, tmp_path / "back")
    assert len(list(tmp_path.glob("b/iter_*/mp_rank_*"))) == 4


@settings(max_examples=25)
@given(models(), st.integers(1, 6000))
def test_sharded_output(model: Model, most: int) -> None:
    """Files hold at most so many bytes (or one tensor), the index names each tensor's file, none is lost."""
    with place(model) as (root, src):
        convtools.convert(src, root / "out", chosen("hf", max_shard_size=most))
        assert_same(src, root / "out")
        shards = sorted((root / "out").glob("*.safetensors"))
        held = {path.name: read_safetensors(path) for path in shards}
        for content in held.values():
            nbytes = sum(len(data) for _, _, data in content.values())
            assert nbytes <= most or len(content) == 1
        if len(shards) == 1:
            assert [p.name for p in shards] == ["model.safetensors"]
            return
        total = len(shards)
        assert [p.name for p in shards] == [
            f"model-{k:05d}-of-{total:05d}.safetensors" for k in range(1, total + 1)
        ]
        index = json.loads((root / "out/model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file for file, content in held.items() for name in content}
        assert index["metadata"]["total_size"] == sum(len(d) for c in held.values() for _, _, d in c.values())


BIG = WIDE | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E", "vocab_size": 500_000_000}


@pytest.fixture(scope="module")
def holes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of tens of GB that is all holes: whoever reads its weights is seen doing so."""
    return write_hf(tmp_path_factory.mktemp("holes") / "hf", BIG, holes=True)


def divides(tp: int, pp: int, ep: int, etp: int) -> bool:
    """Whether a layout divides BIG: heads, Mamba heads and groups, feed-forwards, hidden; layers; experts."""
    by_tp = (4, 4, 4, 28, 20, 16)
    return all(n % tp == 0 for n in by_tp) and 4 % pp == 0 and 4 % ep == 0 and 12 % etp == 0


@settings(max_examples=80)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 8), st.integers(1, 13))
@example(8, 1, 1, 1)
@example(1, 3, 1, 1)
@example(1, 1, 3, 1)
@example(1, 1, 1, 5)
def test_layouts_that_do_not_divide(holes: Path, tp: int, pp: int, ep: int, etp: int) -> None:
    """They are refused, naming both numbers, before a byte of weights is read or DST is made."""
    dst = holes.parent / "dst"
    options = chosen("torch_dist", tp=tp, pp=pp, ep=ep, etp=etp, dry_run=True)
    if divides(tp, pp, ep, etp):
        convtools.convert(holes, dst, options)
        return
    before = bytes_read()
    with pytest.raises(ParallelError) as caught:
        convtools.convert(holes, dst, chosen("torch_dist", tp=tp, pp=pp, ep=ep, etp=etp))
    assert bytes_read() - before < 200_000  # the header has 7 kB, the weights 32 GB
    said = re.match(r"(tp|pp|ep|etp)=(\d+) (?:does not|neither) divides? .*=(\d+)", str(caught.value))
    assert said, str(caught.value)
    assert int(said[2]) == {"tp": tp, "pp": pp, "ep": ep, "etp": etp}[said[1]]
    assert int(said[3]) % int(said[2])
    assert [p.name for p in holes.parent.iterdir()] == ["hf"]


def bytes_read() -> int:
    """Bytes that this process has asked the kernel for so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def test_reading_is_seen(tmp_path: Path) -> None:
    """The meter of the test above: a conversion that does go on reads all the weights."""
    config = WIDE | {"vocab_size": 50_000}
    src = write_hf(tmp_path / "src", config)
    nbytes = sum(2 * prod(s) for _, s in inventory(config).values())
    before = bytes_read()
    # a copy the kernel makes is not counted as read, so let it be cast
    convtools.convert(src, tmp_path / "dst", chosen("torch_dist", dtype="fp32"))
    assert bytes_read() - before > nbytes // 2
    shutil.rmtree(tmp_path / "dst")
