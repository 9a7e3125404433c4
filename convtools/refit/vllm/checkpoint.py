"""Which tensors an engine takes: those of the checkpoint that it was started from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convtools.errors import ConvtoolsError, UsageError, capped, tick
from convtools.refit.plan import Tensor
from convtools.refit.taking import check_taken
from convtools.stores.hf import open_hf

_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight", "wte.weight", "word_embeddings.weight")
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a push must bring."""

    tensors: Mapping[str, Tensor]
    """By their Hugging Face names."""
    aliases: Mapping[str, str]
    """A tied head -> the embedding; it may be left out, or in its place."""

    def own(self, name: str) -> str:
        """The name under which the engine loads it."""
        return self.aliases.get(name, name)

    def check(self, given: Mapping[str, Tensor]) -> None:
        """Raises RefitError, naming the tensors, unless these are all of them and no others."""
        check_taken(given, self.tensors, self.aliases)


def wanted_of(path: str, *, tied: bool) -> Wanted:
    """The tensors of the checkpoint in folder `path`; `tied`: its head is its embedding.

    Raises UsageError for a name that is no folder here, ConvtoolsError for what is no checkpoint.
    """
    if not Path(path).is_dir():
        raise UsageError(
            "vLLM was started from a name, not from a folder of this machine",
            found=tick(path),
            fix="download the checkpoint, and start vLLM with the folder's path",
        )
    found = open_hf(Path(path)).tensors
    tensors = {name: Tensor(name, t.dtype, tuple(t.shape)) for name, t in found.items()}
    embeddings = [name for name in tensors if name.endswith(_EMBEDDINGS)]
    aliases: dict[str, str] = {}
    if tied:
        if len(embeddings) != 1:
            raise ConvtoolsError("the head is tied, and it is not clear to what", found=capped(embeddings))
        aliases[_HEAD] = embeddings[0]
    return Wanted(tensors, aliases)


def path_of(config: Any) -> str:
    """The path that a `VllmConfig` serves."""
    return str(config.model_config.model)
