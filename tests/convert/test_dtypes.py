"""`--dtype`: cast only when asked, what Megatron keeps in fp32 stays, and each cast is the one torch does."""

from pathlib import Path
from typing import Any

import pytest

import convtools
from convtools.conversion.report import Cast
from convtools.errors import AccountingError
from tests.convert.small import WIDTH, filled, write_small_hf
from tests.nemotron_checkpoints import TINY, inventory
from tests.tensors import Content, differences, of_torch, read_hf

CONFIG: dict[str, Any] = TINY | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "M-"}
NAMES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp64": "F64"}
FP32_ONLY = ("A_log", "D", "dt_bias", "e_score_correction_bias")
EXACT = {("BF16", "F32"), ("BF16", "F64"), ("F16", "F32"), ("F16", "F64"), ("F32", "F64")}


def options(to: str, **more: Any) -> convtools.Options:
    return convtools.Options(to=to, fsync=False, workers=1, **more)


def of_dtype(dtype: str) -> Content:
    """CONFIG's tensors with the model in one dtype; one has numbers of all sizes, infinities and NaNs."""
    import numpy as np
    import torch

    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
    content = filled({n: (dtype if d == "BF16" else d, s) for n, (d, s) in inventory(CONFIG).items()})
    name = "backbone.layers.0.mixer.in_proj.weight"
    shape = content[name][1]
    rng = np.random.default_rng(1)
    odd = rng.normal(size=shape) * 10.0 ** rng.integers(-9, 4, shape)
    odd.flat[:6] = [np.inf, -np.inf, np.nan, -0.0, 60000.0, 1e-300]
    return content | {name: of_torch(torch.from_numpy(odd).to(kinds[dtype]))}


def torch_cast(content: Content, dtype: str, *, all_of_them: bool = False) -> Content:
    """What torch makes of it: `.to()` a tensor."""
    import torch

    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
    out: Content = {}
    for name, (old, shape, data) in content.items():
        if old == dtype or (not all_of_them and name.endswith(FP32_ONLY) and old == "F32"):
            out[name] = (old, shape, data)
            continue
        tensor = torch.frombuffer(bytearray(data), dtype=kinds[old]).reshape(shape)
        out[name] = of_torch(tensor.to(kinds[dtype]))
    return out


def without_nans(content: Content) -> Content:
    """NaNs made one and the same: which of them comes out is no part of a value."""
    import torch

    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
    out: Content = {}
    for name, (dtype, shape, data) in content.items():
        tensor = torch.frombuffer(bytearray(data), dtype=kinds[dtype])
        tensor[tensor.isnan()] = float("nan")
        out[name] = (dtype, shape, of_torch(tensor)[2])
    return out


def nans(content: Content) -> int:
    import torch

    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
    flat = (torch.frombuffer(bytearray(data), dtype=kinds[d]) for d, _, data in content.values())
    return sum(int(tensor.isnan().sum()) for tensor in flat)


@pytest.mark.parametrize("src", NAMES.values())
@pytest.mark.parametrize("word", NAMES)
@pytest.mark.parametrize("flag", [False, True])
def test_casts_are_torchs(src: str, word: str, flag: bool, tmp_path: Path) -> None:
    content, dst = of_dtype(src), NAMES[word]
    root = write_small_hf(tmp_path / "src", CONFIG, content)
    report = convtools.convert(root, tmp_path / "dst", options("hf", dtype=word, dtype_fp32_only=flag))
    got, want = read_hf(tmp_path / "dst"), torch_cast(content, dst, all_of_them=flag)
    assert nans(got) == nans(want) > 0
    assert differences(without_nans(want), without_nans(got)) == []
    same = {n: v for n, v in content.items() if want[n][0] == v[0]}
    assert differences(same, {n: got[n] for n in same}) == []  # bit for bit, NaNs and all
    counts: dict[tuple[str, str], int] = {}
    for name, (old, _, _) in content.items():
        if want[name][0] != old:
            counts[old, dst] = counts.get((old, dst), 0) + 1
    assert set(report.casts) == {Cast(s, d, n, (s, d) in EXACT) for (s, d), n in counts.items()}
    if src != dst and not flag:
        kept = sum(n.endswith(FP32_ONLY) for n in content)
        assert counts == {(src, dst): len(content) - kept * (src != "F32")} or src == "F32"


@pytest.mark.parametrize("to", ["torch_dist", "torch"])
@pytest.mark.parametrize("word", NAMES)
def test_a_cast_while_the_layout_changes(to: str, word: str, tmp_path: Path) -> None:
    content = of_dtype("BF16")
    root = write_small_hf(tmp_path / "src", CONFIG, content)
    convtools.convert(root, tmp_path / "there", options(to, tp=2, dtype=word))
    convtools.convert(tmp_path / "there", tmp_path / "back", options("hf"))
    want = torch_cast(content, NAMES[word])
    assert differences(without_nans(want), without_nans(read_hf(tmp_path / "back"))) == []


def test_an_exact_cast_there_and_back_is_the_identity(tmp_path: Path) -> None:
    content = filled(inventory(CONFIG))
    root = write_small_hf(tmp_path / "src", CONFIG, content)
    report = convtools.convert(root, tmp_path / "wide", options("torch_dist", dtype="fp32"))
    assert [c.exact for c in report.casts] == [True]
    report = convtools.convert(tmp_path / "wide", tmp_path / "back", options("hf", dtype="bf16"))
    assert [(c.src, c.dst, c.exact) for c in report.casts] == [("F32", "BF16", False)]
    assert differences(content, read_hf(tmp_path / "back")) == []


def test_nothing_is_cast_unless_asked(tmp_path: Path) -> None:
    for dtype in NAMES.values():
        root = write_small_hf(tmp_path / dtype, CONFIG, of_dtype(dtype))
        report = convtools.convert(root, tmp_path / f"{dtype}-dst", options("hf"))
        assert report.casts == ()
        assert differences(read_hf(root), read_hf(tmp_path / f"{dtype}-dst")) == []


def test_fp32_parts_in_the_models_dtype_are_cast_with_it(tmp_path: Path) -> None:
    """A_log in bf16 is no longer what Megatron keeps in fp32: `--dtype fp16` reaches it."""
    content = of_dtype("BF16")
    for name, (_, shape, data) in list(content.items()):
        if name.endswith(("A_log", ".D", "dt_bias")):
            content[name] = ("BF16", shape, data[: len(data) // 2])
    root = write_small_hf(tmp_path / "src", CONFIG, content)
    convtools.convert(root, tmp_path / "dst", options("hf", dtype="fp16"))
    got = {n: v[0] for n, v in read_hf(tmp_path / "dst").items()}
    assert {n for n in got if got[n] == "F32"} == {n for n in got if n.endswith("e_score_correction_bias")}
    assert set(got.values()) == {"F16", "F32"}


def test_a_dtype_does_not_hide_a_tensor_that_is_odd(tmp_path: Path) -> None:
    content = of_dtype("BF16")
    name = "backbone.layers.2.mixer.q_proj.weight"
    _, shape, data = content[name]
    root = write_small_hf(tmp_path / "src", CONFIG, content | {name: ("F16", shape, data)})
    with pytest.raises(AccountingError, match=name):
        convtools.convert(root, tmp_path / "dst", options("torch", dtype="bf16"))
    report = convtools.convert(root, tmp_path / "dst", options("torch", dtype="bf16", mixed_dtypes=True))
    assert [(c.src, c.dst, c.tensors) for c in report.casts] == [("F16", "BF16", 1)]
    assert len(data) == WIDTH["F16"] * shape[0] * shape[1]


@pytest.mark.parametrize(
    ("src", "word"), [("BF16", "fp16"), ("F32", "fp16"), ("F64", "fp32"), ("F64", "bf16")]
)
def test_a_number_that_would_become_infinite_is_an_error(src: str, word: str, tmp_path: Path) -> None:
    import torch

    kind = {"BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}[src]
    name = "backbone.layers.2.mixer.q_proj.weight"
    content = of_dtype(src)
    tensor = torch.zeros(content[name][1], dtype=kind)
    tensor[1, 2] = torch.finfo(kind).max
    root = write_small_hf(tmp_path / "src", CONFIG, content | {name: of_torch(tensor)})
    with pytest.raises(AccountingError, match=name):
        convtools.convert(root, tmp_path / "dst", options("hf", dtype=word))
    assert [p.name for p in tmp_path.iterdir()] == ["src"]
