"""Schedules of the learning rate that cannot train are refused, with what they may be given."""

import math
from contextlib import nullcontext

import pytest
import transformers
from transformers import SchedulerType

from glm4v_patched.finetune import schedule
from glm4v_patched.finetune.schedule import require_schedule, schedule_warnings
from tests.helpers.recipes import arguments_of, recipe


def fields(name: str, kwargs: dict | None = None, steps: int = 10, **more) -> dict:
    trainer_fields = {"lr_scheduler_type": name, "learning_rate": 1e-3} | more
    if kwargs is not None:
        trainer_fields["lr_scheduler_kwargs"] = kwargs
    changes = {f"trainer.{name}": value for name, value in trainer_fields.items()}
    return arguments_of(recipe(changes | {"trained": "full", "data.eval": 0.1}), steps)


# Arguments without defaults that these schedules need.
NEEDED = {
    "cosine_with_min_lr": {"min_lr": 1e-5},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 2},
}


def test_every_schedule_of_the_installed_transformers_can_be_asked_for():
    for name in (kind.value for kind in SchedulerType):
        for steps in (2, 10, 10**6):
            require_schedule(fields(name, NEEDED.get(name), steps))
    rates = {"tower": 1e-6, "projector": 1e-5, "language_model": 1e-4}
    for name in ("polynomial", "cosine_with_min_lr"):
        require_schedule(fields(name, NEEDED.get(name), learning_rate=rates))


REFUSED = [
    ("cosine_with_min_lr", {}, {}),
    ("cosine_with_min_lr", {"min_lr": 1e-5, "min_lr_rate": 0.1}, {}),
    ("cosine_with_min_lr", {"min_lr": 1.0}, {}),
    ("cosine_with_min_lr", {"min_lr": "1e-5"}, {}),
    ("cosine_with_min_lr", {"min_lr": -1e-5}, {}),
    ("cosine_with_min_lr", {"min_lr_rate": math.nan}, {}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1, "warmup_lr_rate": 3}, {}),
    ("warmup_stable_decay", {}, {}),
    ("warmup_stable_decay", {"num_decay_steps": 2, "decay_type": "lin"}, {}),
    ("warmup_stable_decay", {"num_decay_steps": 2, "min_lr_ratio": 2}, {}),
    ("warmup_stable_decay", {"num_decay_steps": 0, "num_stable_steps": 0}, {}),
    ("polynomial", {"lr_end": 0.01}, {}),
    ("polynomial", {}, {"learning_rate": 1e-8}),
    # Its rate after the last step, which the Trainer asks for when all is trained.
    ("polynomial", {}, {"warmup_steps": 10}),
    ("cosine", {"num_cycle": 2}, {}),
    ("cosine", {"num_cycles": [1, 2]}, {}),
    ("cosine", {"last_epoch": 5}, {}),
    ("constant", {"num_cycles": 2}, {}),
    ("constant_with_warmup", {"min_lr": 0.0}, {}),
    ("linear", {}, {"warmup_steps": 10**6, "max_steps": 1}),
    ("reduce_lr_on_plateau", {"factor": 2.0}, {}),
    ("reduce_lr_on_plateau", {"patience": "a"}, {}),
    ("reduce_lr_on_plateau", {"mode": "max"}, {}),
    ("reduce_lr_on_plateau", {}, {"metric_for_best_model": "exact_match"}),
]


def test_what_cannot_be_built_or_cannot_train_is_refused(words):
    messages = []
    for name, kwargs, more in REFUSED:
        arguments = fields(name, kwargs, more.get("max_steps", 10), **more)
        with pytest.raises(ValueError, match="^trainer") as refused:
            require_schedule(arguments)
        messages += [f"{name} {kwargs} {more}", f"  {refused.value}"]
    words("\n".join(messages).replace(transformers.__version__, "VERSION"))


def test_a_rate_above_0_after_the_last_step_trains_nothing():
    with pytest.raises(ValueError, match="learning rate 0 in all of the 1 steps"):
        require_schedule(fields("constant_with_warmup", {}, 1, warmup_steps=1))
    require_schedule(fields("constant_with_warmup", {}, 2, warmup_steps=1))


@pytest.mark.parametrize("metric", ["eval_loss", "exact_match"])
@pytest.mark.parametrize("greater", [True, False, None])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_mode_of_a_schedule_is_what_greater_is_better_says_or_else_the_metric(
    metric, greater, mode
):
    more = {} if greater is None else {"greater_is_better": greater}
    arguments = fields("reduce_lr_on_plateau", {"mode": mode}, metric_for_best_model=metric, **more)
    is_greater = metric == "exact_match" if greater is None else greater
    with nullcontext() if (mode == "max") == is_greater else pytest.raises(ValueError, match=mode):
        require_schedule(arguments)


def test_the_edges_of_a_timescale_are_refused():
    """On transformers 4.57, which drops it, any is."""
    for scale in (0, -1, math.inf):
        with pytest.raises(ValueError, match="timescale"):
            require_schedule(fields("inverse_sqrt", {"timescale": scale}))


def test_a_schedule_that_an_older_transformers_lacks_is_refused_by_name(monkeypatch):
    known = [kind for kind in SchedulerType if kind.value != "cosine"]
    monkeypatch.setattr(schedule, "SchedulerType", known)
    with pytest.raises(ValueError, match=r"is cosine, which transformers .* does not have"):
        require_schedule(fields("cosine"))


def test_arguments_that_are_dropped_on_the_way_are_refused(monkeypatch):
    """transformers 4.57 drops the timescale of inverse_sqrt."""
    build = schedule.get_scheduler

    def drop(name, *, scheduler_specific_kwargs, **kwargs):
        return build(name, **kwargs)

    monkeypatch.setattr(schedule, "get_scheduler", drop)
    require_schedule(fields("inverse_sqrt"))
    with pytest.raises(ValueError, match="timescale, which inverse_sqrt does not take"):
        require_schedule(fields("inverse_sqrt", {"timescale": 5}))


def test_rates_that_never_come_near_or_are_0_for_long_are_doubtful():
    assert not [*schedule_warnings(fields("cosine", steps=100, warmup_steps=99))]
    (low,) = schedule_warnings(fields("linear", steps=100, warmup_steps=500))
    assert "is 20% of trainer.learning_rate at most: the run has 100 steps" in low
    kwargs = {"num_stable_steps": 20, "num_decay_steps": 30}
    (idle,) = schedule_warnings(fields("warmup_stable_decay", kwargs, 100, warmup_steps=0))
    assert "is 0 in 50% of 100 steps" in idle
