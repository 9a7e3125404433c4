"""An eager boundary between a training loop and a model that is distributed already.

    for batch in window:                  # `accumulate` of them
        engine.backward(loss_of(engine(**batch), batch))
    report = engine.step()
    engine.zero_grad()

It owns the order of these calls and nothing else: how the model is cut, the loss, the schedule of the
learning rate and the push of weights belong to the loop. An order that would train on the wrong gradient is
refused, not mended.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from convtools.errors import UsageError, capped, tick
from convtools.training.errors import TrainingError
from convtools.training.grad_norm import global_grad_norm

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step of the optimizer."""

    grad_norm: float
    """L2 norm of the whole gradient before clipping, over all ranks."""
    scale: float
    """What the gradient was multiplied by: below 1 where it was clipped, 0 where the step was skipped."""
    skipped: bool
    """Whether the weights were left as they were, because the norm was NaN or infinite."""


class Engine:
    """Runs a model, its backward passes and its optimizer, in the only order that is right.

    `accumulate`: backward passes a step; each loss counts for 1/accumulate, so that the gradient is that of
    their mean. Ranks are averaged by the model's own means (FSDP2: each rank's loss counts alike, whatever
    its number of tokens). `max_grad_norm`: a longer gradient is shortened to it. `nonfinite`: what to do at
    a gradient with NaN or infinity: `refuse` raises, `skip` drops the gradient and counts it in `skipped`.
    """

    def __init__(
        self,
        model: "torch.nn.Module",
        optimizer: "torch.optim.Optimizer",
        *,
        accumulate: int = 1,
        max_grad_norm: float | None = None,
        nonfinite: Literal["refuse", "skip"] = "refuse",
    ) -> None:
        """Raises UsageError for settings that mean nothing, and for parameters that nobody would train.

        Those are trainable parameters without an optimizer, and, where others are DTensors, plain tensors:
        nothing averages their gradients over ranks.
        """
        if type(accumulate) is not int or accumulate < 1:
            raise UsageError("`accumulate` counts the backward passes of a step", found=repr(accumulate))
        if max_grad_norm is not None and not 0 < max_grad_norm < math.inf:
            raise UsageError("`max_grad_norm` is a length", expected="more than 0", found=max_grad_norm)
        if nonfinite not in ("refuse", "skip"):
            raise UsageError("what to do at NaN?", expected="refuse, skip", found=repr(nonfinite))
        self.model, self.optimizer = model, optimizer
        self.accumulate, self.max_grad_norm, self.nonfinite = accumulate, max_grad_norm, nonfinite
        self.steps = 0
        """Steps that changed the weights."""
        self.skipped = 0
        """Steps that did not, because the gradient was not finite."""
        self._backwards = 0
        self._stepped = False
        self._half = False
        """Whether a backward pass did not come to its end."""
        _check_parameters(model, optimizer)

    def __call__(self, **batch: Any) -> Any:
        """Run the model on a batch; what it returns, unchanged."""
        return self.model(**batch)

    def backward(self, loss: "torch.Tensor") -> None:
        """Add the gradient of a scalar loss to that of the window, times 1/accumulate.

        A loss of NaN or infinity makes the gradient NaN, on every rank: `step` deals with it, on all of them
        alike, while an error here would leave the other ranks waiting. Raises UsageError for what is no
        scalar with a gradient, for one pass too many, and after a step whose gradient was not cleared.
        """
        if self._stepped:
            raise UsageError("the gradient of the last step is still there", fix="call zero_grad()")
        self._refuse_half()
        if self._backwards == self.accumulate:
            raise UsageError(f"{self.accumulate} backward passes make a step", fix="call step()")
        if (
            not hasattr(loss, "requires_grad") or loss.numel() != 1
            or not loss.requires_grad or loss.is_complex()
        ):  # fmt: skip
            shape = list(getattr(loss, "shape", ()))
            raise UsageError(
                "a loss is one number that depends on the weights",
                found=f"{type(loss).__name__} {shape}, requires_grad={getattr(loss, 'requires_grad', False)}",
            )
        weight = 1 / self.accumulate if math.isfinite(float(loss.detach())) else math.nan
        self._half = True
        loss.backward(loss.detach().new_full(loss.shape, weight))  # type: ignore[no-untyped-call]
        self._half = False
        self._backwards += 1

    def _refuse_half(self) -> None:
        if self._half:
            raise UsageError(
                "a backward pass failed, and left a part of its gradient",
                fix="call zero_grad(), and begin anew",
            )

    def get_global_grad_norm(self) -> float:
        """The L2 norm of the whole gradient as it is now, over all ranks; each of them must ask.

        Raises UsageError where there is none.
        """
        return global_grad_norm(self.model.named_parameters())

    def step(self) -> StepReport:
        """Clip, and let the optimizer change the weights. The gradient stays until `zero_grad()`.

        Raises UsageError unless the window is whole and was not stepped yet; TrainingError for a gradient
        that is not finite (`refuse`): the weights are as they were, and zero_grad() begins the next window.
        """
        if self._stepped:
            raise UsageError("this gradient was stepped already", fix="call zero_grad() and backward()")
        self._refuse_half()
        if self._backwards != self.accumulate:
            raise UsageError(
                "a step without its backward passes", expected=self.accumulate, found=self._backwards
            )
        norm = self.get_global_grad_norm()
        self._stepped = True
        if not math.isfinite(norm):
            if self.nonfinite == "refuse":
                raise TrainingError(
                    "the gradient is not finite; the weights are unchanged",
                    found=norm,
                    fix="look at the batch; or `nonfinite='skip'` leaves such steps out and counts them",
                )
            self.skipped += 1
            self.optimizer.zero_grad()
            return StepReport(norm, 0.0, True)
        scale = 1.0
        if self.max_grad_norm is not None and norm > self.max_grad_norm:
            scale = self.max_grad_norm / norm
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        self.optimizer.step()
        self.steps += 1
        return StepReport(norm, scale, False)

    def zero_grad(self) -> None:
        """Drop the gradient and begin a new window, also where the last one was not whole."""
        self.optimizer.zero_grad()
        self._backwards, self._stepped, self._half = 0, False, False


def _check_parameters(model: "torch.nn.Module", optimizer: "torch.optim.Optimizer") -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise UsageError("the model has no parameter to train")
    if forgotten := [tick(n) for n, p in trained.items() if id(p) not in held]:
        raise UsageError("parameters that the optimizer does not hold", found=capped(forgotten),
                         fix="make the optimizer after the model was distributed")  # fmt: skip
    plain = [tick(n) for n, p in trained.items() if not hasattr(p, "placements")]
    if 0 < len(plain) < len(trained):
        raise UsageError("parameters that are not distributed as the others are", found=capped(plain))
