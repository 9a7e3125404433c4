"""A checkpoint in transformers, and the proof that its tensors lie where the engine says they do.

The weights that a refit writes are the live model's own memory, under the checkpoint's names. Before
anything is served each is compared with the file, byte by byte, and every byte of every parameter must
belong to one of them: so what is verified later are the parameters that compute, not a copy of them.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convtools.engine.places import Place, is_mtp, place_of
from convtools.errors import CheckpointError, UsageError, capped, tick
from convtools.stores.base import TORCH_DTYPE, StoredTensor
from convtools.stores.hf import HFCheckpoint, open_hf

if TYPE_CHECKING:
    import torch

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""Plain loops over heads and experts: they take any size, and give the same numbers each time."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, and its memory by the names of its checkpoint."""

    model: Any
    """transformers' module."""
    named: "Mapping[str, torch.Tensor]"
    """Name in the checkpoint -> the memory that computes; carried tensors too."""
    carried: tuple[str, ...]
    """Tensors that are held, pushed and verified, but that transformers does not compute with: MTP."""
    computed: tuple[str, ...]
    """The model's buffers that are no weights but follow from config.json."""


def check_folder(root: Path) -> None:
    """Raise UsageError where there is no folder."""
    if not root.is_dir():
        raise UsageError(
            f"{tick(str(root))} is a file" if root.exists() else f"there is no folder {tick(str(root))}",
            expected="the folder of a Hugging Face checkpoint",
        )


def load(path: str | Path) -> Loaded:
    """Load a checkpoint's folder on the CPU, each tensor in the dtype in which it is stored.

    Raises UsageError where transformers is missing or cannot load it, CheckpointError where a tensor is
    missing, has no place, or does not lie in the model's memory as it lies in the file.
    """
    root = Path(path)
    check_folder(root)
    stored = open_hf(root)  # its headers are checked before anyone else reads them
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UsageError(
            f"the reference engine needs {error.name}",
            fix="pip install -e '.[engine]' in convtools' source tree",
        ) from None
    with _quiet(transformers), torch.no_grad():
        model = _load(transformers, root)
        model.eval().requires_grad_(False)
        loaded = _mapped(model, stored)
        _forward(loaded)
    return loaded


def _load(transformers: Any, root: Path) -> Any:
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            root, dtype="auto", local_files_only=True, trust_remote_code=False, use_safetensors=True, **EAGER
        )
    except Exception as error:  # whatever a stranger's config makes it raise
        raise UsageError(
            "transformers cannot load it", where=root, found=f"{type(error).__name__}: {str(error)[:400]}"
        ) from None


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """What its log says of missing and left over tensors, we say ourselves, as errors."""
    log = transformers.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(logging.CRITICAL)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def _mapped(model: Any, stored: HFCheckpoint) -> Loaded:
    """Find every tensor of the checkpoint in the model, and prove it."""
    import torch

    own: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
    for tensor in own.values():
        tensor.data = tensor.data.contiguous()
    places = {name: place_of(name, own) for name in stored.tensors}
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    carried = tuple(n for n, place in places.items() if place is None and is_mtp(n, num_layers))
    if strays := [tick(n) for n, place in places.items() if place is None and n not in carried]:
        raise CheckpointError(
            "tensors that the engine has no place for", where=stored.root, found=capped(strays)
        )
    placed = {name: place for name, place in places.items() if place is not None}
    _as_stored(own, placed, stored)
    views = {name: view_of(own[place.own], place, name) for name, place in placed.items()}
    prove(views, stored)
    check_covered(views, own, stored)
    views |= {name: _empty(stored.tensors[name]) for name in carried}
    for name in carried:
        _read(stored.tensors[name], views[name])
    taken = {tensor.data_ptr() for tensor in views.values()}
    used = {place.own for place in placed.values()}
    views |= {n: t for n, t in own.items() if n not in used and n not in views and t.data_ptr() in taken}
    computed = tuple(name for name, _ in model.named_buffers() if name not in own)
    return Loaded(model, views, carried, computed)


def _as_stored(own: "Mapping[str, torch.Tensor]", placed: Mapping[str, Place], stored: HFCheckpoint) -> None:
    """Give tensors that transformers cast their dtype and bytes of the file again."""
    import torch

    of: dict[str, list[str]] = {}
    for name, place in placed.items():
        of.setdefault(place.own, []).append(name)
    for name, parts in of.items():
        dtypes = {stored.tensors[part].dtype for part in parts}
        if len(dtypes) > 1:
            raise CheckpointError(
                f"{tick(name)} is made of tensors of several dtypes", found=capped(sorted(dtypes))
            )
        dtype, had = getattr(torch, TORCH_DTYPE[dtypes.pop()]), own[name].dtype
        if had == dtype:
            continue
        before = own[name].data
        own[name].data = before.to(dtype)
        for part in parts:
            kept, view = view_of(before, placed[part], part), view_of(own[name], placed[part], part)
            if tuple(view.shape) == stored.tensors[part].shape:
                read = _empty(stored.tensors[part])
                _read(stored.tensors[part], read)
                if torch.equal(read.to(had), kept):  # else it stays as it is, and `prove` names it
                    view.copy_(read)


def view_of(tensor: "torch.Tensor", place: Place, name: str) -> "torch.Tensor":
    """The part of `tensor` that `place` means. Raises CheckpointError where there is none such."""
    view = tensor.detach()
    if place.expert is not None:
        if view.ndim != 3 or place.expert >= view.shape[0]:
            raise CheckpointError(f"{tick(place.own)} has no expert for {tick(name)}", found=list(view.shape))
        view = view[place.expert]
    if place.half is not None:
        rows = view.shape[0] // 2
        view = view[place.half * rows : (place.half + 1) * rows]
    return view


def prove(views: "Mapping[str, torch.Tensor]", stored: HFCheckpoint) -> None:
    """Raises CheckpointError, naming them, unless the views hold what the files hold, byte for byte."""
    problems = []
    for name, view in views.items():
        expected = stored.tensors[name]
        shape, dtype = tuple(view.shape), str(view.dtype).removeprefix("torch.")
        if shape != expected.shape or dtype != TORCH_DTYPE[expected.dtype]:
            problems.append(f"{tick(name)} is {dtype} {list(shape)} in the model")
        elif not view.is_contiguous():
            problems.append(f"{tick(name)} is not contiguous in the model")
        elif _differs(expected, view):
            problems.append(f"{tick(name)} has other bytes in the model")
    if problems:
        raise CheckpointError(
            "the model's own memory cannot be mapped back to the checkpoint",
            where=stored.root,
            found=capped(problems),
            fix="this architecture needs an engine that can: vLLM or SGLang",
        )


def check_covered(
    views: "Mapping[str, torch.Tensor]", own: "Mapping[str, torch.Tensor]", stored: HFCheckpoint
) -> None:
    """Raises CheckpointError, naming them, unless the views make up every byte of the model's tensors."""
    spans = sorted({(v.data_ptr(), v.data_ptr() + v.nbytes) for v in views.values() if v.nbytes})
    joined: list[list[int]] = []
    for start, end in spans:
        if joined and start < joined[-1][1]:
            raise CheckpointError("two tensors of the checkpoint lie on the same memory", where=stored.root)
        if joined and start == joined[-1][1]:
            joined[-1][1] = end
        else:
            joined.append([start, end])
    bare = [
        tick(name)
        for name, tensor in own.items()
        if tensor.nbytes
        and not any(a <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= b for a, b in joined)
    ]
    if bare:
        raise CheckpointError(
            "parameters that the checkpoint does not fill", where=stored.root, found=capped(bare)
        )


def _empty(tensor: StoredTensor) -> "torch.Tensor":
    import torch

    return torch.empty(tensor.shape, dtype=getattr(torch, TORCH_DTYPE[tensor.dtype]))


def _read(tensor: StoredTensor, to: "torch.Tensor") -> None:
    from convtools.equality.reading import read_into
    from convtools.refit.weights import writable_bytes

    blob = tensor.blobs[0]
    with blob.path.open("rb") as file:
        read_into(blob.path, file.fileno(), blob.offset, writable_bytes(tensor.name, to).data)


def _differs(expected: StoredTensor, view: "torch.Tensor") -> bool:
    import numpy as np

    from convtools.refit.weights import writable_bytes

    read = _empty(expected)
    _read(expected, read)
    return not np.array_equal(writable_bytes(expected.name, read), writable_bytes(expected.name, view))


def _forward(loaded: Loaded) -> None:
    """One token: what cannot be computed in the dtypes as stored shows now, not at the first request."""
    import torch

    try:
        loaded.model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
    except Exception as error:
        raise UsageError(
            "transformers cannot compute with the tensors as they are stored",
            found=f"{type(error).__name__}: {str(error)[:400]}",
        ) from None


__all__ = ["Loaded", "check_covered", "load", "prove", "view_of"]
