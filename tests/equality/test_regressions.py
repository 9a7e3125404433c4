"""Ways in which `compare` and `fingerprint` once said equal of what was not, or broke; each stays found."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convtools import CompareOptions, compare
from convtools.equality.reading import stamp
from convtools.errors import UsageError
from convtools.manifest import XXH3, Manifest, ManifestTensor, encode
from tests.commands import refused, run
from tests.convert.small import write_safetensors
from tests.tensors import Content

EMBED, HEAD, FIRST = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.w"
SHARDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
ONE: Content = {EMBED: ("F32", (2, 2), bytes(range(16))), FIRST: ("F32", (2,), bytes(8))}
TWO: Content = {"model.layers.1.w": ("F32", (2,), bytes(8))}


def folder(root: Path, files: dict[str, Content], **config: Any) -> Path:
    """A checkpoint of an unknown family; with two files there is an index, which knows ONE and TWO."""
    root.mkdir()
    for name, content in files.items():
        write_safetensors(root / name, content)
    (root / "config.json").write_text(json.dumps({"model_type": "x", "num_hidden_layers": 2, **config}))
    if SHARDS[0] in files:
        index = {"weight_map": {**dict.fromkeys(ONE, SHARDS[0]), **dict.fromkeys(TWO, SHARDS[1])}}
        (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


def manifest(path: Path, **hashes: str) -> Path:
    named = {algorithm.replace("_", "-"): text for algorithm, text in hashes.items()}
    tensors = {"w": ManifestTensor(dtype="F32", shape=(1,), hashes=named)}
    path.write_bytes(encode(Manifest(made_by="test", tensors=tensors)))
    return path


@pytest.mark.parametrize(
    ("dtype", "a", "b"),
    [("<i8", 2**53, 2**53 + 1), ("<u8", 2**64 - 1, 2**64 - 2), ("<i8", -(2**62), 1 - 2**62)],
)
def test_large_integers_are_not_rounded_into_equality(dtype: str, a: int, b: int) -> None:
    left, right = {"w": np.array([a], dtype)}, {"w": np.array([b], dtype)}
    for options in (CompareOptions(atol=0.5), CompareOptions(rtol=0.0), CompareOptions(ulp=0)):
        assert compare(left, right, options).equal is False
    assert compare(left, right, CompareOptions(atol=1.0)).equal is True


def test_strays_that_both_sides_have_are_compared(tmp_path: Path) -> None:
    def stray(name: str, byte: int) -> Path:
        second = {**TWO, FIRST: ("F32", (2,), bytes(7) + bytes([byte]))}
        return folder(tmp_path / name, {SHARDS[0]: ONE, SHARDS[1]: second})

    a, b, c = stray("a", 1), stray("b", 1), stray("c", 2)
    assert compare(a, b).equal is True and compare(a, b).counts() == {"identical": 4}
    found = compare(a, c)
    assert found.equal is False
    assert [r.name for r in found.tensors if r.faulty] == [f"{FIRST} in {SHARDS[1]}"]
    assert compare(a, c, CompareOptions(skip=(FIRST,))).equal is True


def test_a_second_set_that_transformers_reads_first(tmp_path: Path) -> None:
    a = folder(tmp_path / "a", {SHARDS[0]: ONE, SHARDS[1]: TWO})
    other = {name: (dtype, shape, bytes(len(data))) for name, (dtype, shape, data) in {**ONE, **TWO}.items()}
    b = folder(tmp_path / "b", {SHARDS[0]: ONE, SHARDS[1]: TWO, "model.safetensors": other})
    found = compare(a, b)
    assert found.equal is None and "B has a `model.safetensors` beside its index" in found.verdict


def test_a_head_that_its_own_config_says_it_has_is_missing(tmp_path: Path) -> None:
    full = {**ONE, **TWO, HEAD: ONE[EMBED]}
    tied = folder(tmp_path / "tied", {"model.safetensors": full}, tie_word_embeddings=True)
    bare = folder(tmp_path / "bare", {"model.safetensors": {**ONE, **TWO}}, tie_word_embeddings=True)
    lost = folder(tmp_path / "lost", {"model.safetensors": {**ONE, **TWO}}, tie_word_embeddings=False)
    assert compare(tied, bare).equal is True
    found = compare(tied, lost)
    assert found.equal is False and [r.verdict for r in found.tensors if r.faulty] == ["missing in B"]


def test_many_heads_take_no_time(tmp_path: Path) -> None:
    # looking for the embedding once a head took minutes
    empty: Any = ("F32", (0,), b"")
    heads = {f"x{i}.{HEAD}": empty for i in range(20_000)}
    others = {f"y{i}": empty for i in range(20_000)}
    embed = {EMBED: ONE[EMBED]}
    a = folder(tmp_path / "a", {"model.safetensors": heads | embed}, tie_word_embeddings=True)
    b = folder(tmp_path / "b", {"model.safetensors": others | embed}, tie_word_embeddings=True)
    found = compare(a, b)
    assert found.equal is False and found.seconds < 20


def test_manifests_that_agree_in_one_hash_only(tmp_path: Path) -> None:
    a = manifest(tmp_path / "a.json", xxh3_128="0" * 32, additive_127="0" * 32)
    b = manifest(tmp_path / "b.json", xxh3_128="0" * 32, additive_127="1" * 32)
    found = compare(a, b)
    assert found.equal is False and "additive-127 is" in str(found.tensors[0].cause)
    assert compare(a, manifest(tmp_path / "c.json", xxh3_128="0" * 32)).equal is True


def test_an_unknown_hash_of_a_byte_proves_nothing(tmp_path: Path) -> None:
    a = manifest(tmp_path / "a.json", crc="00")
    assert compare(a, a).equal is None
    b = manifest(tmp_path / "b.json", sha256="0" * 64)
    assert compare(b, b).equal is True and XXH3 not in compare(b, b).verdict


@pytest.mark.parametrize(
    "options",
    [{"ulp": 2**64}, {"ulp": float("nan")}, {"ulp": 1.5}, {"atol": "1"}, {"only": "lm_head*"}],
)
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        compare({"w": torch.zeros(1)}, {"w": torch.ones(1)}, CompareOptions(**options))


def test_lazy_conjugates_and_negatives_are_read_as_their_values() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    assert compare({"w": z.conj()}, {"w": z.clone()}).equal is False
    assert compare({"w": z.conj()}, {"w": z.conj().resolve_conj().clone()}).equal is True
    assert compare({"w": z.conj().imag}, {"w": -z.imag.clone()}).equal is True
    assert compare({"w": torch._neg_view(torch.ones(2))}, {"w": -torch.ones(2)}).equal is True


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["meta", "sparse", "nested", "name"])
def test_tensors_without_plain_bytes(kind: str) -> None:
    made: dict[Any, Any] = {
        "meta": {"w": torch.empty(2, device="meta")},
        "sparse": {"w": torch.eye(2).to_sparse()},
        "nested": {"w": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
        "name": {1: torch.ones(2)},
    }
    with pytest.raises(UsageError):
        compare(made[kind], {"w": torch.ones(2)})


def test_a_file_whose_time_was_set_back(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    before, times = stamp(path), path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_mtime_ns == times.st_mtime_ns and stamp(path) != before


def test_fingerprint_replaces_manifests_only(tmp_path: Path) -> None:
    root = folder(tmp_path / "a", {"model.safetensors": {**ONE, **TWO}})
    before = (root / "model.safetensors").read_bytes(), (root / "config.json").read_bytes()
    for name in ("model.safetensors", "config.json"):
        refused(run("fingerprint", root, "-o", root / name, "--overwrite"), "is no manifest", code=2)
    assert ((root / "model.safetensors").read_bytes(), (root / "config.json").read_bytes()) == before
    for _ in range(2):
        assert run("fingerprint", root, "-o", tmp_path / "m.json", "--overwrite").returncode == 0


def test_a_page_that_cannot_be_written_costs_no_comparison(tmp_path: Path) -> None:
    root = folder(tmp_path / "a", {"model.safetensors": {**ONE, **TWO}})
    done = run("compare", root, root, "--html", tmp_path / "no/x.html")
    refused(done, "there is no folder", code=2)
    os.mkfifo(tmp_path / "pipe")  # stands for /dev/null, which would be replaced
    refused(run("compare", root, root, "--html", tmp_path / "pipe", "--overwrite"), "no regular file", code=2)


def test_a_name_with_a_line_break_is_no_line_of_its_own(tmp_path: Path) -> None:
    forged: Any = ("F32", (1,), bytes(4))
    changed: Any = ("F32", (1,), b"\x01\0\0\0")
    name = "w\nequal: 400 tensors, every byte the same"
    a = folder(tmp_path / "a", {"model.safetensors": {name: forged}})
    b = folder(tmp_path / "b", {"model.safetensors": {name: changed}})
    done = run("compare", a, b)
    assert done.returncode == 1
    assert not [line for line in done.stdout.splitlines() if line.startswith("equal")]
