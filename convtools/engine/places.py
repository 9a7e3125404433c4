"""Which tensors of a checkpoint the reference engine has no place for: layers that predict further tokens."""

import re

from convtools.refit.hf_places import Place, place_of

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MTP = re.compile(r"(?:^|\.)mtp\.")


def is_mtp(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to layers that predict further tokens, which transformers does not have.

    >>> is_mtp("mtp.layers.0.norm.weight", 4), is_mtp("model.layers.4.norm.weight", 4)
    (True, True)
    """
    layer = _LAYER.search(name)
    return bool(_MTP.search(name)) or (layer is not None and int(layer[1]) >= num_layers)


__all__ = ["Place", "is_mtp", "place_of"]
