"""What a Nemotron-H rank asks of a `torch_dist` checkpoint, written out by hand from Megatron's modules.

It shares nothing with convtools: keys, cuts and stage offsets are those that Megatron's own
`sharded_state_dict` gives, so that a mistake in convtools' tables cannot cancel itself out.
"""

import re
from typing import Any, NamedTuple

WHOLE = -1
_CUTS = (
    (r"embedding\.word_embeddings\.weight|output_layer\.weight", 0),
    (r"mixer\.(A_log|D|dt_bias|norm\.weight)$", 0),
    (r"mixer\.out_proj\.weight$", 1),
    (r"linear_qkv\.(weight|bias)$", 0),
    (r"linear_proj\.weight$", 1),
    (r"linear_fc1\.weight\d*$", 0),
    (r"linear_fc2\.weight\d*$", 1),
    (r"eh_proj\.weight$", 0),
)


class Ask(NamedTuple):
    """One key that a rank asks for, and which rows of its own tensor it fills."""

    key: str
    dim: int
    """Dimension that tensor parallelism cuts, or WHOLE."""
    rows: int | None = None
    """Length along dim 0 of this part; None: the whole tensor."""
    expert: int | None = None


def asks(name: str, config: dict[str, Any], tp: int, first_layer: int, first_expert: int) -> list[Ask]:
    """The keys behind one tensor of a rank's state dict, in the order in which they are stacked."""
    key = re.sub(
        r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{int(m[1]) + first_layer}.", name
    ).replace(".conv1d_", ".conv1d.")
    inner = config["mamba_num_heads"] * config["mamba_head_dim"] // tp
    states = config["n_groups"] * config["ssm_state_size"] // tp
    sizes = {"z": inner, "x": inner, "B": states, "C": states, "dt": config["mamba_num_heads"] // tp}
    if key.endswith("mixer.in_proj.weight"):
        return [Ask(f"{key}.{part}", 0, sizes[part]) for part in ("z", "x", "B", "C", "dt")]
    if ".conv1d." in key:
        return [Ask(f"{key}.{part}", 0, sizes[part]) for part in ("x", "B", "C")]
    dim = next((dim for pattern, dim in _CUTS if re.search(pattern, key)), WHOLE)
    expert = re.fullmatch(r"(.*\.mlp\.experts)\.(linear_fc[12]\.weight)(\d+)", key)
    if expert:
        return [Ask(f"{expert[1]}.experts.{expert[2]}", dim, expert=first_expert + int(expert[3]))]
    return [Ask(key, dim)]
