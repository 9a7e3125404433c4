"""Which family an architecture belongs to; families are imported when first asked for."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from convtools.errors import ConfigError
from convtools.families.config import Config
from convtools.families.table import Copy, Row, Table

_MODULE = {
    "DeepseekV3ForCausalLM": "deepseek",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",
    "NemotronHForCausalLM": "nemotron_h",
    "Qwen2ForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
    "Qwen3MoeForCausalLM": "qwen",
}
_MODEL_TYPE = {"nemotron_h": "NemotronHForCausalLM"}


class Family(Protocol):
    """What a family's module offers. `Spec` and `Spelling` are the family's own value types."""

    NAME: str
    ARCHITECTURES: tuple[str, ...]
    PROOF: dict[str, str]
    """What its tables were checked against, by architecture."""

    def parse(self, config: Config) -> Any:
        """config.json -> Spec; raises ConfigError."""

    def spelling(self, spec: Any, hf_names: Iterable[str]) -> Any:
        """How these Hugging Face names are spelled."""

    def mcore_spelling(self, spec: Any, mcore_names: Iterable[str]) -> Any:
        """The published spelling, for a model whose Megatron names these are."""

    def rows(self, spec: Any, spelling: Any, padded_vocab: int) -> Iterator[Row]:
        """The whole model, a row a Megatron parameter."""

    def copies(self, spec: Any, spelling: Any) -> tuple[Copy, ...]:
        """Hugging Face tensors that repeat another."""

    def megatron_args(self, config: Config, spec: Any, spelling: Any) -> dict[str, Any]:
        """The part of Megatron's `args` that the config, and what the checkpoint holds, decide."""

    def hf_config(self, args: Config, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], list[str]]:
        """(config.json derived from Megatron's args, what could not be derived)."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model as its config and its tensors' names describe it."""

    family: Family
    config: Config
    spec: Any
    spelling: Any

    def table(self, padded_vocab: int) -> Table:
        """Every parameter and tensor, with the vocabulary padded to so many rows on the Megatron side."""
        return Table.of(self.family.rows(self.spec, self.spelling, padded_vocab))

    def notes(self) -> tuple[str, ...]:
        """What was inferred from names, for the report."""
        if getattr(self.spelling, "mtp_layers", None) != 1:
            return ()
        return (f"one MTP layer's weights stand for all {self.spec.mtp_depth} depths, as the names show",)

    def copies(self) -> tuple[Copy, ...]:
        """Hugging Face tensors that repeat another, in this spelling."""
        return self.family.copies(self.spec, self.spelling)


def find_family(config: Config) -> Family:
    """The family of a config. Raises ConfigError, naming what is supported."""
    names = config.get("architectures") or [_MODEL_TYPE.get(str(config.get("model_type")), "")]
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name in _MODULE:
            return import_module(f"convtools.families.{_MODULE[name]}")
    raise ConfigError(
        "no family in convtools knows this architecture",
        where="config.json, `architectures`",
        expected=", ".join(sorted(_MODULE)),
        found=config.get("architectures") or f"model_type {config.get('model_type')!r}",
        fix="add a family, or convert a checkpoint of a supported one",
    )


def families() -> list[str]:
    """Names of the supported families."""
    return sorted(set(_MODULE.values()))


def load_family(name: str) -> Family:
    """A family by its name."""
    return import_module(f"convtools.families.{name}")
