"""What a recipe may not say is refused with its field, before anything is read or started."""

import shlex

import pytest

from glm4v_patched.finetune import preflight
from glm4v_patched.finetune.preflight import check
from glm4v_patched.finetune.recipe_file import RecipeError

# What is laid over a recipe that can be run.
REFUSED = r"""
trained=lora
trained=[tower,towr]
trained=[tower,tower]
trained=[]
lora.rank=0
lora.rank=4097
lora.dropout=1
lora.r=8
lora.bias=all
lora.targets=dense
lora.targets=[up]
lora.targets=[fc1] trained=lora_lm
lora.targets=[] trained=lora_lm
lora.use_dora=true trained=lora_lm
lora=
engine.tower=most
'engine.tower=every 0'
engine.language=
engine.optimizer=sgd
engine.offload=most
engine.compile='"true"'
engine.zero_stage=4
engine.zero_stage=true
engine.zero_stage=1.0
engine.towr=none
engine.offload=true engine.zero_stage=0
engine.offload=true engine.optimizer=adamw_8bit
engine.zero_hpz_partition_size=2 engine.zero_stage=2
engine.zero_quantized_weights=true engine.zero_stage=2
engine.zero_quantized_gradients=true engine.zero_stage=1
trained=qlora
engine.fp8=true
engine.fp8=true trained=qlora engine.zero_stage=0
engine.fp8=true engine.precision=fp32
engine.fp8=true trained=lora_lm lora.use_dora=true engine.zero_stage=0
engine.fp8=true engine.zero_quantized_weights=true
model='""'
'model="a\nb"'
'model="a\ud800"'
out=2024
revision='""'
revision=v1 model=.
data.pack_to=0
data.reuse_features=true
data.reuse_features=true trained=[adapter]
data.train=[]
data.train=[5]
'data.train=[a, {file: b}]'
'data.train=[{path: a, wieght: 2}]'
'data.train=[{path: a, weight: 0}]'
'data.eval=[org/a, {path: org/b, weight: 2}]'
data.eval=1.5
data.eval=200
data.eval=5%
data.eval=true
data.format=llama
data.ignore=id
data.image_folder=none
trainer=
trainer.max_steps=0
trainer.max_steps=true
trainer.max_steps='"100"'
trainer.max_steps='"-1"'
trainer.learning_rate=0
trainer.learning_rate=.nan
trainer.learning_rate=
'trainer.learning_rate={towr: 1e-6}'
'trainer.learning_rate={tower: 1, adapter: 1}'
'trainer.learning_rate={adapter: 1}' trained=lora_all
trainer.seed=-1
trainer.seed=4294967296
trainer.lr_scheduler_type=cosin
trainer.dataloader_prefetch_factor=2 trainer.dataloader_num_workers=0
trainer.adam_beta2=1.0
trainer.adam_epsilon=0
trainer.full_determinism=1
trainer.weight_decai=0.1
trainer.report_to=tensorbord
trainer.save_strategy=steps
trainer.save_strategy=epoch trainer.save_steps=5
trainer.eval_strategy=steps data.eval=0.1
trainer.eval_strategy=epoch
trainer.early_stopping_patience=1 trainer.eval_strategy=no data.eval=0.1
trainer.save_strategy=best
trainer.load_best_model_at_end=true data.eval=0.1 trainer.save_steps=5
trainer.load_best_model_at_end=true data.eval=0.1 trainer.save_steps=5 trainer.eval_steps=2
trainer.metric_for_best_model=exact_match data.eval_answers=0
trainer.output_dir=o
trainer.bf16=
trainer.fsdp_config=
trainer.ddp_backend=nccl
learning_rat=1
steps=1
no.thing=1
out.x=1
engine..compile=1
engine.compile=*a
'engine={zero_stage: 9}'
lora.rank=1 lora.rank=2
"""


def test_each_is_refused_with_what_was_found_and_what_is_expected(asked, words, monkeypatch):
    monkeypatch.setattr(preflight, "require_packages", lambda choice: None)
    told = []
    for line in REFUSED.strip().split("\n"):
        assignments = shlex.split(line)
        with pytest.raises(RecipeError) as error:
            check(asked, assignments, None, "cpu")
        lines = str(error.value).split("\n")
        assert all(each.startswith(("command line: ", f"{asked}:")) for each in lines), lines
        field, _, value = assignments[0].partition("=")
        assert any(field.partition(".")[0] in each or value in each for each in lines), lines
        told += [line, *(f"  {each}" for each in lines)]
    words("\n".join(told))


def test_a_logger_that_is_not_installed_is_told_with_its_cure(asked):
    with pytest.raises(RecipeError, match="report_to clearml needs clearml: .*install clearml"):
        check(asked, ["trainer.report_to=[clearml]"], None, "cpu")
