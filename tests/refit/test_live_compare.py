"""A running engine as a side of `compare`: by fingerprints of what it serves, never more than is known."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from convtools.equality.compare import compare
from convtools.equality.options import CompareOptions
from convtools.equality.verdict import Comparison
from convtools.errors import UsageError
from convtools.refit import live_compare
from convtools.refit.applier import InPlaceApplier, ShadowApplier
from convtools.refit.errors import PeerError, RefitError
from convtools.refit.live_compare import compare_live
from convtools.refit.plan import Tensor
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from tests.convert.small import write_small_hf
from tests.equality.equal_pairs import (
    LLAMA_TIED,
    NEMOTRON,
    QWEN3_MOE,
    Case,
    fuse,
    live,
    write_hf,
    write_megatron,
)  # fmt: skip
from tests.refit.serving import Serving, serving

NAME = "backbone.layers.2.mixer.q_proj.weight"


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(NEMOTRON, tmp_path_factory.mktemp("nemotron") / "hf")


@contextmanager
def engine(case: Case, where: Path, **more: Any) -> Iterator[Serving]:
    tensors = live(case.content())
    if case is LLAMA_TIED:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    with serving(tensors, where, **more) as found:
        yield found


@pytest.mark.parametrize("case", [NEMOTRON, LLAMA_TIED], ids=lambda c: c.name)
def test_equal_from_every_format(case: Case, tmp_path: Path) -> None:
    hf = write_hf(case, tmp_path / "hf")
    sides = [hf, *(write_megatron(case, hf, tmp_path / to, to) for to in ("torch_dist", "torch"))]
    with engine(case, tmp_path / "e", version=5) as found:
        for side in sides:
            one = compare_live(str(side), found.url)
            assert (one.equal, one.b_format, one.b) == (True, "engine", f"{found.url} at version 5")
            assert one.heading.startswith("Equal by fingerprint") and "equal by fingerprint" in one.verdict
            other = compare_live(found.url, str(side))
            assert (other.equal, other.a_format, other.exit_code) == (True, "engine", 0)
        both = compare_live(found.url, found.url)
        assert both.equal is True and both.compared == len(found.tensors)


def test_another_spelling_of_the_same_model(tmp_path: Path) -> None:
    """The engine has one tensor an expert, the checkpoint one of all."""
    fused = str(write_small_hf(tmp_path / "fused", QWEN3_MOE.config, fuse(QWEN3_MOE.content())))
    with engine(QWEN3_MOE, tmp_path / "e") as found:
        assert compare_live(fused, found.url).equal is True
        found.tensors["model.layers.0.mlp.experts.1.up_proj.weight"].view(-1)[3] += 1
        one = compare_live(fused, found.url)
        assert [r.name for r in one.tensors if r.faulty] == ["model.layers.0.mlp.experts.1.up_proj.weight"]


def test_one_bit_is_found(hf: Path, tmp_path: Path) -> None:
    import torch

    with engine(NEMOTRON, tmp_path / "e") as found:
        found.tensors[NAME].view(torch.uint8)[1, 2] ^= 1
        one = compare_live(str(hf), found.url)
        assert (one.equal, one.exit_code) == (False, 1)
        assert [(r.name, r.verdict) for r in one.tensors if r.faulty] == [(NAME, "differs")]
        assert one.verdict == f"not equal: 1 of 63 tensors differs: `{NAME}`"


def test_names_shapes_and_dtypes_are_listed_as_for_two_checkpoints(hf: Path, tmp_path: Path) -> None:
    tensors = live(NEMOTRON.content())
    tensors["extra.weight"] = tensors.pop("backbone.layers.0.mixer.D")
    tensors[NAME] = tensors[NAME][:-1].contiguous()
    tensors["lm_head.weight"] = tensors["lm_head.weight"].float()
    with serving(tensors, tmp_path / "e") as found:
        one = compare_live(str(hf), found.url)
    assert {r.name: r.verdict for r in one.tensors if r.faulty} == {
        "backbone.layers.0.mixer.D": "missing in B",
        "extra.weight": "missing in A",
        NAME: "shape differs",
        "lm_head.weight": "dtype differs",
    }
    assert one.exit_code == 1


def test_every_rank_must_hold_it(hf: Path, tmp_path: Path) -> None:
    with engine(NEMOTRON, tmp_path / "e/rank-0"), engine(NEMOTRON, tmp_path / "e/rank-1") as second:
        url = f"unix://{tmp_path}/e"
        assert compare_live(str(hf), url).equal is True
        second.tensors[NAME].view(-1)[0] += 1
        one = compare_live(str(hf), url)
        assert one.equal is False and one.b == f"{url}/rank-1 at version 0"
        assert compare_live(url, url).equal is False


def test_an_engine_that_holds_no_version(hf: Path, tmp_path: Path) -> None:
    """In a transaction, and after one that could not be taken back."""
    with engine(NEMOTRON, tmp_path / "e", applier=InPlaceApplier) as found:
        sync = WeightSync(str(hf), [LocalSink(tmp_path / "e")], bucket_bytes=4096, finite=False)
        with sync:
            sync._fleet.open(1, force=False, fingerprints=True)
            with pytest.raises(RefitError, match="is updating: what it holds is no version"):
                compare_live(str(hf), found.url)
            sync._fleet.abort("a test")
            assert found.receiver.state == "clean"
        changed = {name: tensor.nan_to_num() for name, tensor in live(NEMOTRON.content()).items()}
        changed["lm_head.weight"][0, 0] = float("nan")
        with (
            WeightSync(changed, [LocalSink(tmp_path / "e")], bucket_bytes=4096) as late,
            pytest.raises(RefitError, match="holds NaN"),
        ):
            late.push(1)
        assert found.receiver.state == "poisoned"
        with pytest.raises(RefitError, match="is poisoned: what it holds is no version"):
            compare_live(str(hf), found.url)


def test_a_push_meanwhile_takes_the_verdict_away(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(NEMOTRON, tmp_path / "e") as found:

        def compares(*given: Any) -> Comparison:
            with WeightSync(str(hf), [LocalSink(tmp_path / "e")], finite=False) as sync:
                sync.push(9)
            return compare(*given)

        monkeypatch.setattr(live_compare, "compare", compares)
        with pytest.raises(RefitError, match="took other weights while it was compared") as caught:
            compare_live(str(hf), found.url)
        assert (caught.value.expected, caught.value.found) == ("version 0", "version 9, clean")


class Packed(ShadowApplier):
    """An engine that keeps one tensor in a form of its own."""

    def serves(self, tensor: Tensor) -> Any:
        return None if tensor.name == NAME else super().serves(tensor)

    def weaker(self, tensor: Tensor) -> str:
        return "packed for the CPU"


def test_what_cannot_be_read_back_is_said(hf: Path, tmp_path: Path) -> None:
    with engine(NEMOTRON, tmp_path / "e", applier=Packed) as found:
        with pytest.raises(RefitError, match=r"q_proj.weight` cannot be read back"):
            compare_live(str(hf), found.url)
        with WeightSync(str(hf), [LocalSink(tmp_path / "e")], finite=False) as sync:
            sync.push(1)
        one = compare_live(str(hf), found.url)
        assert one.equal is True
        assert one.verdict.endswith(
            "of 1 tensor the engine's own bytes cannot be read back: compared as they were received"
        )
        assert f"`{NAME}`: packed for the CPU" in one.notes
        found.tensors["lm_head.weight"].view(-1)[0] += 1
        worse = compare_live(str(hf), found.url)
        assert worse.equal is False and "received" not in worse.verdict


def test_what_makes_no_sense(hf: Path, tmp_path: Path) -> None:
    with engine(NEMOTRON, tmp_path / "e") as found:
        with pytest.raises(UsageError, match="values cannot be compared"):
            compare_live(str(hf), found.url, CompareOptions(ulp=1))
        with pytest.raises(UsageError, match="matches no tensor"):
            compare_live(str(hf), found.url, CompareOptions(only="nothing*"))
        with pytest.raises(UsageError, match="for a Megatron side"):
            compare_live(str(hf), found.url, CompareOptions(hf_config=hf))
        some = compare_live(str(hf), found.url, CompareOptions(only="*norm*"))
        assert some.equal is True and "not compared" in some.verdict
    with pytest.raises(PeerError, match="no engine listens"):
        compare_live(str(hf), f"unix://{tmp_path}/e")
