"""Check the learning rates of a run, by building its schedule with transformers."""

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers import SchedulerType, get_scheduler

from ..terminal_text import error_text
from .recipe.file import short_json
from .recipe.trainer import SCHEDULES_BY_METRIC

# Of a run with more steps, about this many evenly spaced steps are checked.
MAX_SAMPLED_STEPS = 10_000
# A schedule that depends on a metric is tried with this many evaluations in which the metric falls,
# and then as many in which it is higher and stays the same.
NUM_EVALUATIONS = 50
RATE_TOLERANCE = 1e-6  # relative
# A schedule is most likely a mistake if its highest rate is below MIN_PEAK_SHARE of
# trainer.learning_rate, or if more than MAX_IDLE_SHARE of its steps have the rate 0.
MIN_PEAK_SHARE, MAX_IDLE_SHARE = 0.8, 0.1

Arguments = Mapping[str, Any]
"""The result of :func:`training_arguments`."""


def require_schedule(arguments: Arguments) -> None:
    """Raise ``ValueError`` if transformers cannot build the schedule, or its rates are invalid.

    Invalid rates are negative, not finite, above ``learning_rate``, or all 0.
    """
    name, kwargs, steps = arguments["lr_scheduler_type"], _kwargs(arguments), arguments["max_steps"]
    if name not in (known_names := [kind.value for kind in SchedulerType]):
        raise ValueError(
            f"trainer.lr_scheduler_type is {name}, which transformers {transformers.__version__} "
            f"does not have; expected one of {', '.join(known_names)}"
        )
    _require_kwargs(arguments)
    options = f"with {arguments['warmup_steps']:,} steps of warm-up (trainer.warmup_steps)"
    if kwargs:
        options += f" and trainer.lr_scheduler_kwargs {short_json(kwargs)}"
    try:
        rates = learning_rates(arguments)
    except Exception as error:  # transformers and torch raise errors of any class
        raise ValueError(
            f"trainer.lr_scheduler_type {name} cannot be built for {steps:,} steps {options}: "
            f"{error_text(error)}"
        ) from None
    peak = arguments["learning_rate"]
    highest_allowed = math.inf if name in SCHEDULES_BY_METRIC else peak
    for step, rate in rates:
        if not 0 <= rate <= highest_allowed * (1 + RATE_TOLERANCE) or rate == math.inf:
            raise ValueError(
                f"trainer.lr_scheduler_type {name} {options} has the learning rate {rate:g} at "
                f"step {min(step + 1, steps):,} of {steps:,}; expected 0 to "
                f"trainer.learning_rate, {peak:g}"
            )
    if not any(rate for step, rate in rates if step < steps):
        raise ValueError(
            f"trainer.lr_scheduler_type {name} {options} has the learning rate 0 in all of the "
            f"{steps:,} steps, so that nothing would be trained; expected more steps, or fewer "
            "steps of warm-up, the first of which has the rate 0"
        )


def schedule_warnings(arguments: Arguments) -> Iterator[str]:
    """Yield a line for each property of the learning rates that is most likely a mistake."""
    steps = arguments["max_steps"]
    sampled = [(step, rate) for step, rate in learning_rates(arguments) if step < steps]
    rates = [rate for _, rate in sampled]
    warmup, peak_share = arguments["warmup_steps"], max(rates) / arguments["learning_rate"]
    if peak_share < MIN_PEAK_SHARE:
        yield (
            f"the learning rate is {peak_share:.0%} of trainer.learning_rate at most: the run has "
            f"{steps:,} steps, and trainer.warmup_steps is {warmup:,}"
        )
    idle_share = sum(rate == 0 for step, rate in sampled if step >= warmup) / len(rates)
    if idle_share > MAX_IDLE_SHARE:
        yield (
            f"the learning rate is 0 in {idle_share:.0%} of {steps:,} steps: see "
            f"trainer.lr_scheduler_kwargs, {short_json(_kwargs(arguments))}"
        )


def learning_rates(arguments: Arguments) -> list[tuple[int, float]]:
    """Return pairs of a step, from 0, and its learning rate.

    If parts of the model have their own rates, these are the rates of the part with the highest;
    the others are proportional. The step after the last is included, because the Trainer computes a
    rate for it, too. For a schedule that depends on a metric, all pairs have step 0, and the rates
    are those after the simulated evaluations.
    """
    optimizer = torch.optim.AdamW(
        [torch.nn.Parameter(torch.zeros(1))], lr=arguments["learning_rate"]
    )
    scheduler = _build(arguments, optimizer, _kwargs(arguments))
    if arguments["lr_scheduler_type"] not in SCHEDULES_BY_METRIC:
        [lr_lambda] = scheduler.lr_lambdas
        peak = arguments["learning_rate"]
        return [(step, float(peak * lr_lambda(step))) for step in _sampled_steps(arguments)]
    rates = [(0, arguments["learning_rate"])]
    for metric in [*range(0, -NUM_EVALUATIONS, -1), *[0] * NUM_EVALUATIONS]:
        scheduler.step(float(metric))
        rates.append((0, float(optimizer.param_groups[0]["lr"])))
    return rates


def _build(arguments: Arguments, optimizer: Any, kwargs: dict[str, Any]) -> Any:
    """Build the schedule with the arguments that the Trainer passes."""
    with warnings.catch_warnings(action="ignore"):  # the training will show these warnings
        return get_scheduler(
            arguments["lr_scheduler_type"],
            optimizer=optimizer,
            num_warmup_steps=arguments["warmup_steps"],
            num_training_steps=arguments["max_steps"],
            scheduler_specific_kwargs=kwargs,
        )


def _sampled_steps(arguments: Arguments) -> list[int]:
    """Return all steps of a short run; of a longer one, evenly spaced steps and the last two."""
    steps = arguments["max_steps"]
    return [*range(0, steps - 1, -(-steps // MAX_SAMPLED_STEPS)), steps - 1, steps]


def _kwargs(arguments: Arguments) -> dict[str, Any]:
    return arguments.get("lr_scheduler_kwargs") or {}


def _require_kwargs(arguments: Arguments) -> None:
    """Raise ``ValueError`` for ``lr_scheduler_kwargs`` that have no effect, or of a wrong type.

    For a schedule that depends on a metric, ``mode`` must also match the metric.
    """
    name, metric = arguments["lr_scheduler_type"], arguments["metric_for_best_model"]
    kwargs = _kwargs(arguments)
    if kwargs and _drops_kwargs(arguments):
        raise ValueError(
            f"trainer.lr_scheduler_kwargs has {', '.join(kwargs)}, which {name} does not take in "
            f"transformers {transformers.__version__}; expected null"
        )
    for key, value in kwargs.items():
        # A list is refused: it needs an item for each parameter group, and only the model has them.
        is_number = isinstance(value, int | float) and 0 <= value < math.inf
        if not (value is None or is_number or isinstance(value, str)):
            raise ValueError(
                f"trainer.lr_scheduler_kwargs has {key} {short_json(value)}; expected a number "
                "from 0, text, true or false"
            )
    if name not in SCHEDULES_BY_METRIC:
        return
    greater_is_better = arguments.get("greater_is_better")
    if greater_is_better is None:
        greater_is_better = not metric.endswith("loss")
    better, expected = ("greater", "max") if greater_is_better else ("lower", "min")
    mode = kwargs.get("mode", "min")
    if mode != expected:
        raise ValueError(
            f"trainer.lr_scheduler_type {name} has the mode {short_json(mode)}, and a {better} "
            f"trainer.metric_for_best_model {metric} is better; expected "
            f"trainer.lr_scheduler_kwargs to have mode: {expected}"
        )


def _drops_kwargs(arguments: Arguments) -> bool:
    """Return whether transformers ignores the kwargs of a schedule, as it does for "constant"."""
    # A schedule that takes kwargs raises a TypeError for an unknown name.
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    try:
        _build({**arguments, "max_steps": 1}, optimizer, {"no such name": 0})
    except TypeError:
        return False
    return True
