"""The manifest: one form, read strictly, and hashes that anyone can compute again."""

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given, strategies as st

from convtools.errors import CheckpointError
from convtools.manifest import (
    XXH3,
    Manifest,
    ManifestSource,
    ManifestTensor,
    decode,
    encode,
    hash_bytes,
    hash_tensor,
    made_by,
    read_manifest,
)

HASH = "0123456789abcdef" * 2
SMALL = Manifest(
    made_by="convtools 0.1.0",
    source=ManifestSource(name="org/name", revision="a" * 40, format="hub"),
    layers=[0, 1, 7, 8],
    notes=["num_hidden_layers: 52 -> 4"],
    tensors={
        "z.weight": ManifestTensor(dtype="BF16", shape=(2, 3), source="y.weight", hashes={XXH3: HASH}),
        "a.weight": ManifestTensor(dtype="F32", shape=(4,), source="a.weight", source_rows=4),
    },
)

TEXT = """{
 "schema": "convtools.manifest/1",
 "made_by": "convtools 0.1.0",
 "source": {"name": "org/name", "format": "hub", "revision": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},
 "layers": [0, 1, 7, 8],
 "notes": ["num_hidden_layers: 52 -> 4"],
 "tensors": {
  "a.weight": {"dtype": "F32", "shape": [4], "source": "a.weight", "source_rows": 4, "hashes": {}},
  "z.weight": {"dtype": "BF16", "shape": [2, 3], "source": "y.weight", "source_rows": null, "hashes": \
{"xxh3-128": "0123456789abcdef0123456789abcdef"}}
 }
}
"""
"""What the schema means in bytes: a change of this text is a change of the schema."""


def test_the_file() -> None:
    assert encode(SMALL).decode() == TEXT
    assert decode(TEXT.encode()) == SMALL


def test_the_hash_of_the_config_is_there_or_not() -> None:
    covered = msgspec.structs.replace(SMALL, config=HASH)
    text = TEXT.replace(' "tensors"', f' "config": "{HASH}",\n "tensors"', 1)
    assert encode(covered) == text.encode() and decode(text.encode()) == covered
    assert decode(TEXT.encode()).config is None
    for wrong in ('"abc"', '"' + "g" * 32 + '"', "7", '"' + "00" * 8 + '"'):
        with pytest.raises(CheckpointError, match="config"):
            decode(text.replace(f'"config": "{HASH}"', f'"config": {wrong}').encode())
    assert hash_bytes(b"abc") == xxhash.xxh3_128(b"abc").hexdigest()


def test_the_order_of_tensors_does_not_matter() -> None:
    turned = msgspec.structs.replace(SMALL, tensors=dict(reversed(SMALL.tensors.items())))
    assert encode(turned) == encode(SMALL)


def test_an_empty_one() -> None:
    empty = Manifest(made_by=made_by(), tensors={})
    assert decode(encode(empty)) == empty and re.fullmatch(r"convtools \d+\.\d+\.\d+", made_by())


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
tensors = st.builds(
    ManifestTensor,
    dtype=st.sampled_from(["BF16", "F32", "F8_E4M3", "F4"]),
    shape=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    source=st.none() | names,
    hashes=st.dictionaries(
        st.from_regex(r"\A[a-z0-9][a-z0-9.-]{0,10}\Z").filter(lambda n: n != XXH3),
        st.binary(min_size=1, max_size=64).map(bytes.hex),
        max_size=3,
    ),
)
manifests = st.builds(
    Manifest,
    made_by=names,
    tensors=st.dictionaries(names, tensors, max_size=5),
    source=st.none() | st.builds(ManifestSource, name=names, format=names, revision=st.none() | names),
    layers=st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=5),
    notes=st.lists(names, max_size=3),
)


@given(manifests)
def test_what_is_written_is_read(manifest: Manifest) -> None:
    raw = encode(manifest)
    assert decode(raw) == manifest and encode(decode(raw)) == raw


def changed(*path: Any, to: Any) -> bytes:
    value = json.loads(TEXT)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return json.dumps(value).encode()


TENSOR = ("tensors", "z.weight")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff{}", "not UTF-8"),
        (TEXT.replace("a.weight", "z.weight").encode(), "the key `z.weight` is there twice"),
        (b'{"schema": ' + b"[" * 100_000, "nested too deeply"),
        (changed("schema", to="convtools.manifest/2"), "not a manifest of the schema"),
        (changed("schema", to=None), "not a manifest of the schema"),
        (changed("extra", to=1), "unknown field `extra`"),
        (changed("made_by", to=1), "Expected `str`"),
        (changed("made_by", to="x" * 5000), "too long"),
        (changed("notes", to=["\ud800"]), "not valid Unicode"),
        (changed("source", "name", to=["x"]), "Expected `str`"),
        (changed("layers", to=[-1]), "its layers cannot be"),
        (changed("layers", to=[True]), "Expected `int`"),
        (changed("layers", to=[1.5]), "Expected `int`"),
        (changed("tensors", to=[]), "Expected `object`"),
        (changed(*TENSOR, to=None), "Expected `object`"),
        (changed(*TENSOR, "dtype", to="BF17"), "tensor `z.weight`: unknown dtype `BF17`"),
        (changed(*TENSOR, "shape", to=[-2]), "its shape is not possible"),
        (changed(*TENSOR, "shape", to=[2**63]), "its shape is not possible"),
        (changed(*TENSOR, "shape", to=[10**30]), "damaged manifest"),
        (changed(*TENSOR, "shape", to=[1] * 65), "its shape is not possible"),
        (changed(*TENSOR, "source_rows", to=3), "`source_rows` is 3"),
        (changed(*TENSOR, "source_rows", to=-2), "`source_rows` is -2"),
        (changed(*TENSOR, "source", to="\udc00"), "not valid Unicode"),
        (changed(*TENSOR, "hashes", to={"xxh3-128": HASH[:-2]}), "its xxh3-128 is"),
        (changed(*TENSOR, "hashes", to={"xxh3-128": HASH.upper()}), "its xxh3-128 is"),
        (changed(*TENSOR, "hashes", to={"sha256": "zz"}), "its sha256 is"),
        (changed(*TENSOR, "hashes", to={"sha256": "abc"}), "its sha256 is"),
        (changed(*TENSOR, "hashes", to={"sha256": "ab" * 65}), "its sha256 is"),
        (changed(*TENSOR, "hashes", to={"": "ab"}), "not the name of a hash"),
        (changed(*TENSOR, "hashes", to={"XXH3": "ab"}), "not the name of a hash"),
        (changed("tensors", "\ud800", to={"dtype": "F32", "shape": []}), "not valid Unicode"),
    ],
)
def test_what_is_refused(raw: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(path)
    assert words in str(caught.value) and str(path) in str(caught.value), caught.value
    assert len(str(caught.value)) < 1500


def test_another_hash_may_come() -> None:
    raw = changed(*TENSOR, "hashes", to={"additive-128": "ab" * 16, XXH3: HASH})
    assert decode(raw).tensors["z.weight"].hashes["additive-128"] == "ab" * 16


def test_what_cannot_be_read_is_not_written() -> None:
    bad = msgspec.structs.replace(SMALL, tensors={"x": ManifestTensor(dtype="nope", shape=())})
    with pytest.raises(CheckpointError, match="unknown dtype `nope`"):
        encode(bad)


def test_a_file_over_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    with path.open("wb") as file:
        file.truncate(10**10)
    with pytest.raises(CheckpointError, match="too large"):
        read_manifest(path)


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.json")
    with pytest.raises(CheckpointError, match="not a file"):
        read_manifest(tmp_path / "m.json")


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 0), (0, 1), (7, 1 << 20), (5, (1 << 20) + 1), (3, 3 << 20)]
)
def test_the_hash_is_that_of_xxhash(tmp_path: Path, offset: int, nbytes: int) -> None:
    data = os.urandom(4 << 20)
    (tmp_path / "f").write_bytes(data)
    expected = xxhash.xxh3_128(data[offset : offset + nbytes]).hexdigest()
    assert hash_tensor(tmp_path / "f", offset, nbytes) == expected


def test_a_known_hash(tmp_path: Path) -> None:
    """Of nothing: XXH3_128bits("", seed 0), from xxHash's own specification of its test vectors."""
    (tmp_path / "f").write_bytes(b"abc")
    assert hash_tensor(tmp_path / "f", 0, 0) == "99aa06d3014798d86001c324468d497f"


def test_threads_hash_at_the_same_time(tmp_path: Path) -> None:
    data = os.urandom(1 << 20)
    (tmp_path / "f").write_bytes(data)
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(hash_tensor(tmp_path / "f", 0, 1 << 20)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [xxhash.xxh3_128(data).hexdigest()] * 8


def test_a_short_file_is_no_hash(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    with pytest.raises(CheckpointError, match="ends before the tensor's bytes"):
        hash_tensor(tmp_path / "f", 2, 4)
