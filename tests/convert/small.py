"""Small checkpoints as plain dicts that a test may change, and back to files: HF, torch_dist, torch."""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from convtools.layout.region import Region
from convtools.stores.dcp import open_tensors, read_metadata
from convtools.stores.dcp_tensor import DcpChunk, DcpTensor
from convtools.stores.dcp_write import write_metadata
from convtools.stores.torch_frames import tensor_frame
from tests.nemotron_checkpoints import Tensors
from tests.tensors import Content

WIDTH = {"BF16": 2, "F16": 2, "I16": 2, "F32": 4, "F64": 8, "I32": 4}


def filled(tensors: Tensors, seed: int = 0) -> Content:
    """Random bytes for every tensor: finite floats in every float dtype."""
    import numpy as np

    rng = np.random.default_rng(seed)
    out: Content = {}
    for name, (dtype, shape) in tensors.items():
        halves = rng.integers(0, 0x3C00, prod(shape) * WIDTH[dtype] // 2, dtype="<u2")
        out[name] = (dtype, tuple(shape), halves.tobytes())
    return out


def write_safetensors(path: Path, content: Content) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in content.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(data for _, _, data in content.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def write_small_hf(root: Path, config: dict[str, Any], content: Content) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(config))
    write_safetensors(root / "model.safetensors", content)
    return root


def read_dist(folder: Path) -> tuple[Content, dict[str, tuple[str, int, int]]]:
    """(every key whole, where the pickled objects lie) of one iteration."""
    import numpy as np

    metadata = read_metadata(folder)
    out: Content = {}
    for key, tensor in open_tensors(metadata, list(metadata.tensors)).items():
        width = WIDTH[tensor.dtype]
        whole = np.zeros((*tensor.shape, width), "u1")
        for blob in tensor.blobs:
            at = tuple(slice(o, e) for o, e in zip(blob.region.offsets, blob.region.ends, strict=True))
            with open(blob.path, "rb") as file:
                file.seek(blob.offset)
                data = file.read(blob.region.numel * width)
            whole[at] = np.frombuffer(data, "u1").reshape(*blob.region.sizes, width)
        out[key] = (tensor.dtype, tuple(tensor.shape), whole.tobytes())
    return out, dict(metadata.objects)


def write_dist(folder: Path, content: Content, objects: dict[str, tuple[str, int, int]]) -> None:
    """Put these keys in the place of an iteration's tensors, one chunk each; objects stay where they are."""
    name, at, tensors = "__9_0.distcp", 0, {}
    with open(folder / name, "wb") as file:
        for key, (dtype, shape, data) in content.items():
            prefix, suffix = tensor_frame(dtype, shape)
            length = len(prefix) + len(data) + len(suffix)
            file.write(prefix + data + suffix)
            tensors[key] = DcpTensor(dtype, shape, (DcpChunk(Region.whole(shape), name, at, length),))
            at += length
    (folder / ".metadata").write_bytes(write_metadata(tensors, objects))


def files(root: Path) -> dict[str, bytes]:
    """Relative name -> bytes of every file that is not a safetensors file or their index."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.endswith((".safetensors", ".safetensors.index.json"))
    }


def stacked(content: Content) -> Content:
    """Routed experts as newer transformers store them: one 3-D tensor for all of a layer."""
    out: Content = {}
    for name, (dtype, shape, data) in content.items():
        if ".mixer.experts." not in name:
            out[name] = (dtype, shape, data)
            continue
        stem, _, tail = name.partition(".mixer.experts.")
        whole = f"{stem}.mixer.experts.{tail.split('.')[1]}"
        _, old, before = out.get(whole, (dtype, (0, *shape), b""))
        out[whole] = (dtype, (old[0] + 1, *shape), before + data)
    return out


def torch_files(folder: Path) -> Iterator[Path]:
    """The rank files of a legacy iteration."""
    yield from sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))
