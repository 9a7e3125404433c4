"""Our reference engine as a sink: its refit socket, and what it answers over HTTP for the self-test."""

import json
import os

from convtools.refit.errors import PeerError
from convtools.refit.sinks.http_json import Base, ask
from convtools.refit.sinks.local import LocalSink

_PROMPTS = ([0, 1, 2, 3], [3, 2, 1])
_TOKENS = 8


class ReferenceSink(LocalSink):
    """The engine whose socket is in `directory`, and which answers at `base`."""

    def __init__(self, directory: str | os.PathLike[str], base: Base, name: str | None = None) -> None:
        super().__init__(directory, name or str(base))
        self._base = base

    def outputs(self, timeout: float) -> bytes:
        """Greedy tokens and their logprobs, as they are now. Raises PeerError."""
        vocab = ask(self._base, "/info", timeout).body.get("vocab")
        if not isinstance(vocab, int) or vocab < 1:
            raise PeerError(f"{self.name} does not tell its vocabulary")
        prompts = [[token % vocab for token in prompt] for prompt in _PROMPTS]
        body = {"input_ids": prompts, "max_new_tokens": _TOKENS}
        reply = ask(self._base, "/generate", timeout, body=body)
        if reply.status != 200:
            raise PeerError(
                f"{self.name} does not answer", found=str(reply.body.get("error", reply.status))[:400]
            )
        return json.dumps([reply.body.get("ids"), reply.body.get("logprobs")]).encode()
