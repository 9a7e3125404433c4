"""A side that lies on the Hub: compared range by range, with a folder or with a Megatron checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import convtools
from tests.convert.small import filled, write_small_hf
from tests.families.tiny_configs import described, inventory
from tests.hub_server import Hub, point_at, serving

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def folder(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("huggingface_hub")
    point_at(server, monkeypatch, tmp_path / "cache")
    model = described("LlamaForCausalLM", {}, {})
    return write_small_hf(tmp_path / "hf", dict(model.config), filled(inventory(model)))


def test_a_repository_and_what_it_was_converted_to(server: Hub, folder: Path, tmp_path: Path) -> None:
    server.add("org/same", {p.name: p.read_bytes() for p in folder.iterdir()})
    convtools.convert(folder, tmp_path / "m", convtools.Options(to="torch_dist", tp=2))
    for a, b in ((str(folder), "org/same"), ("org/same", str(tmp_path / "m"))):
        found = convtools.compare(a, b)
        assert found.equal is True and {t.verdict for t in found.tensors} == {"identical"}


def test_a_repository_with_one_other_bit(server: Hub, folder: Path) -> None:
    files = {p.name: p.read_bytes() for p in folder.iterdir()}
    blob = convtools.open_source(folder).tensors[NAME].blobs[0]
    data = bytearray(files["model.safetensors"])
    data[blob.offset + 5] ^= 4
    server.add("org/other", files | {"model.safetensors": bytes(data)})
    found = convtools.compare(str(folder), "org/other")
    assert found.equal is False
    assert [t.name for t in found.tensors if t.verdict != "identical"] == [NAME]
