import pytest
import torch
from hypothesis import given, strategies as st

from convtools.errors import UsageError
from convtools.training.mtp_labels import IGNORE, mtp_inputs, mtp_labels

TOKENS = st.lists(st.integers(0, 999), min_size=1, max_size=12)
DEPTH = st.integers(0, 4)


def test_depth_k_predicts_token_i_k_2() -> None:
    tokens = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
    assert mtp_labels(tokens, 0).tolist() == [[12, 13, 14, -100, -100], [22, 23, 24, -100, -100]]
    assert mtp_labels(tokens, 1).tolist() == [[13, 14, -100, -100, -100], [23, 24, -100, -100, -100]]
    assert mtp_labels(tokens, 2).tolist() == [[14, -100, -100, -100, -100], [24, -100, -100, -100, -100]]
    assert mtp_labels(tokens, 3).tolist() == [[-100] * 5] * 2
    assert mtp_labels(tokens, 99).tolist() == [[-100] * 5] * 2


@given(TOKENS, DEPTH)
def test_labels_and_inputs_against_a_loop(tokens: list[int], depth: int) -> None:
    n = len(tokens)
    labels = [tokens[i + depth + 2] if i + depth + 2 < n else IGNORE for i in range(n)]
    inputs = [tokens[i + depth + 1] if i + depth + 1 < n else 0 for i in range(n)]
    raw = torch.tensor(tokens)
    assert mtp_labels(raw, depth).tolist() == labels and mtp_labels(raw, depth).dtype == torch.int64
    assert mtp_inputs(raw, depth).tolist() == inputs
    assert raw.tolist() == tokens  # untouched


@given(TOKENS, DEPTH, DEPTH)
def test_labels_cannot_be_shifted_again(tokens: list[int], first: int, second: int) -> None:
    labels = mtp_labels(torch.tensor(tokens), first)
    with pytest.raises(UsageError, match="no raw tokens"):
        mtp_labels(labels, second)
    with pytest.raises(UsageError, match="no raw tokens"):
        mtp_inputs(labels, second)


@given(TOKENS, DEPTH)
def test_what_a_depth_is_given_is_never_its_label(tokens: list[int], depth: int) -> None:
    """With every token another: the label comes one position after the last token that is seen."""
    raw = torch.arange(len(tokens)) + 1
    labels = mtp_labels(raw, depth)
    kept = labels != IGNORE
    assert torch.equal(labels[kept], mtp_inputs(raw, depth)[kept] + 1)
    assert torch.equal(labels[kept], raw[kept] + depth + 2)


def test_only_tokens_that_are_counted_are_labels() -> None:
    tokens = torch.tensor([10, 11, 12, 13, 14])
    counted = torch.tensor([0, 0, 0, 1, 1], dtype=torch.bool)  # the answer, after a prompt of three
    assert mtp_labels(tokens, 0, counted=counted).tolist() == [-100, 13, 14, -100, -100]
    assert mtp_labels(tokens, 1, counted=counted).tolist() == [13, 14, -100, -100, -100]


def test_packed_sequences_do_not_predict_one_another() -> None:
    tokens = torch.tensor([10, 11, 12, 13, 20, 21, 22])
    segments = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    assert mtp_labels(tokens, 0, segments=segments).tolist() == [12, 13, -100, -100, 22, -100, -100]
    assert mtp_labels(tokens, 1, segments=segments).tolist() == [13, -100, -100, -100, -100, -100, -100]


@pytest.mark.parametrize(
    ("tokens", "depth"),
    [
        (torch.tensor([1.0, 2.0]), 0), (torch.tensor([True, False]), 0), (torch.tensor(3), 0),
        (torch.tensor([1, -1]), 0), (torch.tensor([1, 2]), -1), (torch.tensor([1, 2]), True),
    ],
)  # fmt: skip
def test_what_is_no_tokens_is_refused(tokens: torch.Tensor, depth: int) -> None:
    with pytest.raises(UsageError):
        mtp_labels(tokens, depth)


def test_masks_must_be_of_the_tokens_shape() -> None:
    for name in ("counted", "segments"):
        with pytest.raises(UsageError, match=name):
            mtp_labels(torch.tensor([1, 2, 3]), 0, **{name: torch.ones(2)})
