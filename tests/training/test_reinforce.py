import pytest
import torch
from hypothesis import given, strategies as st

from convtools.errors import UsageError
from convtools.training.reinforce import reinforce_loss, token_logprobs


def test_logprobs_against_a_loop() -> None:
    torch.manual_seed(0)
    logits, tokens = torch.randn(3, 7, 5), torch.randint(5, (3, 7))
    found = token_logprobs(logits, tokens, 4)
    for b in range(3):
        for i in range(4, 7):
            scores = logits[b, i - 1].exp()
            assert float(found[b, i - 4].exp()) == pytest.approx(
                float(scores[tokens[b, i]] / scores.sum()), rel=1e-5
            )


@given(st.integers(0, 99), st.sampled_from([1.0, -1.0]))
def test_a_step_down_the_loss_makes_what_was_rewarded_likelier(seed: int, sign: float) -> None:
    draws = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 4, 6, generator=draws, requires_grad=True)
    tokens = torch.randint(6, (1, 4), generator=draws)
    before = token_logprobs(logits, tokens, 1)
    reinforce_loss(before, torch.tensor([sign])).backward()
    after = token_logprobs((logits - 0.1 * logits.grad).detach(), tokens, 1)  # type: ignore[operator]
    assert (sign * (after - before.detach()) > 0).all()


def test_the_gradient_is_that_of_the_expected_reward() -> None:
    """One token of three, rewards known: the mean over all answers is the exact gradient."""
    logits, rewards = torch.tensor([0.3, -0.2, 0.5], requires_grad=True), torch.tensor([1.0, 0.0, 3.0])
    chances = logits.softmax(-1)
    (exact,) = torch.autograd.grad((chances * rewards).sum(), logits)
    estimate = torch.zeros(3)
    for token in range(3):
        scores = logits.expand(1, 2, 3)
        logprobs = token_logprobs(scores, torch.tensor([[0, token]]), 1)
        loss = reinforce_loss(logprobs, rewards[token : token + 1] - 0.7)  # any baseline
        (gradient,) = torch.autograd.grad(loss, logits)
        estimate -= chances[token].detach() * gradient
    torch.testing.assert_close(estimate, exact)


def test_shapes_that_would_be_broadcast_are_refused() -> None:
    with pytest.raises(UsageError, match="one advantage"):
        reinforce_loss(torch.zeros(4, 4), torch.zeros(4, 4))
    with pytest.raises(UsageError, match="one advantage"):
        reinforce_loss(torch.zeros(4, 3), torch.zeros(1))
    for first in (0, 4, 9):
        with pytest.raises(UsageError, match="no logits"):
            token_logprobs(torch.zeros(2, 4, 3), torch.zeros(2, 4, dtype=torch.int64), first)
