"""The files of a checkpoint that is pushed must be the same from its first byte to its last.

Else an engine would be given a part of one checkpoint and a part of another, each byte as it was read.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from convtools.equality.reading import Stamp, stamp, stamps
from convtools.errors import CheckpointError
from convtools.refit.errors import RefitError
from convtools.stores.hf import open_hf


class Unchanged:
    """What its files were when a pass began; they may be written anew, as they were laid out, in between."""

    def __init__(self, source: Any) -> None:
        """`source`: what the checkpoint was opened as, `Source` or tensors by name."""
        self._source = source
        self._seen = self._now()

    def begin(self) -> None:
        """Raises RefitError where tensors lie elsewhere in the files than when these were opened."""
        now = self._now()
        if now != self._seen and not self._laid_out_alike():
            changed = next(path for path in self._seen if now.get(path) != self._seen[path])
            raise RefitError(
                "the checkpoint is not the one that was opened", where=changed,
                fix="open it again: make the WeightSync anew",
            )  # fmt: skip
        self._seen = now

    def check(self, paths: Iterable[Path]) -> None:
        """After a read of them. Raises RefitError where one has changed since `begin`."""
        for path in set(paths):
            if path in self._seen and _lasting(stamp(path)) != self._seen[path]:
                raise RefitError(
                    "the source changed while it was pushed", where=path,
                    fix="push it when nothing writes to it; to replace a checkpoint, rename a new folder",
                )  # fmt: skip

    def _now(self) -> dict[Path, Any]:
        return {path: _lasting(found) for path, found in stamps(self._source.tensors).items()}

    def _laid_out_alike(self) -> bool:
        if getattr(self._source, "format", "hf") != "hf":
            return False
        try:
            (root,) = {path.parent for path in self._seen}
            now = open_hf(root).tensors
            return all(now.get(name) == tensor for name, tensor in self._source.tensors.items())
        except (CheckpointError, ValueError):
            return False


def _lasting(found: Stamp | None) -> tuple[int, ...] | None:
    """Without the time at which a file got another name: that is no change of its bytes."""
    return None if found is None else (*found[:2], *found[3:])
