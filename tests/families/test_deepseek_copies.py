"""B27: a DeepSeek MTP layer's copies of embedding and head come back; differing ones are an error."""

import shutil
from pathlib import Path

import pytest

import convtools
from tests.tensors import differences, read_hf

HF = Path(__file__).parents[2] / "fixtures/oracle/deepseek_v3/hf"
COPIES = {
    "model.layers.3.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.3.shared_head.head.weight": "lm_head.weight",
}


def with_copies(dst: Path, change: str = "") -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(HF, dst)
    tensors = load_file(dst / "model.safetensors")
    tensors |= {name: tensors[of].clone() for name, of in COPIES.items()}
    if change:
        tensors[change][0, 0] += 1
    save_file(tensors, dst / "model.safetensors", {"format": "pt"})
    return dst


def test_b27_equal_copies_come_back(tmp_path: Path) -> None:
    src = with_copies(tmp_path / "hf")
    report = convtools.convert(src, tmp_path / "m", convtools.Options(to="torch_dist", tp=2))
    convtools.convert(tmp_path / "m", tmp_path / "back", convtools.Options(to="hf"))
    assert report.duplicates == 2
    assert differences(read_hf(src), read_hf(tmp_path / "back")) == []


@pytest.mark.parametrize("name", COPIES)
def test_b27_copies_that_differ_are_an_error(name: str, tmp_path: Path) -> None:
    src = with_copies(tmp_path / "hf", change=name)
    with pytest.raises(convtools.ConvtoolsError, match=name):
        convtools.convert(src, tmp_path / "m", convtools.Options(to="torch_dist"))
    assert not (tmp_path / "m").exists()
