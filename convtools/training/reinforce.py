"""The arithmetic of REINFORCE: log-probabilities of tokens, and a loss whose gradient follows the reward."""

from typing import TYPE_CHECKING

from convtools.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


def token_logprobs(logits: "Tensor", tokens: "Tensor", first: int) -> "Tensor":
    """Logits [B, T, V], raw tokens [B, T] -> log-probability in nats of tokens `first`..., [B, T - first].

    Token i is scored by the logits of position i-1. Raises UsageError for a first token that none scores.

    >>> import torch
    >>> logits = torch.tensor([[[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]]])
    >>> token_logprobs(logits, torch.tensor([[0, 1, 0]]), 1).exp().round().tolist()
    [[0.0, 1.0]]
    """
    if logits.shape[:-1] != tokens.shape or not 0 < first < tokens.shape[-1]:
        raise UsageError(
            "no logits for these tokens",
            expected="logits [B, T, V], tokens [B, T], 0 < first < T",
            found=f"{list(logits.shape)}, {list(tokens.shape)}, {first}",
        )
    scores = logits[:, first - 1 : -1].log_softmax(-1)
    return scores.gather(-1, tokens[:, first:, None]).squeeze(-1)


def reinforce_loss(logprobs: "Tensor", advantages: "Tensor") -> "Tensor":
    """Log-probabilities of what was sampled [B, N], reward less baseline [B] -> a loss to be minimised.

    Its gradient is that of -mean(advantage * logprob): minimising makes answers above the baseline likelier.
    The advantages are constants. Raises UsageError for shapes that would be broadcast to something else.

    >>> import torch
    >>> reinforce_loss(torch.tensor([[-1.0, -3.0], [-1.0, -1.0]]), torch.tensor([1.0, -1.0])).item()
    0.5
    """
    if logprobs.ndim != 2 or advantages.shape != logprobs.shape[:1]:
        raise UsageError(
            "one advantage for each answer", expected="[B, N] and [B]",
            found=f"{list(logprobs.shape)} and {list(advantages.shape)}",
        )  # fmt: skip
    return -(advantages.detach()[:, None] * logprobs).mean()
