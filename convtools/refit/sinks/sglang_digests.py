"""Digests of parameters that were built from a checkpoint, as SGLang on a CPU prints those of its own.

That is the first 8 bytes of SHA-256 over the parameter's bytes, in hex. The bytes are hashed as they are
read, in order: of a parameter of any size a few MiB are held.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from convtools.codecs.cast import FLOATS, cast, is_exact
from convtools.layout.region import Region
from convtools.refit.plan import Tensor
from convtools.refit.sinks.sglang_table import Built, Unknown
from convtools.stores.base import DTYPE_NBYTES

Read = Callable[[str, Region], Iterator[memoryview]]
"""(tensor, region) -> its bytes in order, in parts that are valid until the next."""
SAME, KEPT, OTHER = "same", "kept", "other"
_ZEROS = 1 << 20
_SIXTEEN = ("BF16", "F16")


class Found(NamedTuple):
    """What is known of a parameter of one rank."""

    state: str
    """same: the engine's bytes are the checkpoint's. kept: they are what SGLang makes of them. other: they
    are not."""
    why: str = ""
    dtype: str | None = None
    """What it is kept in, where just one dtype has this digest."""


@dataclass(slots=True)
class _Form:
    """A way in which SGLang may keep it, and the digest that it would have."""

    dtype: str
    make: Callable[[memoryview, str], Any]
    """(bytes, their dtype) -> bytes."""
    function: str = ""
    lossy: bool = False
    """Whether something of the checkpoint cannot be seen in it."""
    sha: Any = field(default_factory=hashlib.sha256)

    def add(self, data: memoryview, of: str) -> None:
        """The next bytes."""
        made = self.make(data, of)
        self.sha.update(made)
        if self.dtype != of and not self.function and not self.lossy:
            self.lossy = not is_exact(of, self.dtype) and bytes(cast(made, self.dtype, of)) != bytes(data)

    def found(self, stored: set[str], dtype: str | None) -> Found:
        """What it says that its digest is the engine's."""
        if self.function:
            return Found(KEPT, f"kept as {self.function} of it, in {self.dtype}: compared so")
        if stored == {self.dtype}:
            return Found(SAME, "", dtype)
        how = "compared as rounded to it" if self.lossy else "in which nothing of it is lost"
        return Found(KEPT, f"kept as {self.dtype}, {how}", dtype)


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
    odd = False
    for piece in built.pieces:
        if not piece.tensor:
            for form in forms:
                _zeros(form.sha, prod(piece.region.sizes) * DTYPE_NBYTES[form.dtype])
            continue
        of = tensors[piece.tensor].dtype
        for data in read(piece.tensor, piece.region):
            for form in forms:
                form.add(data, of)
            odd = odd or (any(form.dtype != of for form in forms) and _has_nan(data, of))
    hits = [form for form in forms if form.sha.digest()[:8].hex() == digest]
    if hits:
        return hits[0].found(stored, hits[0].dtype if len(hits) == 1 else None)
    if built.row.function:
        return Unknown(f"its digest is none of those of {built.row.function} that could be computed here")
    if odd:
        return Unknown("it holds NaN, whose bits a cast may change")
    return Found(OTHER)


def _forms(built: Built, stored: set[str], dtype: str | None) -> Iterator[_Form]:
    floats = stored <= set(FLOATS.values())
    if function := built.row.function:
        if floats:
            yield _Form("F32", _minus_exp, function)
        if floats and _torch() is not None:
            yield _Form("F32", _minus_exp_of_torch, function)
        return
    wanted = built.row.dtype or dtype
    for to in (wanted,) if wanted else dict.fromkeys((*sorted(stored), *_SIXTEEN, "F32")):
        if floats or stored == {to}:
            yield _Form(to, _caster(to))


def _caster(to: str) -> Callable[[memoryview, str], Any]:
    def make(data: memoryview, of: str) -> Any:
        if of == to:
            return data
        if of == "F64" and to in _SIXTEEN:  # torch rounds twice there
            return cast(cast(data, of, "F32"), "F32", to)
        return cast(data, of, to)

    return make


def _minus_exp(data: memoryview, of: str) -> Any:
    """Rounded from F64. Which of the two is the server's depends on its processor."""
    import numpy as np

    with np.errstate(over="ignore"):
        return (-np.exp(np.frombuffer(cast(data, of, "F32"), "<f4").astype("<f8"))).astype("<f4").tobytes()


def _minus_exp_of_torch(data: memoryview, of: str) -> Any:
    import numpy as np

    torch, wide = _torch(), np.frombuffer(cast(data, of, "F32"), "<f4")
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


__all__ = ["KEPT", "OTHER", "SAME", "Found", "Read", "judge"]
