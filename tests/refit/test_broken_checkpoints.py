"""A checkpoint that is written to while it is pushed: never a part of one and a part of another."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from convtools.refit.applier import ShadowApplier
from convtools.refit.errors import RefitError
from convtools.refit.receiver import Receiver
from convtools.refit.sinks.base import DirectSink
from convtools.refit.sync import WeightSync
from convtools.refit.weights import TensorWeights
from tests.refit.engines import Tensors, model, versions_in


def write(root: Path, version: int) -> Path:
    """Two shards, as a trainer writes them in place."""
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text('{"model_type": "none"}')
    tensors, where = model(version), {}
    for i in (0, 1):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        mine = {name: tensors[name] for name in sorted(tensors)[i::2]}
        save_file(mine, root / file, {"format": "pt"})
        where |= dict.fromkeys(mine, file)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


def in_place(root: Path) -> None:
    for path in root.glob("*.safetensors"):
        shutil.copyfile(write(root.with_name("new"), 2) / path.name, path)


def replaced(root: Path) -> None:
    for path in root.glob("*.safetensors"):
        os.replace(write(root.with_name("new"), 2) / path.name, path)


def engine_of(source: Tensors) -> tuple[Tensors, Receiver]:
    served = {name: np.zeros_like(tensor) for name, tensor in source.items()}
    return served, Receiver(ShadowApplier(TensorWeights(served)))


@pytest.mark.parametrize("change", [in_place, replaced])
def test_a_checkpoint_that_changes_while_it_is_pushed(change: Callable[[Path], None], tmp_path: Path) -> None:
    served, receiver = engine_of(model(1))
    root, told = write(tmp_path / "src", 1), [0]

    def progress(_: int) -> None:
        told[0] += 1
        if told[0] == 3:
            change(root)

    with WeightSync(str(root), [DirectSink(receiver)], bucket_bytes=256, progress=progress) as sync:
        with pytest.raises(RefitError, match="the source changed while it was pushed"):
            sync.push(1)
        assert (receiver.state, receiver.version) == ("clean", 0) and versions_in(served) == {0}
        assert sync.push(2).version == 2  # written anew between two pushes, laid out as before
        assert versions_in(served) == {2}


def test_a_checkpoint_that_was_laid_out_anew_since_it_was_opened(tmp_path: Path) -> None:
    served, receiver = engine_of(model(1))
    root = write(tmp_path / "src", 1)
    with WeightSync(str(root), [DirectSink(receiver)], bucket_bytes=256) as sync:
        sync.push(1)
        whole = model(2)
        for path in root.glob("model*"):
            path.unlink()
        save_file(whole, root / "model.safetensors", {"format": "pt"})
        with pytest.raises(RefitError, match="not the one that was opened"):
            sync.push(2)
    assert versions_in(served) == {1} and receiver.version == 1


def test_another_name_for_a_file_is_no_change(tmp_path: Path) -> None:
    served, receiver = engine_of(model(1))
    root = write(tmp_path / "src", 1)
    links = iter(range(1 << 20))

    def progress(_: int) -> None:
        os.link(root / "model-00001-of-00002.safetensors", tmp_path / f"link{next(links)}")

    with WeightSync(str(root), [DirectSink(receiver)], bucket_bytes=256, progress=progress) as sync:
        sync.push(1)
    assert versions_in(served) == {1}
