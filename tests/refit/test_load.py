"""A live rank filled from a checkpoint holds what Megatron's own rank holds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convtools
from convtools.conversion.options import Options
from convtools.conversion.target_layout import target_layout
from convtools.errors import AccountingError, UsageError
from convtools.layout.parallel import ParallelLayout, Rank
from convtools.refit.load import load_into
from tests.oracle_cases import Layout, layouts
from tests.tensors import Content, differences, of_torch, read_safetensors

torch = pytest.importorskip("torch")
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
CASES = [x for x in layouts("nemotron", "llama", "qwen2", "qwen3_moe", "deepseek", "gpt_oss") if x.hf]


def empty(content: Content) -> dict[str, Any]:
    """The rank's tensors before anything was loaded: numbers that no weight is."""
    return {n: torch.full(shape, 777.0, dtype=DTYPES[d]) for n, (d, shape, _) in content.items()}


def layout_of(case: Layout) -> ParallelLayout:
    assert case.hf
    sizes = Options(to="torch", **case.sizes)  # type: ignore[arg-type]
    layout = target_layout(convtools.open_source(case.hf), sizes)
    assert layout is not None
    return layout


def ranks(case: Layout) -> list[tuple[Rank, Content]]:
    """(rank, its tensors as real Megatron dumped them)."""
    dumps = {p.stem: p for p in (case.root / "state_dict").glob("*.safetensors")}
    found = [(rank, dumps.get(f"tp{rank.tp}_pp{rank.pp}_ep{rank.ep}")) for rank in layout_of(case).ranks()]
    return [(rank, read_safetensors(path)) for rank, path in found if path is not None]


def without_padding(content: Content, vocab: int, rank: Rank) -> Content:
    """Rows past the vocabulary as `load_into` leaves them: zero."""
    out = dict(content)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in out:
            dtype, shape, data = out[name]
            whole = np.frombuffer(data, "u1").reshape(shape[0], -1).copy()
            whole[max(0, vocab - rank.tp * shape[0]) :] = 0
            out[name] = (dtype, shape, whole.tobytes())
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_rank_holds_what_megatrons_holds(case: Layout) -> None:
    assert case.hf
    vocab = convtools.open_source(case.hf).model.spec.vocab
    seen = 0
    for rank, want in ranks(case):
        for store in (case.hf, case.root / "torch_dist"):
            if not store.is_dir():
                continue
            live = empty(want)
            source = convtools.open_source(store, hf_config=None if store == case.hf else case.hf)
            report = load_into(live, source, layout_of(case), rank)
            got = {name: of_torch(tensor) for name, tensor in live.items()}
            assert differences(without_padding(want, vocab, rank), got) == []
            assert report.nbytes == sum(len(data) for _, _, data in want.values())
            assert report.tensors == len(want)
            seen += 1
    assert seen or not (case.root / "state_dict").is_dir()


def some(tmp_path: Path) -> tuple[Path, ParallelLayout, Rank, dict[str, Any]]:
    from tests.convert.small import filled, write_small_hf
    from tests.families.tiny_configs import described, inventory

    model = described("LlamaForCausalLM", {}, {})
    root = write_small_hf(tmp_path / "hf", dict(model.config), filled(inventory(model)))
    layout = target_layout(convtools.open_source(root), Options(to="torch", tp=2))
    assert layout is not None
    convtools.convert(root, tmp_path / "m", Options(to="torch", tp=2))
    saved = torch.load(tmp_path / "m/iter_0000001/mp_rank_01/model_optim_rng.pt", weights_only=False)["model"]
    live = {n: torch.zeros_like(t) for n, t in saved.items() if not n.endswith("_extra_state")}
    return root, layout, Rank(1, 0, 0, 1), live


def test_a_tensor_missing_left_over_or_of_another_form_is_named_before_anything_is_written(
    tmp_path: Path,
) -> None:
    root, layout, rank, live = some(tmp_path)
    name = "decoder.final_layernorm.weight"
    for changed, says in (
        ({n: t for n, t in live.items() if n != name}, f"missing: `{name}`"),
        (live | {"other.weight": torch.zeros(3)}, "not in this model: `other.weight`"),
        (live | {name: torch.zeros(3, dtype=live[name].dtype)}, f"shape: `{name}`"),
        (live | {name: live[name].float()}, f"dtype: `{name}` is F32"),
    ):
        with pytest.raises(AccountingError, match=says):
            load_into(changed, root, layout, rank)
    wide = next(t for t in live.values() if t.dim() == 2)
    turned = {n: (t.T.contiguous().T if t is wide else t) for n, t in live.items()}
    with pytest.raises(UsageError, match="not contiguous"):
        load_into(turned, root, layout, rank)
    assert all(not t.any() for t in live.values())


def test_numpy_arrays_extra_states_and_casts(tmp_path: Path) -> None:
    root, layout, rank, live = some(tmp_path)
    arrays: dict[str, Any] = {n: np.zeros(tuple(t.shape), "f4") for n, t in live.items()}
    arrays["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
    report = load_into(arrays, root, layout, rank, cast=True)
    load_into(live, root, layout, rank)
    assert report.left_out == ("decoder.layers.0.mlp.linear_fc1._extra_state",)
    assert set(report.cast) == set(live)
    for name, tensor in live.items():
        np.testing.assert_array_equal(arrays[name], tensor.float().numpy())
        assert tensor.any() or "embedding" in name or "output" in name  # this rank's rows are padding
