"""What prompts have left behind: their KV and recurrent states, so that a prompt said twice is read once.

They belong to the weights that made them: a push empties this, or answers would mix two versions.
"""

import copy
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Rows = tuple[tuple[int, ...], ...]


class PrefixCache:
    """The last few prompts -> (logits after them, states). Safe to use from several threads."""

    def __init__(self, tokens: int = 1 << 14) -> None:
        """Holds prompts of at most `tokens` tokens in all."""
        self._most, self._held = tokens, 0
        self._kept: OrderedDict[Rows, tuple[torch.Tensor, Any]] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = 0
        """Prompts that were not read again."""

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, rows: Rows) -> "tuple[torch.Tensor, Any] | None":
        """Logits and a copy of the states, which the caller goes on to change."""
        with self._lock:
            if (found := self._kept.get(rows)) is None:
                return None
            self._kept.move_to_end(rows)
            self.hits += 1
            return found[0], copy.deepcopy(found[1])

    def put(self, rows: Rows, logits: "torch.Tensor", states: Any) -> None:
        """Keep a copy of the states; the prompts that were not used for longest make room."""
        size = _tokens(rows)
        if size > self._most:
            return
        with self._lock:
            if self._kept.pop(rows, None) is not None:
                self._held -= size
            while self._held + size > self._most:
                self._held -= _tokens(self._kept.popitem(last=False)[0])
            self._kept[rows] = (logits, copy.deepcopy(states))
            self._held += size

    def flush(self) -> None:
        """Forget all."""
        with self._lock:
            self._kept.clear()
            self._held = 0


def _tokens(rows: Rows) -> int:
    return sum(map(len, rows))
