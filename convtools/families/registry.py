"""Which family an architecture belongs to; families are imported when first asked for."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from convtools.errors import AccountingError, ConfigError, tick
from convtools.families.computed import checked, computed_otherwise
from convtools.families.config import Config
from convtools.families.table import Copy, Row, Table
from convtools.families.wrapping import HEAD, Wrapping, find_section, own_config

_MODULE = {
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "Glm4MoeForCausalLM": "glm",
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "Mamba2ForCausalLM": "mamba2",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",
    "NemotronHForCausalLM": "nemotron_h",
    "Qwen2ForCausalLM": "qwen",
    "Qwen2MoeForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
    "Qwen3MoeForCausalLM": "qwen",
    "Qwen3NextForCausalLM": "qwen_next",
    "Qwen3_5ForCausalLM": "qwen_next",
    "Qwen3_5MoeForCausalLM": "qwen_next",
}
_MODEL_TYPE = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "ministral3": "MistralForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
"""`model_type` -> the architecture with the same tensors; that of a text model, the one it is alone."""


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
    wrapping: Wrapping = field(default_factory=Wrapping)
    """How the Hugging Face side's names are prefixed."""

    def table(self, padded_vocab: int) -> Table:
        """Every parameter and tensor, with the vocabulary padded to so many rows on the Megatron side.

        Raises AccountingError where that is less than the vocabulary.
        """
        if padded_vocab < self.spec.vocab:
            raise AccountingError(
                "the embedding has fewer rows than the vocabulary", expected=self.spec.vocab,
                found=padded_vocab, fix="see that layout, config and tensors are of one model",
            )  # fmt: skip
        rows = self.family.rows(self.spec, self.spelling, padded_vocab)
        return Table.of(map(self._wrapped, rows) if self.wrapping.prefix else rows)

    def megatron_args(self) -> dict[str, Any]:
        """What Megatron's `args` say of the model. Raises ConfigError for what Megatron cannot compute."""
        return checked(self.family.megatron_args(self.config, self.spec, self.spelling))

    def _wrapped(self, row: Row) -> Row:
        return Row(row.param, tuple((a, b.renamed(self.wrapping.outer(b.name))) for a, b in row.equal))

    def notes(self) -> tuple[str, ...]:
        """What was inferred from names, or only Megatron computes, for the report."""
        return (*computed_otherwise(self.config), *self._inferred())

    def _inferred(self) -> tuple[str, ...]:
        if getattr(self.spec, "mtp_depth", 0) and not getattr(self.spelling, "mtp", True):
            return (
                f"the config says {self.spec.mtp_depth} MTP layers, but there is no tensor of them: "
                "converted without",
            )
        if getattr(self.spelling, "mtp_layers", None) != 1:
            return ()
        return (f"one MTP layer's weights stand for all {self.spec.mtp_depth} depths, as the names show",)

    def copies(self) -> tuple[Copy, ...]:
        """Hugging Face tensors that repeat another, in this spelling. Raises AccountingError."""
        outer = self.wrapping.outer
        copies = self.family.copies(self.spec, self.spelling)
        if not self.spec.tied and any(copy.name == HEAD for copy in copies):
            raise AccountingError(  # it would be written from the embedding
                f"`{HEAD}` would repeat the embedding, in a model whose head is not tied",
                where="the note of the Hugging Face spelling (hf/.convtools.json), `head`",
                fix="remove the note to use the published spelling",
            )
        return tuple(Copy(outer(copy.name), outer(copy.of), copy.reason) for copy in copies)


class LanguageModel(NamedTuple):
    """The language model that a config.json describes, alone or within a larger model."""

    family: Family
    config: dict[str, Any]
    """Its own config, with the one architecture that the family is to read."""
    section: str | None
    """Section of config.json that this is from; None: config.json is its own."""

    def wrapped(self, wrapping: Wrapping) -> "LanguageModel":
        """The same, as the file's names show it."""
        return self._replace(config=self.config | {"tie_word_embeddings": False}) if wrapping.untied else self

    def parse(self) -> Any:
        """The family's Spec. Raises ConfigError, which says where the fields are looked for."""
        try:
            return self.family.parse(self.config)
        except ConfigError as error:
            if self.section is None:
                raise
            raise ConfigError(
                error.what,
                where=f"config.json, {tick(self.section)}",
                fix=f"all fields of the language model belong in {tick(self.section)}; "
                "transformers' save_pretrained writes them there",
            ) from None


def language_model(config: Config) -> LanguageModel:
    """The family and the language model's own config. Raises ConfigError, naming what is supported."""
    name = _architecture(config)
    if name is not None:
        return LanguageModel(_family(name), dict(config) | {"architectures": [name]}, None)
    section = find_section(config)
    where = "config.json, `architectures`"
    found = tick(config.get("architectures") or config.get("model_type"))
    if section is not None:
        text = config[section]
        name = _architecture(text) or _MODEL_TYPE.get(str(text.get("model_type")))
        if name in _MODULE:
            return LanguageModel(_family(name), own_config(config, section, name), section)
        where += f", and in {tick(section)} `architectures` or `model_type`"
        found += f", and {tick(text.get('model_type'))}"
    raise ConfigError(
        "no family in convtools knows this architecture",
        where=where,
        expected=", ".join(sorted(_MODULE)),
        found=found,
        fix="add a family, or convert a checkpoint of a supported one",
    )


def _architecture(config: Config) -> str | None:
    """The first architecture that is known; by `model_type` where none is named at all."""
    names = config.get("architectures") or [_MODEL_TYPE.get(str(config.get("model_type")))]
    if "ssm_cfg" in config and names == [None]:  # mamba_ssm's own config: that family says what to do
        return "Mamba2ForCausalLM"
    known = (n for n in names if isinstance(n, str) and n in _MODULE) if isinstance(names, list) else ()
    return next(iter(known), None)


def _family(architecture: str) -> Family:
    return load_family(_MODULE[architecture])


def find_family(config: Config) -> Family:
    """The family of a config's language model. Raises ConfigError, naming what is supported."""
    return language_model(config).family


def families() -> list[str]:
    """Names of the supported families."""
    return sorted(set(_MODULE.values()))


def load_family(name: str) -> Family:
    """A family by its name."""
    return import_module(f"convtools.families.{name}")
