"""Names with their numbers left out: one kind of tensor over all layers and experts."""

import re

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def numberless(name: str) -> str:
    """The name with every number of its own replaced by a star.

    >>> numberless("backbone.layers.3.mixer.experts.11.up_proj.weight")
    'backbone.layers.*.mixer.experts.*.up_proj.weight'
    """
    return _NUMBER.sub(".*", name)
