"""Contradictory and unusable values are refused with their field, before anything starts."""

import json
import re
import shlex

import pytest

from glm4v_patched.finetune import preflight
from glm4v_patched.finetune.preflight import validate_recipe
from glm4v_patched.finetune.recipe.file import RecipeError, set_nested
from glm4v_patched.finetune.recipe.other_names import (
    OTHER_VALUES,
    RECIPE_EQUIVALENTS,
    REFUSED_FIELDS,
)
from glm4v_patched.finetune.recipe.sections import check_values, declared_fields
from tests.helpers.recipes import LEAST

# What is laid over a recipe that can be run, a recipe a line. All faults come in one answer; rules
# between fields are tried where nothing else is wrong with these.
REFUSED = r"""
trained=lora lora.rank=0 lora.dropout=1 lora.r=8 lora.bias=all lora.targets=dense
trained=[tower,towr] lora.rank=4097 lora.targets=[up] engine.tower=most engine.language=
trained=[tower,tower] lora= engine.towr=none 'engine.tower=every 0' engine.zero_stage=4
trained=[] engine.optimizer=sgd engine.offload=most engine.zero_stage=true engine.compile='"true"'
trained=qlora engine.zero_stage=1.0 data.train=[] trainer.max_steps=0 trainer.seed=-1
trained=qlora
lora.targets=[fc1] trained=lora_lm
lora.targets=[] trained=lora_lm
lora.use_dora=true trained=lora_lm
engine.offload=true engine.zero_stage=0
engine.offload=true engine.optimizer=adamw_8bit
engine.zero_hpz_partition_size=2 engine.zero_stage=2
engine.fp8=true trained=qlora engine.zero_stage=0
engine.fp8=true engine.precision=fp32
engine.fp8=true trained=lora_lm lora.use_dora=true engine.zero_stage=0
model='""' out=2024 revision='""' data.train=[5] data.eval=1.5 data.format=llama data.ignore=id
'model="a\nb"' 'data.train=[a, {file: b}]' data.eval=200 data.image_folder=none data.pack_to=0
'model="a\ud800"' 'data.train=[{path: a, wieght: 2}]' data.eval=5%
revision=v1 model=. 'data.train=[{path: a, weight: 0}]' data.eval=true
'data.eval=[org/a, {path: org/b, weight: 2}]' data.reuse_features=true
data.reuse_features=true trained=[projector]
trainer=
trainer.learning_rate=0 trainer.max_steps=true trainer.seed=4294967296 trainer.adam_beta2=1.0
trainer.learning_rate=.nan trainer.max_steps='"100"' trainer.adam_epsilon=0
trainer.learning_rate= trainer.max_steps='"-1"' trainer.lr_scheduler_type=cosin
'trainer.learning_rate={towr: 1e-6}' trainer.full_determinism=1 trainer.report_to=tensorbord
'trainer.learning_rate={tower: 1, projector: 1}'
'trainer.learning_rate={projector: 1}' trained=lora_all
trainer.save_strategy=steps trainer.eval_strategy=epoch
trainer.save_strategy=epoch trainer.save_steps=5 trainer.eval_strategy=steps data.eval=0.1
trainer.save_strategy=best
trainer.early_stopping_patience=1 trainer.eval_strategy=no data.eval=0.1
trainer.lr_scheduler_type=greedy
trainer.lr_scheduler_type=reduce_lr_on_plateau trainer.eval_strategy=no data.eval=0.1
trainer.eval_on_start=true
'trainer.lr_scheduler_kwargs="{}"' trainer.num_train_epochs=0.0
data.stream=true trainer.max_steps=5 trainer.logging_strategy=epoch
trainer.load_best_model_at_end=true data.eval=0.1 trainer.save_steps=5
trainer.load_best_model_at_end=true data.eval=0.1 trainer.save_steps=5 trainer.eval_steps=2
trainer.metric_for_best_model=exact_match data.eval_answers=0
trainer.dataloader_prefetch_factor=2 trainer.dataloader_num_workers=0
'data.check="first 0"' trainer.max_steps=5
'data.check="first 5"' data.stream=false
data.stream=true trainer.max_steps= trainer.save_strategy=epoch data.eval=e
data.check=none data.pack_to=100 data.eval=0.5
data.train=[] data.eval=[]
trainer.output_dir=o trainer.bf16= trainer.fsdp_config= trainer.ddp_backend=nccl
learning_rat=1 steps=1 no.thing=1 trainer.weight_decai=0.1
out.x=1
engine..compile=1
engine.compile=*a
lora.rank=1 lora.rank=2
'engine={zero_stage: 9}'
"""


def test_each_is_refused_with_what_was_found_and_what_is_expected(recipe_file, words, monkeypatch):
    monkeypatch.setattr(preflight, "require_packages", lambda choice: None)
    messages = []
    for line in REFUSED.strip().split("\n"):
        with pytest.raises(RecipeError) as error:
            validate_recipe(recipe_file, shlex.split(line), None, "cpu")
        lines = sorted(str(error.value).split("\n"))
        locations = ("command line: ", f"{recipe_file}:")
        assert all(problem.startswith(locations) for problem in lines), lines
        messages += [line, *(f"  {problem}" for problem in lines)]
    words("\n".join(messages))


def test_what_can_go_together_is_not_refused(recipe_file):
    overrides = ["trained=lora_all", "lora.use_dora=true", "engine.zero_stage=2"]
    assert validate_recipe(recipe_file, overrides, None, "cpu")[0].lora.use_dora


def test_a_logger_that_is_not_installed_is_told_with_its_cure(recipe_file):
    with pytest.raises(RecipeError, match="report_to clearml needs clearml: .*install clearml"):
        validate_recipe(recipe_file, ["trainer.report_to=[clearml]"], None, "cpu")


def problems_of(changes: dict) -> str:
    """Lines about a recipe with changes, which are by dotted names."""
    problems = check_values(set_nested(LEAST, changes)).problems
    return "\n".join(problem.text for problem in problems)


def test_each_cure_is_a_key_that_a_recipe_takes_or_says_why_none_is_needed():
    known = dict(declared_fields())
    for name, suggestion in RECIPE_EQUIVALENTS.items():
        line = f"{name} is not a field of a recipe; did you mean {suggestion}?"
        assert problems_of({name: 1}) == line
        key = re.match(r"[a-z_.]+|--", suggestion).group()
        assert key == "--" or key in known, suggestion  # -- of the command line
    for name, why in REFUSED_FIELDS.items():
        assert problems_of({name: 1}).endswith(f"it is not needed: {why}")
        assert {*re.findall(r"\b(?:data|engine|lora|trainer)\.[a-z_]+", why)} <= {*known}


def test_a_value_of_another_program_is_answered_with_ours():
    types = {"trainer.learning_rate": lambda part: {part: 1.0}, "lora.targets": lambda name: [name]}
    for name, values in OTHER_VALUES.items():
        to_value = types.get(name, str)
        for value, suggestion in values.items():
            assert problems_of({name: to_value(value)}).endswith(f"; did you mean {suggestion}?")
            for choice in suggestion.split(" or "):
                value = choice if choice == "all-linear" else to_value(choice)
                assert f"{name} is {json.dumps(value)}" not in problems_of({name: value})


def test_a_value_that_is_nearly_a_choice_is_answered_with_it():
    for name, value, nearest in (
        ("trainer.lr_scheduler_type", "cosin", "cosine"),
        ("trainer.report_to", "wandbb", "wandb"),
        ("trainer.report_to", ["tensorbord", "wandbb"], "tensorboard, wandb"),
        ("lora.targets", ["query_key_valu"], "query_key_value"),
        ("trained", "lora_al", "lora_all"),
        ("trained", "towr+projectr", "tower, projector"),
        ("engine.tower", "ful", "full"),
        ("engine.compile", "ture", "true"),
    ):
        assert problems_of({name: value}).endswith(f"; did you mean {nearest}?"), name
    for name, value in (("trained", "everything"), ("data.format", 5), ("model", "")):
        assert "did you mean" not in problems_of({name: value})
    rates = problems_of({"trainer.learning_rate": {"tower:1e-5": None}})
    assert rates.endswith("; a space is missing after a colon")
