"""What a slice must hold, told by hand: names renumbered, bytes as they were."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from convtools.slicing.build import slice_checkpoint
from convtools.slicing.options import SliceOptions
from convtools.slicing.report import SliceReport
from tests.tensors import Content


def cut(src: Path | str, dst: Path, **options: Any) -> SliceReport:
    """Slice with few threads and without waiting for the disk."""
    return slice_checkpoint(str(src), dst, SliceOptions(**{"fsync": False, "workers": 1} | options))


def by_hand(
    content: Content, keep: Sequence[int], *, prefix: str, drop: Callable[[str], bool] = lambda name: False
) -> Content:
    """The tensors of a slice: those of layer `keep[i]` as layer i, all others as they are."""
    out: Content = {}
    for name, value in content.items():
        match = re.fullmatch(re.escape(prefix) + r"(\d+)\.(.+)", name)
        if drop(name):
            continue
        if not match:
            out[name] = value
            continue
        for new, old in enumerate(keep):
            if old == int(match[1]):
                out[f"{prefix}{new}.{match[2]}"] = value
    return out
