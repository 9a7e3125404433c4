"""Properties that hold for every architecture: models and layouts at random, from one table of entries."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

import convtools
from convtools.families import registry
from convtools.families.blocks.embedding import padded_vocab_size
from convtools.families.registry import Model
from convtools.families.wrapping import Wrapping
from convtools.layout.numbers import numberless
from tests.convert.small import WIDTH, files, filled, read_dist, write_dist, write_small_hf
from tests.convert.test_accounting import MUTATIONS, faults
from tests.families.tiny_configs import TINY, Sizes, described, inventory, near_one
from tests.tensors import Content, differences, read_hf, read_safetensors

each_architecture = pytest.mark.parametrize("architecture", TINY)


class Case(NamedTuple):
    """A model, its tensors, and a layout that divides it."""

    model: Model
    content: Content
    layout: dict[str, int]


def content_of(model: Model, dtype: str, seed: int) -> Content:
    """Random bytes for every tensor, and the same for what repeats another."""
    content = near_one(model, filled(inventory(model, dtype), seed))
    return content | {copy.name: content[copy.of] for copy in model.copies()}


def prefixes(architecture: str, spelling: dict[str, Any]) -> list[str]:
    """Under which of the prefixes of larger models these names may stand; "" is none."""
    first = next(iter(inventory(described(architecture, {}, spelling))))
    larger = ("model.language_model.", "language_model.")
    return ["", *(p for p in larger if Wrapping(p).outer(first) != first)]


@st.composite
def cases(draw: st.DrawFn, architecture: str) -> Case:
    """A random model of an architecture; its sizes are drawn so that a random layout divides them."""
    tp, pp, ep, etp = (draw(st.integers(1, 3)) for _ in range(4))
    ranks = lcm(tp, ep * etp)
    if len({(r % tp, r // etp % ep) for r in range(ranks)}) < ranks:
        etp = tp  # legacy file names hold no etp: two ranks would share one
    entry = TINY[architecture]
    changes = entry.vary(Sizes(draw, tp, pp, ep, etp))
    spelling = draw(st.sampled_from(entry.spellings))
    prefix = draw(st.sampled_from(prefixes(architecture, spelling)))
    model = described(architecture, changes, spelling, prefix)
    content = content_of(model, draw(st.sampled_from(["BF16", "F32"])), draw(st.integers(0, 99)))
    return Case(model, content, {"tp": tp, "pp": pp, "ep": ep, "etp": etp})


def options(to: str, **more: Any) -> convtools.Options:
    return convtools.Options(to=to, fsync=False, workers=1, **more)


@contextmanager
def place(case: Case) -> Iterator[tuple[Path, Path]]:
    """(a fresh folder, the checkpoint in it); under a prefix, the config is that of a larger model."""
    config = dict(case.model.config)
    if case.model.wrapping.prefix:
        config = {"architectures": ["LargerForConditionalGeneration"], "text_config": config}
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder), write_small_hf(Path(folder) / "src", config, case.content)


def assert_same(src: Path, back: Path) -> None:
    """Same bytes, names in the order in which they came, and the same config.json, byte for byte."""
    assert differences(read_hf(src), read_hf(back)) == []
    order = {n: dtype for n, (dtype, _, _) in read_safetensors(src / "model.safetensors").items()}
    widest_first = sorted(order, key=lambda name: -WIDTH[order[name]])  # as safetensors itself writes
    assert list(read_safetensors(back / "model.safetensors")) == widest_first
    assert files(src) == files(back)


def test_no_architecture_is_forgotten() -> None:
    assert sorted(TINY) == sorted(registry._MODULE), "give every architecture an entry in tiny_configs.TINY"


@each_architecture
def test_the_family_owns_up_to_it(architecture: str) -> None:
    """The module that the registry names lists the architecture, and says what its table was checked with."""
    family = registry.find_family({"architectures": [architecture]})
    assert architecture in family.ARCHITECTURES
    assert family.PROOF[architecture]


@each_architecture
@settings(max_examples=15)
@given(st.data())
def test_its_table_is_a_bijection(architecture: str, data: st.DataObject) -> None:
    case = data.draw(cases(architecture))
    unit = data.draw(st.sampled_from([1, 8, 128]))
    vocab = case.model.spec.vocab
    padded = padded_vocab_size(vocab, case.layout["tp"], unit)
    table = case.model.table(padded)
    table.check()
    embedding = table.params["embedding.word_embeddings.weight"]
    assert (embedding.shape[0], embedding.vocab) == (padded, vocab)


@each_architecture
@settings(max_examples=7)
@given(st.data())
def test_to_megatron_and_back(architecture: str, data: st.DataObject) -> None:
    case = data.draw(cases(architecture))
    to = data.draw(st.sampled_from(["torch_dist", "torch"]))
    more: dict[str, Any] = {"make_vocab_size_divisible_by": data.draw(st.sampled_from([1, 8, 128]))}
    if to == "torch":
        more["expert_layout"] = data.draw(st.sampled_from(["grouped", "sequential"]))
        more["mcore_version"] = data.draw(st.sampled_from(["0.16", "0.19"]))
    if to == "torch" or data.draw(st.booleans()):
        more |= case.layout
    with place(case) as (root, src):
        report = convtools.convert(src, root / "there", options(to, **more))
        assert report.hf_tensors == len(case.content) - len(case.model.copies())
        back = convtools.convert(root / "there", root / "back", options("hf"))
        assert all(p.nonzero_rows == 0 for p in back.padding)
        assert_same(src, root / "back")


@each_architecture
@settings(max_examples=3)
@given(st.data())
def test_from_one_megatron_format_to_the_other_and_back(architecture: str, data: st.DataObject) -> None:
    case = data.draw(cases(architecture))
    chain = data.draw(st.sampled_from([("torch_dist", "torch"), ("torch", "torch_dist")]))
    with place(case) as (root, src):
        at = src
        for to in chain:
            more = case.layout if to == "torch" or data.draw(st.booleans()) else {}
            convtools.convert(at, root / to, options(to, **more))
            at = root / to
        convtools.convert(at, root / "back", options("hf"))
        assert_same(src, root / "back")


WAYS = [MUTATIONS[name] for name in ("double", "rename", "reshape", "to F16")]


def one_of_each_kind(content: Content) -> list[str]:
    """The last tensor of each kind, numbers aside: a layer's, an expert's, or one of its own."""
    return list({numberless(name): name for name in content}.values())


def tail(name: str) -> str:
    """What an error must tell of a name at least: a key of all layers may be told as the keys of each."""
    return name.removeprefix("model.").removeprefix("decoder.layers.")


def damaged(content: Content) -> Iterator[tuple[Content, str]]:
    """(the tensors after one of them was changed, the name that the error must tell).

    Each is dropped, and changed in one other way, the ways in turn; `test_accounting.py` has every
    tensor in every way, for the model with the most kinds of layers.
    """
    for i, name in enumerate(one_of_each_kind(content)):
        for mutate in (MUTATIONS["drop"], WAYS[i % len(WAYS)]):
            if changed := mutate(content, name):
                yield changed


@each_architecture
def test_whatever_happens_to_one_tensor_is_an_error_that_names_it(architecture: str, tmp_path: Path) -> None:
    model = described(architecture, {}, TINY[architecture].spellings[0])
    content, config = content_of(model, "BF16", 0), dict(model.config)
    hf = write_small_hf(tmp_path / "hf", config, content)
    convtools.convert(hf, tmp_path / "dist", options("torch_dist", tp=2, pp=2, ep=2, etp=1))
    found: list[str] = []
    cases = 0
    for changed, name in damaged(content):
        found += faults(write_small_hf(hf, config, changed), tmp_path / "place", tail(name), "torch_dist")
        cases += 1
    folder = tmp_path / "dist/iter_0000001"
    keys, objects = read_dist(folder)
    for changed, name in damaged(keys):
        write_dist(folder, changed, objects)
        found += faults(tmp_path / "dist", tmp_path / "place", tail(name), "hf")
        cases += 1
    assert found == []
    assert cases > 2 * len(list(one_of_each_kind(content)))  # each kind dropped, in either format
    write_dist(folder, keys, objects)
    convtools.convert(tmp_path / "dist", tmp_path / "whole", options("hf"))  # as it was, it goes through
    assert differences(content, read_hf(tmp_path / "whole")) == []
    shutil.rmtree(tmp_path / "whole")
