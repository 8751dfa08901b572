"""The learning rates of a run, by the schedule that transformers builds for it."""

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers import SchedulerType, get_scheduler

from ..terminal_text import error_text
from .recipe.file import shown
from .recipe.trainer import METRIC_SCHEDULES

# A longer run is looked at in so many steps, spread evenly. A schedule that follows the evaluations
# is given so many that are each better than the last, and so many that are not.
MOST_STEPS, EVALUATIONS = 10_000, 50
ROUNDING = 1e-6
# What most schedules stay far away from: the highest rate, and the share of steps without any.
LEAST_SHARE, MOST_IDLE = 0.8, 0.1

Arguments = Mapping[str, Any]
"""Of :func:`training_arguments`."""


def require_schedule(arguments: Arguments) -> None:
    """Raise ``ValueError`` if transformers cannot build the schedule for so many steps, or if it
    cannot train: rates that are negative, not finite, above ``learning_rate``, or all 0."""
    name, kwargs, steps = arguments["lr_scheduler_type"], _kwargs(arguments), arguments["max_steps"]
    if name not in (known := [kind.value for kind in SchedulerType]):
        raise ValueError(
            f"trainer.lr_scheduler_type is {name}, which transformers {transformers.__version__} "
            f"does not have; expected one of {', '.join(known)}"
        )
    _require_kwargs(arguments)
    about = f"with {arguments['warmup_steps']:,} steps of warm-up (trainer.warmup_steps)"
    if kwargs:
        about += f" and trainer.lr_scheduler_kwargs {shown(kwargs)}"
    try:
        rates = learning_rates(arguments)
    except Exception as error:  # whatever transformers and torch make of such values
        raise ValueError(
            f"trainer.lr_scheduler_type {name} cannot be built for {steps:,} steps {about}: "
            f"{error_text(error)}"
        ) from None
    highest = arguments["learning_rate"]
    most = math.inf if name in METRIC_SCHEDULES else highest
    for step, rate in rates:
        if not 0 <= rate <= most * (1 + ROUNDING) or rate == math.inf:
            raise ValueError(
                f"trainer.lr_scheduler_type {name} {about} has the learning rate {rate:g} at step "
                f"{min(step + 1, steps):,} of {steps:,}; expected 0 to trainer.learning_rate, "
                f"{highest:g}"
            )
    if not any(rate for step, rate in rates if step < steps):
        raise ValueError(
            f"trainer.lr_scheduler_type {name} {about} has the learning rate 0 in all steps, of "
            f"which there are {steps:,}: nothing would be learned; expected more steps, or fewer "
            "of warm-up, the first of which has the rate 0"
        )


def schedule_warnings(arguments: Arguments) -> Iterator[str]:
    """What of the learning rates is most likely a mistake."""
    steps = arguments["max_steps"]
    looked_at = [(step, rate) for step, rate in learning_rates(arguments) if step < steps]
    rates = [rate for _, rate in looked_at]
    warm, highest = arguments["warmup_steps"], max(rates) / arguments["learning_rate"]
    if highest < LEAST_SHARE:
        yield (
            f"the learning rate is {highest:.0%} of trainer.learning_rate at most: the run has "
            f"{steps:,} steps, and trainer.warmup_steps is {warm:,}"
        )
    idle = sum(rate == 0 for step, rate in looked_at if step >= warm) / len(rates)
    if idle > MOST_IDLE:
        yield (
            f"the learning rate is 0 in {idle:.0%} of {steps:,} steps: see "
            f"trainer.lr_scheduler_kwargs, {shown(_kwargs(arguments))}"
        )


def learning_rates(arguments: Arguments) -> list[tuple[int, float]]:
    """Return steps, counted from 0, with their learning rates; where parts have their own, with
    the highest, to which the others are in proportion.

    The step after the last one is among them, for the Trainer computes its rate, too. A schedule
    that follows the evaluations has no steps: its rates are those after each of some.
    """
    optimizer = torch.optim.AdamW(
        [torch.nn.Parameter(torch.zeros(1))], lr=arguments["learning_rate"]
    )
    scheduler = _build(arguments, optimizer, _kwargs(arguments))
    if arguments["lr_scheduler_type"] not in METRIC_SCHEDULES:
        [factor] = scheduler.lr_lambdas
        return [(n, float(arguments["learning_rate"] * factor(n))) for n in _some_steps(arguments)]
    rates = [(0, arguments["learning_rate"])]
    for metric in [*range(0, -EVALUATIONS, -1), *[0] * EVALUATIONS]:
        scheduler.step(float(metric))
        rates.append((0, float(optimizer.param_groups[0]["lr"])))
    return rates


def _build(arguments: Arguments, optimizer: Any, kwargs: dict[str, Any]) -> Any:
    """The schedule, with the arguments that the Trainer gives."""
    with warnings.catch_warnings(action="ignore"):  # the training shows them
        return get_scheduler(
            arguments["lr_scheduler_type"],
            optimizer=optimizer,
            num_warmup_steps=arguments["warmup_steps"],
            num_training_steps=arguments["max_steps"],
            scheduler_specific_kwargs=kwargs,
        )


def _some_steps(arguments: Arguments) -> list[int]:
    steps, warm = arguments["max_steps"], arguments["warmup_steps"]
    if steps <= MOST_STEPS:
        return [*range(steps + 1)]
    edges = {1, warm - 1, warm, warm + 1, steps - 1}
    spread = {steps * n // MOST_STEPS for n in range(MOST_STEPS + 1)}
    return sorted(spread | {step for step in edges if 0 <= step <= steps})


def _kwargs(arguments: Arguments) -> dict[str, Any]:
    return arguments.get("lr_scheduler_kwargs") or {}


def _require_kwargs(arguments: Arguments) -> None:
    name, metric = arguments["lr_scheduler_type"], arguments["metric_for_best_model"]
    kwargs = _kwargs(arguments)
    if kwargs and _drops_kwargs(arguments):
        raise ValueError(
            f"trainer.lr_scheduler_kwargs has {', '.join(kwargs)}, which {name} does not take in "
            f"transformers {transformers.__version__}; expected null"
        )
    for key, value in kwargs.items():
        # A list would have one for each group of weights, whose number only the model knows.
        is_number = isinstance(value, int | float) and 0 <= value < math.inf
        if not (value is None or is_number or isinstance(value, str)):
            raise ValueError(
                f"trainer.lr_scheduler_kwargs has {key} {shown(value)}; expected a number from 0, "
                "text, true or false"
            )
    if name not in METRIC_SCHEDULES:
        return
    greater = arguments.get("greater_is_better")
    if greater is None:
        greater = not metric.endswith("loss")
    mode, expected = kwargs.get("mode", "min"), "max" if greater else "min"
    if mode != expected:
        raise ValueError(
            f"trainer.lr_scheduler_type {name} has the mode {shown(mode)}, and of "
            f"trainer.metric_for_best_model {metric} "
            f"{'more' if greater else 'less'} is better; expected trainer.lr_scheduler_kwargs to "
            f"have mode: {expected}"
        )


def _drops_kwargs(arguments: Arguments) -> bool:
    """Whether transformers drops what it is given beside the steps, as it does for "constant"."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    try:
        _build({**arguments, "max_steps": 1}, optimizer, {"no such name": 0})
    except TypeError:
        return False
    return True
