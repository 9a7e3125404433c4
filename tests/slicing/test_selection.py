"""Which layers a slice keeps: listed by the user, or the cheapest that cover every kind."""

from itertools import combinations

import pytest
from hypothesis import given, settings, strategies as st

from convtools.errors import UsageError
from convtools.slicing.selection import Kind, blocks, cover, parse_layers

ULTRA = (
    "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*"
    "EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
)
SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
NANO_4B = "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"
LETTERS = {
    "M": Kind("mamba", ""), "*": Kind("attention", ""), "E": Kind("", "MoE"), "-": Kind("", "dense"),
}  # fmt: skip
BYTES = {"M": 7, "*": 3, "E": 90, "-": 20}


def kept(how: str, pattern: str, nbytes: list[int] | None = None) -> tuple[int, ...]:
    costs = nbytes or [BYTES[c] for c in pattern]
    return tuple(i for run in cover(how, [LETTERS[c] for c in pattern], costs) for i in run.layers)


def test_the_known_answers() -> None:
    assert kept("blocks", ULTRA) == (0, 1, 7, 8)
    assert kept("blocks", SUPER) == (0, 1, 7, 8)
    assert kept("blocks", NANO_4B) == (0, 1, 12, 13)
    assert kept("types", ULTRA) == (0, 1, 7)
    assert kept("types", NANO_4B) == (0, 1, 12)


def test_a_half_that_only_stands_alone_is_kept() -> None:
    assert kept("blocks", "M*E*E") == (0, 1, 2)  # no M has a feed-forward: it needs a block of its own
    assert kept("blocks", "MEM") == (0, 1)
    assert kept("blocks", "EME-") == (1, 2, 3)  # nor has - a mixer
    assert kept("blocks", "MM") == (0,)


def test_fewest_bytes_then_the_earliest() -> None:
    pattern = "MEMEME"
    assert kept("blocks", pattern, [5, 5, 4, 5, 4, 5]) == (2, 3)
    assert kept("types", pattern, [5, 5, 4, 6, 4, 5]) == (1, 2)


def test_layers_that_hold_both_halves_are_blocks() -> None:
    kinds = [Kind("full", "dense"), Kind("sliding", "MoE"), Kind("full", "MoE"), Kind("sliding", "MoE")]
    chosen = cover("blocks", kinds, [1, 3, 3, 2])
    assert [run.layers for run in chosen] == [(0,), (2,), (3,)]
    assert [run.why for run in chosen] == ["full + dense", "full + MoE", "sliding + MoE"]


@settings(max_examples=150, deadline=None)
@given(st.text("M*E-", min_size=1, max_size=9), st.data())
def test_every_cover_is_a_cover_and_none_is_cheaper(pattern: str, data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(1, 9), min_size=len(pattern), max_size=len(pattern)))
    kinds = [LETTERS[c] for c in pattern]

    def types(layers: tuple[int, ...]) -> set[str]:
        return {pattern[i] for i in layers}

    def pairs(layers: tuple[int, ...]) -> set[str]:
        return {pattern[i : i + 2] for i in layers if i + 1 in layers}

    def whole_blocks(layers: tuple[int, ...]) -> set[str]:
        return {str(kind) for at, kind in blocks(kinds) if set(at) <= set(layers)}

    every = tuple(range(len(pattern)))
    whole = [kind for _, kind in blocks(kinds) if kind.mixer and kind.feed_forward]
    needed = {
        str(k) for _, k in blocks(kinds)
        if k in whole
        or not ({k.mixer} & {w.mixer for w in whole} or {k.feed_forward} & {w.feed_forward for w in whole})
        or (k.mixer and k.mixer not in {w.mixer for w in whole})
        or (k.feed_forward and k.feed_forward not in {w.feed_forward for w in whole})
    }  # fmt: skip
    for how, seen, wanted in (
        ("types", types, types(every)),
        ("pairs", lambda x: pairs(x) | types(x), (pairs(every) | types(every))),
        ("blocks", whole_blocks, needed),
    ):
        layers = kept(how, pattern, costs)
        assert wanted <= seen(layers), how
        best = min(
            (sum(costs[i] for i in some), some)
            for n in range(1, len(pattern) + 1)
            for some in combinations(every, n)
            if wanted <= seen(some)
        )
        assert (sum(costs[i] for i in layers), layers) == best, how


def test_pairs_of_a_model_with_too_many_kinds_are_refused() -> None:
    with pytest.raises(UsageError, match="kinds of neighbours"):
        cover("pairs", [Kind(f"mixer {i}", "") for i in range(40)], [1] * 40)


def test_ranges_include_both_ends_b65() -> None:
    assert parse_layers("0-3,7", 8) == (0, 1, 2, 3, 7)
    assert parse_layers("0-0", 1) == (0,)
    assert parse_layers(" 3 - 4 , 1", 8) == (3, 4, 1)
    assert parse_layers("0-2,2-4", 5) == (0, 1, 2, 2, 3, 4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "neither a layer nor a range"),
        ("0:3", "inclusive ranges"),
        ("4-2", "backwards"),
        ("0-99", "no layer 99"),
        ("8", "0 to 7"),
        ("-1", "neither a layer"),
        ("1,,2", "neither a layer"),
        ("٣", "neither a layer"),
        ("9999999999", "neither a layer"),
    ],
)
def test_what_is_no_layer_is_refused_with_the_rule_b65(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_layers(text, 8)
