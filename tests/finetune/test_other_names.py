"""Options of other programs, in a recipe."""

import re

from glm4v_patched.finetune.other_names import MEANT, NOT_NEEDED, OTHER_VALUES
from glm4v_patched.finetune.recipe import check_values, fields, whole_recipe
from glm4v_patched.finetune.recipe_trainer import INSTEAD


def told(**values) -> str:
    trainer = {"learning_rate": 1e-4, "per_device_train_batch_size": 1}
    whole = {"model": "m", "out": "o", "data": {"train": "d"}, "trainer": trainer}
    return "\n".join(fault.text for fault in check_values(whole | values).faults)


def test_each_cure_is_a_key_that_a_recipe_takes():
    for name, meant in (MEANT | INSTEAD).items():
        assert told(**{name: 1}) == f"{name} is not a field of a recipe; did you mean {meant}?"
        key = re.match(r"[a-z_.]+|--", meant).group()
        assert key == "--" or key in dict(fields(whole_recipe())), meant  # -- of the command line


def test_what_is_not_needed_says_why_and_names_no_key_that_is_not_there():
    for name, why in NOT_NEEDED.items():
        assert told(**{name: 1}).endswith(f"it is not needed: {why}")
        dotted = re.findall(r"\b(?:data|engine|lora|trainer)\.[a-z_]+", why)
        assert {*dotted} <= {*dict(fields(whole_recipe()))}


def test_a_value_of_another_program_is_answered_with_ours():
    for name, values in OTHER_VALUES.items():
        for value, meant in values.items():
            assert told(**{name: value}).endswith(f"; did you mean {meant}?")
            assert all(f"{name} is" not in told(**{name: w}) for w in meant.split(" or "))
