"""The Mamba-2 mixer."""

from convtools.families.table import EITHER, Block, columns, copied, rows
from convtools.layout.parallel import Cut, Part


def mamba(
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state: int,
    conv_kernel: int,
    hidden: int,
    conv_bias: bool = True,
) -> Block:
    """`in_proj` stacks z, x, B, C, dt; `conv1d` stacks x, B, C. Both sides stack them alike.

    Tensor parallelism cuts each component on its own, so a rank's `in_proj` is
    `[z_r | x_r | B_r | C_r | dt_r]`, and `torch_dist` gives each component a key of its own.
    """
    by_head, by_group = ("mamba_num_heads", heads), ("n_groups", groups)
    inner = (by_head, ("mamba_head_dim", head_dim))
    states = (by_group, ("ssm_state_size", state))
    z, x, dt = Part("z", inner), Part("x", inner), Part("dt", (by_head,))
    B, C = Part("B", states), Part("C", states)
    in_proj, conv, heads_cut = Cut(0, (z, x, B, C, dt)), Cut(0, (x, B, C)), rows(by_head)
    conv_dim = x.size + B.size + C.size
    rows_in = z.size + conv_dim + dt.size
    block = [
        copied("mixer.in_proj.weight", "in_proj.weight", (rows_in, hidden), in_proj, split=True, te=True),
        copied("mixer.conv1d.weight", "conv1d.weight", (conv_dim, 1, conv_kernel), conv, split=True),
        copied("mixer.A_log", "A_log", (heads,), heads_cut, precision=EITHER),
        copied("mixer.D", "D", (heads,), heads_cut, precision=EITHER),
        copied("mixer.dt_bias", "dt_bias", (heads,), heads_cut, precision=EITHER),
        copied("mixer.norm.weight", "norm.weight", (z.size,), rows(*inner, divides=(by_group,))),
        copied("mixer.out_proj.weight", "out_proj.weight", (hidden, x.size), columns(*inner), te=True),
    ]  # fmt: skip
    if conv_bias:
        block += [copied("mixer.conv1d.bias", "conv1d.bias", (conv_dim,), conv, split=True)]
    return block
