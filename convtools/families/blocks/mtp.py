"""Multi-token prediction of hybrid models: a small stack of layers of any pattern, any depth."""

from collections.abc import Callable, Iterator

from convtools.families.table import LAST, Block, Row, copied, norm, placed, rows


def hybrid_mtp(
    *, pattern: str, depth: int, hidden: int, layer: Callable[[str, str, str], Iterator[Row]]
) -> Iterator[Row]:
    """Depth o and inner layer j are `mtp.layers.{o}.mtp_model_layer.layers.{j}` and `mtp.layers.{o * P + j}`.

    `layer(kind, mcore prefix, hf prefix)` gives an inner layer. What stands once a depth
    (`eh_proj [hidden, 2 * hidden]`, `enorm`, `hnorm`) is stored with the first inner layer on the
    Hugging Face side, `final_layernorm` with the last.
    """
    for o in range(depth):
        mcore = f"mtp.layers.{o}."
        first, last = (f"mtp.layers.{o * len(pattern) + j}." for j in (0, len(pattern) - 1))
        yield from placed(_entry(hidden), mcore, first, LAST)
        for j, kind in enumerate(pattern):
            yield from layer(
                kind, f"{mcore}mtp_model_layer.layers.{j}.", f"mtp.layers.{o * len(pattern) + j}."
            )
        yield from placed(
            [norm("final_layernorm.weight", "final_layernorm.weight", hidden)], mcore, last, LAST
        )


def _entry(hidden: int) -> Block:
    eh_proj = rows(("hidden_size", hidden))
    return [
        norm("enorm.weight", "enorm.weight", hidden),
        norm("hnorm.weight", "hnorm.weight", hidden),
        copied("eh_proj.weight", "eh_proj.weight", (hidden, 2 * hidden), eh_proj, te=True),
    ]
