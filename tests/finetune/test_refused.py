"""What a recipe may not say is refused with the field, what was found and what is expected, before
anything is read or started."""

import re
import shlex

import pytest

from glm4v_patched.finetune.preflight import check
from glm4v_patched.finetune.recipe_file import RecipeError

# What is laid over a recipe that can be run, and what is told then, as a regular expression.
REFUSED = r"""
trained=lora => trained is "lora"; expected full, lm, .*, qlora, or a list of tower, adapter
trained=[tower,towr] => trained is \["tower", "towr"\]; expected full, .*
trained=[tower,tower] => trained is .*; expected full, .* or a list of tower
trained=[] => trained is \[\]; expected full, .*, or a list of tower, adapter
lora.rank=0 => lora.rank is 0; expected a whole number from 1 to 4096
lora.alpha=0 => lora.alpha is 0; expected a whole number from 1 to .* or null
lora.dropout=1 => lora.dropout is 1; expected a number from 0 to below 1 or null
lora.r=8 => lora.r is not a field .*; did you mean lora.rank\?
lora.target_modules=[] => lora.target_modules is not .*did you mean lora.targets\?
lora.bias=all => lora.bias is not a field of a recipe; expected rank, alpha, drop
lora.targets=dense => targets is "dense"; expected a list of query_key_value, dense
lora.targets=[up] => targets is .*"up".*; expected a list of query_key_value, dense
lora.targets=[fc1] trained=lora_lm => is .*fc1.*, with layers of the vision tower.* lora_all
lora.targets=[] trained=lora_lm => lora.targets is an empty list
lora.use_dora=true trained=lora_lm => use_dora with engine.zero_stage 3: .* 0, 1
lora= => lora is null; expected a section with rank
engine.tower=most => engine.tower is "most"; expected auto, none, linear
'engine.tower=every 0' => engine.tower is "every 0"; expected .* every N, N > 0
engine.language= => engine.language is null; expected auto, none
engine.optimizer=sgd => engine.optimizer is "sgd"; expected adamw or adamw_8bit
engine.offload=most => engine.offload is "most"; expected true, false or auto$
engine.precision=fp16 => engine.precision is "fp16"; expected bf16 or fp32
engine.compile=1 => engine.compile is 1; expected true, false or auto
engine.compile='"true"' => engine.compile is "true"; .* \(without quotes\)
engine.zero_stage=4 => engine.zero_stage is 4; expected 0, 1, 2 or 3
engine.zero_stage=true => engine.zero_stage is true; expected 0, 1, 2 or 3
engine.zero_stage=1.0 => engine.zero_stage is 1.0; expected 0, 1, 2 or 3
engine.x=1 => engine.x is not a field of a recipe; expected zero_stage, precision
engine.towr=none => engine.towr is not a field .*; did you mean engine.tower\?
engine.offload=true engine.zero_stage=0 => offload with engine.zero_stage 0: .*zero_stage 1, 2 or 3
engine.offload=true engine.optimizer=adamw_8bit => offload with adamw_8bit, .* be adamw
engine.zero_hpz_partition_size=2 engine.zero_stage=2 => size 2 with engine.zero_stage 2: only stage
engine.zero_quantized_weights=true engine.zero_stage=1 => quantized_weights or _gradients with .* 1:
trained=qlora => qlora with engine.zero_stage 3: .*; expected engine.zero_stage 0
engine.fp8=true => engine.fp8 is true, which runs on a GPU, and --device is cpu
engine.fp8=true trained=qlora engine.zero_stage=0 => fp8 with .*qlora, whose weights have 4 bits; ex
engine.fp8=true engine.precision=fp32 => engine.fp8 with .*precision fp32: products in fp8 give bf16
engine.fp8=true trained=lora_lm lora.use_dora=true engine.zero_stage=0 => fp8 with lora.use_dora: Do
engine.fp8=true engine.zero_quantized_weights=true => engine.fp8 with .*expected one of them to be f
model='""' => model is ""; expected a folder or an id of the Hub
'model="a\nb"' => model is "a\\nb"; expected a folder
'model="a\ud800"' => model is "a\\ud800"; expected a folder
out=2024 => out is 2024; expected a folder \(in quotes\)
revision=1234567 => revision is 1234567; expected a branch.* \(in quotes\)
revision='""' => revision is ""; expected a branch, tag or commit or null$
'revision="v\0"' => revision is .*; expected a branch, tag or commit or null$
model=. revision=v1 => revision is "v1" of ., a folder; expected null
data=d => data is "d"; expected a section with train,
data.pack_to=0 => data.pack_to is 0; expected a whole number from 1 to .* or null
data.reuse_features=true => full, which trains the vision tower.*trained to be lm
data.reuse_features=f trained=lora_all => lora_all, which trains the vision
data.reuse_features=true trained=[adapter] => adapter, which trains the vision
data.train=[] => data.train: an empty list; expected at least 1 set
data.train=[5] => data.train: set 1 of 1: is 5; expected a path, or {path: FILE, wei
'data.train=[a, {file: b}]' => 2 of 2: "file" is not a field of a set; expected path
'data.train=[{path: a, wieght: 2}]' => "wieght" is not a field of a set; did you mean we
'data.train=[{weight: 2}]' => set 1 of 1: path is missing
'data.train=[{path: a, weight: 0}]' => weight is 0; expected a number above 0
'data.train=[{path: a, format: llama}]' => format is "llama"; expected auto, messages
'data.train=[{path: a, ignore: id}]' => ignore is "id"; expected a list of names
'data.eval=[org/a, {path: org/b, weight: 2}]' => data.eval: set 2 of 2 has a weight
data.eval='[{path: ""}]' => data.eval: set 1 of 1: path is ""; expected text
data.eval=1.5 => data.eval is 1.5; .* a number between 0 and 1 .*0.05 holds out 5% .* 0.015 of 1.5%;
data.eval=200 => or null \(0.05 holds out 5% of the rows; for so many rows, name a
data.eval=5% => no such file; a share of the rows is a number without quotes or %: 0.
data.eval=true => data.eval is true; expected a file
data.format=llama => data.format is "llama"; expected auto, messages, conversations
data.ignore=id => data.ignore is "id"; expected a list of names
data.image_folder=none => data.image_folder is .*: there is no such folder
trainer= => trainer is null; expected a section with per_device_train_batch_size
trainer.max_steps=0 => trainer.max_steps is 0; expected a whole number from 1 to
trainer.max_steps=true => trainer.max_steps is true; expected a whole number
trainer.max_steps=10.0 => trainer.max_steps is 10.0; expected a whole number
trainer.max_steps='"100"' => trainer.max_steps is "100"; .* \(without quotes\)$
trainer.max_steps='"-1"' => trainer.max_steps is "-1"; .* to 2147483647 or null$
trainer.learning_rate=0 => learning_rate is 0; expected a number above 0
trainer.learning_rate=true => learning_rate is true; expected a number above 0
trainer.learning_rate=.nan => learning_rate is NaN; expected a number above 0
trainer.learning_rate=.inf => learning_rate is Infinity; expected a number
trainer.learning_rate= => trainer.learning_rate is null; expected a number above 0, or one
'trainer.learning_rate={towr: 1e-6}' => a number above 0, or one for each part
'trainer.learning_rate={tower: 1, adapter: 1}' => is for tower, adapter, and trained is full; expect
'trainer.learning_rate={adapter: 1}' trained=lora_all => one for each of tower, language_model
trainer.seed=-1 => trainer.seed is -1; expected a whole number from 0 to 4294967295
trainer.seed=4294967296 => trainer.seed is 4294967296; expected a whole number from 0
trainer.save_total_limit=0 => trainer.save_total_limit is 0; expected .* or null
trainer.lr_scheduler_type=cosin => lr_scheduler_type is "cosin"; expected linear, cosine
trainer.dataloader_num_workers='"4"' => num_workers is "4"; .*\(without quotes\)
trainer.dataloader_prefetch_factor=2 trainer.dataloader_num_workers=0 => 0: no worker draws ahead
trainer.adam_beta1=-0.1 => adam_beta1 is -0.1; expected a number from 0 to below 1
trainer.adam_beta2=1.0 => adam_beta2 is 1.0; expected a number from 0 to below 1
trainer.adam_epsilon=0 => adam_epsilon is 0; expected a number above 0
trainer.full_determinism=1 => full_determinism is 1; expected true, false or null
trainer.weight_decai=0.1 => did you mean trainer\.weight_decay\?
trainer.epochs=3 => did you mean trainer\.num_train_epochs\?
trainer.report_to=tensorbord => 'tensorbord', which is no logger .* expected none or tens
trainer.report_to=[clearml] => report_to clearml needs clearml: .*pip install clearml
trainer.save_strategy=steps => save_strategy is steps; expected trainer.save_steps, too
trainer.save_strategy=epoch trainer.save_steps=5 => save_steps is 5; expected one of them
trainer.eval_strategy=steps data.eval=0.1 => eval_strategy is steps; expected trainer.eval_steps, to
trainer.eval_strategy=epoch => eval_strategy epoch needs rows .* expected data.eval
trainer.early_stopping_patience=1 => early_stopping_patience needs rows to evaluate
trainer.early_stopping_patience=1 trainer.eval_strategy=no data.eval=0.1 => with .*eval_strategy no;
trainer.save_strategy=best => save_strategy best needs rows to evaluate on
trainer.load_best_model_at_end=true data.eval=0.1 trainer.save_steps=5 => at 'steps' and evaluated a
trainer.load_best_model_at_end=true data.eval=0.1 trainer.save_steps=5 trainer.eval_steps=2 => every
trainer.metric_for_best_model=exact_match data.eval_answers=0 => exact_match and data.eval_answers i
trainer.output_dir=o => trainer.output_dir is set by the recipe; expected out
trainer.deepspeed=d => expected engine.zero_stage and engine.offload
trainer.bf16= => trainer.bf16 is set by the recipe; expected engine.precision
trainer.optim=adamw => expected engine.optimizer
trainer.gradient_checkpointing=true => expected engine.tower and engine.language
trainer.torch_compile=true => expected engine.compile
trainer.fsdp_config= => cannot be set: the weights are sharded by DeepSpeed: engine.zero_stage
trainer.hub_model_id=m => a model is published by python -m hub_upload
trainer.warmup_ratio=0.1 => expected trainer.warmup_steps, which is a share
trainer.label_smoothing_factor=0.1 => needs the logits of all positions
trainer.ddp_backend=nccl => are the launcher's: --processes
trainer.resume_from_checkpoint=c => expected --resume
learning_rat=1 => learning_rat is not .*; did you mean trainer.learning_rate\?
steps=1 => steps is not a field of a recipe; did you mean trainer.max_steps\?
lr=1 => lr is not a field of a recipe; did you mean trainer.learning_rate\?
no.thing=1 => no is not a field of a recipe; expected model, out, data
model.x=1 => model.x cannot be: model is .*, and no section
engine.compile => "engine.compile" is no assignment; expected field=value
engine..compile=1 => is no assignment
engine.compile=[ => engine.compile: while parsing a flow node
engine.compile=*a => engine.compile: \*a is an alias
'engine={compile: true, compile: true}' => compile is there twice
'engine={zero_stage: 9}' => engine.zero_stage is 9; expected 0, 1, 2 or 3
lora.rank=1 lora.rank=2 => lora.rank is given twice
"""


@pytest.mark.parametrize("line", REFUSED.strip().split("\n"))
def test_it_is_refused_with_what_is_expected(asked, line):
    assignments, _, told = line.partition(" => ")
    with pytest.raises(RecipeError) as error:
        check(asked, shlex.split(assignments), None, "cpu")
    lines = str(error.value).split("\n")
    assert all(each.startswith(("command line: ", f"{asked}:")) for each in lines), lines
    assert any(re.search(told, each) for each in lines), lines
