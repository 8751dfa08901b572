"""Options of other programs, in a recipe."""

import re

import pytest
import yaml

from glm4v_patched.finetune.other_names import MEANT, NOT_NEEDED, OTHER_VALUES
from glm4v_patched.finetune.recipe import check_values, fields, whole_recipe
from glm4v_patched.finetune.recipe_trainer import INSTEAD

WHOLE = {
    "model": "m",
    "out": "o",
    "data": {"train": "rows.jsonl"},
    "trainer": {"learning_rate": 1e-4, "per_device_train_batch_size": 1},
}
COMMON = "val_size max_samples cutoff_len lora_rank per_device_train_batch_size num_train_epochs"
COMMON += " learning_rate output_dir model_name_or_path dataset template bf16 deepspeed packing"
COMMON += " gradient_checkpointing finetuning_type freeze_vision_tower max_length r lora_alpha"
COMMON += " target_modules lora_target max_seq_length load_in_4bit batch_size warmup_ratio optim"
COMMON += (
    " eval_dataset train_type gradient_accumulation_steps save_steps report_to fp16 flash_attn"
)
COMMON += " fsdp hub_model_id trust_remote_code"


def told(**values) -> str:
    return "\n".join(fault.text for fault in check_values(WHOLE | values).faults)


@pytest.mark.parametrize("name", COMMON.split())
def test_an_option_of_another_program_is_answered_with_what_it_is_here(name):
    assert re.fullmatch(
        rf"{name} is not a field of a recipe; (did you mean .+\?|it is not needed: .+)",
        told(**{name: 1}),
    )


@pytest.mark.parametrize("name", [*MEANT, *INSTEAD])
def test_each_cure_is_a_key_that_a_recipe_takes(name):
    meant = (MEANT | INSTEAD)[name]
    if meant.startswith("--"):
        return  # an option of the command line
    key = re.match(r"[a-z_.]+", meant).group()
    known = dict(fields(whole_recipe()))
    assert key in known, meant
    assert f"did you mean {meant}?" in told(**{name: 1})
    if shown := re.match(r"[a-z_.]+: (\w+\b(?!\.)|0\.05|\{.+?\}|\[.+?\])", meant):
        # Values are those that the field takes, too; others may be refused for what is beside it.
        section, _, field = key.rpartition(".")
        value = yaml.safe_load(shown.group(1))
        given = {section: WHOLE.get(section, {}) | {field: value}} if section else {field: value}
        assert f"{key} is" not in told(**given), told(**given)


@pytest.mark.parametrize("name", NOT_NEEDED)
def test_what_is_not_needed_says_why_and_names_no_key_that_is_not_there(name):
    assert told(**{name: 1}).endswith(f"it is not needed: {NOT_NEEDED[name]}")
    known = dict(fields(whole_recipe()))
    dotted = re.findall(r"\b(?:data|engine|lora|trainer)\.[a-z_]+", NOT_NEEDED[name])
    assert all(key in known for key in dotted)


def test_a_value_of_another_program_is_answered_with_ours():
    for name, values in OTHER_VALUES.items():
        for value, meant in values.items():
            assert told(**{name: value}).endswith(f"; did you mean {meant}?")
            for word in meant.split(" or "):
                assert f"{name} is" not in told(**{name: word})


def test_no_name_stands_in_two_tables_or_is_a_field():
    names = [*MEANT, *NOT_NEEDED, *INSTEAD]
    assert len(names) == len({*names})
    ours = {known.rpartition(".")[2] for known, _ in fields()}
    assert not {*names} & ours
