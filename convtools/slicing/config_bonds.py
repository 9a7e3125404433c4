"""What ties the layers of a model together, so that not every choice of them is a model."""

from collections.abc import Sequence
from typing import Any

from convtools.errors import ConfigError

_WHOLE = {
    "num_mem_blocks": "blocks of this model are shared by several layers, and stored with the first of them",
    "num_hidden_groups": "the layers of this model share their weights",
    "use_cla": "layers of this model use the keys and values of the layer before",
    "kv_source_layers": "layers of this model use the keys and values of others",
    "hidden_size_per_layer_input": "a tensor of this model holds an embedding for every layer, side by side",
}
"""Fields of models that no choice of layers is cut from; where they are set."""
_AT_RUN_TIME = {
    "scale_depth": "is divided by the square root of the number of layers",
    "scale_attn_by_inverse_layer_idx": "scales attention by a layer's number",
    "alternating_layer_idx": "depends on a layer's number",
}
"""Fields by which a model's code makes something of a layer's number, and what."""


def check_whole(text: dict[str, Any], keep: Sequence[int], count: int) -> None:
    """Raise ConfigError for a model whose layers cannot be taken apart."""
    if list(keep) == list(range(count)):
        return
    for key, why in _WHOLE.items():
        if text.get(key) and text.get(key) != list(range(count)):
            raise ConfigError(
                f"layers cannot be cut out of this model: {why}",
                where=f"config.json, `{key}`",
                found=text[key],
            )


def remarks(text: dict[str, Any]) -> list[str]:
    """What will be different in a slice although config and weights are the same."""
    return [f"`{key}` {text[key]} {what}: layers of the slice run a little differently"
            for key, what in _AT_RUN_TIME.items() if text.get(key)]  # fmt: skip


def kv_sharing(text: dict[str, Any], count: int, keep: Sequence[int]) -> int | None:
    """The new `num_kv_shared_layers`: the last layers take keys and values from an earlier one (Gemma 3n).

    None where there is no such field. Raises ConfigError where the layer they come from would change.
    """
    _last_is_full(text, keep)
    shared = text.get("num_kv_shared_layers")
    if type(shared) is not int or not 0 < shared <= count:
        return None
    first = count - shared
    types = text.get("layer_types")
    if not isinstance(types, list) or len(types) < count:
        types = [""] * count

    def donor(own: Sequence[int], layer: int) -> int | None:
        return next((i for i in reversed(own) if types[i] == types[layer]), None)

    own = [i for i in keep if i < first]
    taking = [i for i in keep if i >= first]
    if list(keep) != own + taking:
        raise ConfigError(
            f"`num_kv_shared_layers` {shared}: the layers that share keys and values must be the last ones",
            where="config.json",
            fix="keep the source's order",
        )
    for layer in taking:
        wanted = donor(range(first), layer)
        if donor(own, layer) != wanted:
            raise ConfigError(
                f"layer {layer} uses the keys and values of layer {wanted}, which the slice has not",
                where="config.json, `num_kv_shared_layers`",
                fix=f"keep layer {wanted} too, as the last of its type before the sharing ones, "
                f"or leave out layer {layer}",
            )
    return len(taking)


def _last_is_full(text: dict[str, Any], keep: Sequence[int]) -> None:
    types = text.get("layer_types")
    if not str(text.get("model_type")).startswith("gemma4") or not isinstance(types, list):
        return
    if keep[-1] < len(types) and types[keep[-1]] != "full_attention":
        raise ConfigError(
            f"layer {keep[-1]} would be the last, and is `{types[keep[-1]]}`",
            where="config.json, `layer_types`",
            expected="`full_attention`: this model's code makes that of its last layer",
            fix="keep a layer of full attention as the last",
        )
