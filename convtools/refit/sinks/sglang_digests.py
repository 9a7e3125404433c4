"""Digests of parameters that were built from a checkpoint, as SGLang on a CPU prints those of its own.

That is the first 8 bytes of SHA-256 over the parameter's bytes, in hex. The bytes are hashed as they are
read, in order: of a parameter of any size a few MiB are held.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from convtools.codecs.cast import FLOATS, cast, is_exact
from convtools.errors import UsageError
from convtools.layout.region import Region
from convtools.refit.plan import Tensor
from convtools.refit.sinks.sglang_table import Built, Unknown
from convtools.stores.base import DTYPE_NBYTES

Read = Callable[[str, Region], Iterator[memoryview]]
"""(tensor, region) -> its bytes in order, in parts that are valid until the next."""
SAME, KEPT, OTHER, UNKNOWN = "same", "kept", "other", "unknown"
_ZEROS = 1 << 20
_SIXTEEN = ("BF16", "F16")


class Found(NamedTuple):
    """What is known of a parameter of one rank."""

    state: str
    """same: the engine's bytes are the checkpoint's. kept: they are what SGLang makes of them. other: they
    are not. unknown."""
    why: str = ""


class _Form(NamedTuple):
    """A way in which SGLang may keep it."""

    dtype: str
    weaker: str
    """Empty: every bit of the checkpoint is in it."""
    sure: bool
    """Whether SGLang computes just this, so that another digest is another parameter."""
    make: Callable[[memoryview, str], Any]
    """(bytes, their dtype) -> bytes."""


def judge(
    built: Built, tensors: Mapping[str, Tensor], read: Read, digest: str, dtype: str | None
) -> Found | Unknown:
    """Whether SGLang's `digest` is that of what was built; `dtype`: the server's, None where unknown.

    Raises what reading raises.
    """
    stored = {tensors[p.tensor].dtype for p in built.pieces if p.tensor}
    forms = list(_forms(built, stored, dtype))
    if not forms:
        return Unknown(f"{' and '.join(sorted(stored))} is not kept by SGLang as it is")
    made = [hashlib.sha256() for _ in forms]
    odd = False
    for piece in built.pieces:
        if not piece.tensor:
            for form, one in zip(forms, made, strict=True):
                _zeros(one, prod(piece.region.sizes) * DTYPE_NBYTES[form.dtype])
            continue
        of = tensors[piece.tensor].dtype
        for data in read(piece.tensor, piece.region):
            for form, one in zip(forms, made, strict=True):
                one.update(form.make(data, of))
            odd = odd or (of in FLOATS.values() and dtype != of and _has_nan(data, of))
    for form, one in zip(forms, made, strict=True):
        if one.digest()[:8].hex() == digest:
            return Found(KEPT, form.weaker) if form.weaker else Found(SAME)
    if not all(form.sure for form in forms):
        return Unknown("its digest is none that could be computed for what SGLang makes of it")
    if odd and stored != {form.dtype for form in forms}:
        return Unknown("it holds NaN, whose bits a cast changes as it likes")
    return Found(OTHER)


def _forms(built: Built, stored: set[str], dtype: str | None) -> Iterator[_Form]:
    row = built.row
    if row.function == "-exp":
        if not stored <= set(FLOATS.values()):
            return
        text = "kept as -exp of it, in F32: compared so"
        yield _Form("F32", text, False, lambda data, of: _minus_exp(data, of, rounded=True))
        if _torch() is not None:
            yield _Form("F32", text, False, lambda data, of: _minus_exp(data, of, rounded=False))
        return
    wanted = row.dtype or dtype
    for to in (wanted,) if wanted else dict.fromkeys((*sorted(stored), *_SIXTEEN, "F32")):
        if stored == {to}:
            yield _Form(to, "", True, lambda data, of: data)
        elif stored <= set(FLOATS.values()):
            weaker = "" if all(is_exact(of, to) for of in stored) else f"kept as {to}: compared as rounded to it"
            yield _Form(to, weaker, True, _caster(to))


def _caster(to: str) -> Callable[[memoryview, str], Any]:
    def make(data: memoryview, of: str) -> Any:
        if of == "F64" and to in _SIXTEEN:  # torch rounds twice there
            return cast(cast(data, of, "F32"), "F32", to)
        return cast(data, of, to)

    return make


def _minus_exp(data: memoryview, of: str, *, rounded: bool) -> Any:
    """As torch computes it, or rounded from F64: which of the two is the server's depends on its processor."""
    import numpy as np

    wide = np.frombuffer(cast(data, of, "F32"), "<f4")
    if rounded:
        with np.errstate(over="ignore"):
            return (-np.exp(wide.astype("<f8"))).astype("<f4").tobytes()
    torch = _torch()
    return (-torch.exp(torch.from_numpy(wide.copy()))).numpy().tobytes()


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch


def _has_nan(data: memoryview, of: str) -> bool:
    import numpy as np

    return bool(np.isnan(np.frombuffer(cast(data, of, "F64"), "<f8")).any())


def _zeros(one: Any, nbytes: int) -> None:
    zeros = bytes(min(nbytes, _ZEROS))
    for at in range(0, nbytes, _ZEROS):
        one.update(zeros[: min(_ZEROS, nbytes - at)])


__all__ = ["KEPT", "OTHER", "SAME", "UNKNOWN", "Found", "Read", "judge"]
