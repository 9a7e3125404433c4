"""Expert tensor parallelism that is not tp: experts are cut by etp and dealt by ep, the rest by tp."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convtools
from convtools.errors import ParallelError
from convtools.stores.dcp import read_metadata
from tests.convert.small import filled, read_dist, write_small_hf
from tests.nemotron_checkpoints import TINY, inventory
from tests.tensors import differences, read_hf, read_rank

pytest.importorskip("torch")

MOE: dict[str, Any] = TINY | {
    "n_groups": 4, "num_key_value_heads": 4, "vocab_size": 24, "num_hidden_layers": 2,
    "hybrid_override_pattern": "E*", "moe_latent_size": 0,
}  # fmt: skip
ETP = [
    (1, 1, 2),
    (2, 1, 1),
    (2, 1, 2),
    (1, 2, 1),
    (1, 2, 2),
    (4, 2, 1),
    (4, 2, 2),
    (4, 1, 2),
    (2, 4, 1),
    (4, 1, 4),
]


def array(value: tuple[str, tuple[int, ...], bytes]) -> np.ndarray:
    return np.frombuffer(value[2], "<u2" if value[0] == "BF16" else "<u4").reshape(value[1])


def share(whole: np.ndarray, dim: int, of: int, index: int) -> np.ndarray:
    return np.split(whole, of, dim)[index]


def convert(src: Path, dst: Path, to: str, **options: Any) -> None:
    convtools.convert(src, dst, convtools.Options(to=to, make_vocab_size_divisible_by=1, **options))


@pytest.mark.parametrize(("tp", "etp", "ep"), ETP)
def test_experts_are_cut_by_etp_and_the_rest_by_tp(tp: int, etp: int, ep: int, tmp_path: Path) -> None:
    src = write_small_hf(tmp_path / "hf", MOE, filled(inventory(MOE)))
    hf = {n: array(v) for n, v in read_hf(src).items()}
    convert(src, tmp_path / "dist", "torch_dist", tp=tp, etp=etp, ep=ep)
    convert(tmp_path / "dist", tmp_path / "back", "hf")
    assert differences(read_hf(src), read_hf(tmp_path / "back")) == []
    # Which file holds which part: experts e * etp + t within the ep ranks, the rest by tp.
    metadata = read_metadata(tmp_path / "dist/iter_0000001")
    key = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight"
    assert metadata.tensors[key].shape == (4, 12, 16)
    for chunk in metadata.tensors[key].chunks:
        expert, row, _ = chunk.region.offsets
        assert chunk.region.sizes == (1, 12 // etp, 16)
        assert chunk.relative_path == f"__{expert // (4 // ep) * etp + row // (12 // etp)}_0.distcp"
    for chunk in metadata.tensors["output_layer.weight"].chunks:
        assert chunk.region.sizes == (24 // tp, 16)
        assert chunk.relative_path == f"__{chunk.region.offsets[0] // (24 // tp)}_0.distcp"
    size = np.lcm(tp, etp * ep)
    ranks = [(r % tp, r // etp % ep, r % etp) for r in range(size)]
    if len({(t, e) for t, e, _ in ranks}) < size:
        with pytest.raises(ParallelError, match="cannot be stored in the legacy format"):
            convert(src, tmp_path / "m", "torch", tp=tp, etp=etp, ep=ep)
        return
    convert(src, tmp_path / "m", "torch", tp=tp, etp=etp, ep=ep)
    for t, e, x in ranks:
        name = f"mp_rank_{t:02d}" + (f"_{e:03d}" if ep > 1 else "")
        _, tensors, _ = read_rank(tmp_path / "m/iter_0000001" / name / "model_optim_rng.pt")
        held = {n: array(v) for n, v in tensors.items()}
        assert (held["output_layer.weight"] == share(hf["lm_head.weight"], 0, tp, t)).all()
        proj = share(hf["backbone.layers.1.mixer.o_proj.weight"], 1, tp, t)
        assert (held["decoder.layers.1.self_attention.linear_proj.weight"] == proj).all()
        shared = share(hf["backbone.layers.0.mixer.shared_experts.up_proj.weight"], 0, tp, t)
        assert (held["decoder.layers.0.mlp.shared_experts.linear_fc1.weight"] == shared).all()
        for local in range(4 // ep):
            at = f"backbone.layers.0.mixer.experts.{e * (4 // ep) + local}."
            fc1, fc2 = (held[f"decoder.layers.0.mlp.experts.linear_fc{i}.weight{local}"] for i in (1, 2))
            assert (fc1 == share(hf[f"{at}up_proj.weight"], 0, etp, x)).all()
            assert (fc2 == share(hf[f"{at}down_proj.weight"], 1, etp, x)).all()
        assert f"decoder.layers.0.mlp.experts.linear_fc1.weight{4 // ep}" not in held
    convert(tmp_path / "m", tmp_path / "again", "hf")
    assert differences(read_hf(src), read_hf(tmp_path / "again")) == []
    convert(tmp_path / "m", tmp_path / "dist2", "torch_dist", tp=tp, etp=etp, ep=ep)
    assert (
        differences(
            read_dist(tmp_path / "dist/iter_0000001")[0], read_dist(tmp_path / "dist2/iter_0000001")[0]
        )
        == []
    )
