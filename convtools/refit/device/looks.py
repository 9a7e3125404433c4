"""What is done to bytes where they lie on a device: copied, fingerprinted, searched for NaN, marked.

No xxh3 runs there. A bucket's mark is made of the fingerprints of its parts, which are computed on the
device anyway; a bucket of the same parts has the same mark wherever it lies.
"""

import hashlib
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from convtools.equality.fingerprint import Fingerprint
from convtools.equality.fingerprint_torch import tensor_value
from convtools.equality.one_pass import Floats
from convtools.layout.plan import Move
from convtools.refit.device.memory import as_tensor
from convtools.refit.plan import Part
from convtools.refit.protocol import PartRow

if TYPE_CHECKING:
    import torch

_PART = struct.Struct("<4Q16s")
_PIECE = 32 << 20  # bytes that are searched at once


def value_of(data: "torch.Tensor", start: int) -> int:
    """The fingerprint's value of bytes that lie at byte `start` of their tensor."""
    return tensor_value(data, Move(start, 0, (), data.numel()))


def mark(parts: Iterable[tuple[Part | PartRow, int]]) -> bytes:
    """128 bits of a bucket, of its parts and their values."""
    made = hashlib.blake2b(b"convtools device bucket/1", digest_size=16)
    for part, value in parts:
        where = (part.tensor, part.start, part.nbytes, part.offset)
        made.update(_PART.pack(*where, value.to_bytes(16, "little")))
    return made.digest()


def mark_of(data: "torch.Tensor", parts: Iterable[Part | PartRow]) -> bytes:
    """The mark of a bucket as it lies there now."""
    return mark((p, value_of(data[p.offset : p.offset + p.nbytes], p.start)) for p in parts)


def all_finite(data: "torch.Tensor", floats: Floats) -> bool:
    """Whether the floats whose bytes these are hold neither NaN nor infinity."""
    import torch

    if not floats.size or not data.numel():
        return True
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[floats.size]
    items, step = data.view(kind), _PIECE // floats.size
    pieces = (items[at : at + step] for at in range(0, items.numel(), step))
    return not any(bool(((piece & floats.infinity) == floats.infinity).any()) for piece in pieces)


def copy_and_look(to: Any, data: Any, start: int, value: Fingerprint | None) -> None:
    """Copy bytes, either side on a device or the host, and add what lies at `to` then to `value`."""
    import numpy as np

    if isinstance(to, np.ndarray):
        to[:] = data.cpu().numpy()
        if value is not None:
            value.add(start, to.data)
        return
    to.copy_(as_tensor(data))
    if value is not None:
        value.add_value(value_of(to, start))
