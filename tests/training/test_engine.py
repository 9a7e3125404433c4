import math
from typing import Any

import pytest
import torch
from torch import nn

from convtools.errors import UsageError
from convtools.training.engine import Engine, StepReport
from convtools.training.errors import TrainingError

LR = 0.5


def made(**options: Any) -> Engine:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return Engine(model, torch.optim.SGD(model.parameters(), lr=LR), **options)


def batch(seed: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


def loss(engine: Engine, seed: int) -> torch.Tensor:
    return engine(input=batch(seed)).square().mean()  # type: ignore[no-any-return]


def weights(engine: Engine) -> list[torch.Tensor]:
    return [p.detach().clone() for p in engine.model.parameters()]


def test_a_window_is_the_mean_of_its_losses() -> None:
    engine, whole = made(accumulate=3), made()
    for seed in range(3):
        engine.backward(loss(engine, seed))
    whole.backward(sum(loss(whole, seed) for seed in range(3)) / 3)
    norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in whole.model.parameters()))  # type: ignore[union-attr]
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-6)
    assert engine.step() == StepReport(pytest.approx(norm, rel=1e-6), 1.0, False)
    whole.step()
    for a, b in zip(weights(engine), weights(whole), strict=True):
        torch.testing.assert_close(a, b)


def test_clipping_shortens_the_gradient_to_the_norm() -> None:
    engine = made(max_grad_norm=0.01)
    before = weights(engine)
    engine.backward(loss(engine, 0))
    report = engine.step()
    assert report.grad_norm > 0.01 and report.scale == pytest.approx(0.01 / report.grad_norm)
    moved = math.sqrt(
        sum(float((a - b).double().square().sum()) for a, b in zip(weights(engine), before, strict=True))
    )
    assert moved == pytest.approx(LR * 0.01, rel=1e-4)
    longer = made(max_grad_norm=100.0)
    longer.backward(loss(longer, 0))
    assert longer.step() == StepReport(report.grad_norm, 1.0, False)


def test_the_order_of_calls_is_kept() -> None:
    engine = made(accumulate=2)
    with pytest.raises(UsageError, match="no gradient"):
        engine.get_global_grad_norm()
    with pytest.raises(UsageError, match="without its backward passes"):
        engine.step()
    engine.backward(loss(engine, 0))
    with pytest.raises(UsageError, match="without its backward passes"):
        engine.step()
    engine.backward(loss(engine, 1))
    with pytest.raises(UsageError, match="2 backward passes make a step"):
        engine.backward(loss(engine, 2))
    engine.step()
    with pytest.raises(UsageError, match="stepped already"):
        engine.step()
    with pytest.raises(UsageError, match="last step is still there"):
        engine.backward(loss(engine, 3))
    engine.zero_grad()
    engine.backward(loss(engine, 3))
    engine.zero_grad()  # a window that is given up
    with pytest.raises(UsageError, match="no gradient"):
        engine.get_global_grad_norm()
    for seed in (4, 5):
        engine.backward(loss(engine, seed))
    engine.step()
    assert engine.steps == 2


def test_a_loss_is_one_number_that_depends_on_the_weights() -> None:
    engine = made()
    wrong = (engine(input=batch(0)), loss(engine, 0).detach(), torch.tensor(1.0), 1.0)
    for value in wrong:
        with pytest.raises(UsageError, match="a loss is one number"):
            engine.backward(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused(bad: float) -> None:
    """Also where the loss is infinite by a constant, and its gradient would look sound."""
    engine = made()
    before = weights(engine)
    engine.backward(loss(engine, 0) + bad)
    with pytest.raises(TrainingError, match="not finite; the weights are unchanged"):
        engine.step()
    assert all(torch.equal(a, b) for a, b in zip(weights(engine), before, strict=True))
    assert engine.steps == 0
    engine.zero_grad()
    engine.backward(loss(engine, 0))
    assert not engine.step().skipped and engine.steps == 1


def test_or_skipped_and_counted() -> None:
    engine = made(nonfinite="skip", accumulate=2)
    before = weights(engine)
    engine.backward(loss(engine, 0))
    engine.backward(loss(engine, 1) * math.nan)
    report = engine.step()
    assert math.isnan(report.grad_norm) and (report.scale, report.skipped) == (0.0, True)
    assert (engine.steps, engine.skipped) == (0, 1)
    assert all(torch.equal(a, b) for a, b in zip(weights(engine), before, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 0}, {"accumulate": 1.5}, {"max_grad_norm": 0.0}, {"max_grad_norm": math.nan},
        {"nonfinite": "ignore"},
    ],
)  # fmt: skip
def test_settings_that_mean_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        made(**options)


def test_parameters_that_nobody_would_train() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(UsageError, match="does not hold") as error:
        Engine(model, torch.optim.SGD([model.weight], lr=1.0))
    assert error.value.found == "`bias`"
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter to train"):
        Engine(model, torch.optim.SGD(model.parameters(), lr=1.0))


def test_a_backward_pass_that_fails_halfway_is_not_built_on() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def fails(_: torch.Tensor) -> torch.Tensor:
        raise MemoryError("in the first layer, when the last has its gradient")

    hidden = model[0](torch.ones(2, 3))
    hidden.register_hook(fails)
    with pytest.raises(MemoryError):
        engine.backward(model[1](hidden).mean())
    assert model[1].bias.grad is not None
    for act in (lambda: engine.backward(engine(input=torch.ones(2, 3)).mean()), engine.step):
        with pytest.raises(UsageError, match="left a part of its gradient"):
            act()
    engine.zero_grad()
    engine.backward(engine(input=torch.ones(2, 3)).mean())
    assert model[1].bias.grad.tolist() == [1.0]
    with pytest.raises(UsageError, match="one number"):
        engine.zero_grad()
        engine.backward(torch.tensor(1j, requires_grad=True))
