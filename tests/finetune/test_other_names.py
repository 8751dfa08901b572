"""Options of other programs, in a recipe."""

import re

from glm4v_patched.finetune.other_names import MEANT, NOT_NEEDED, OTHER_VALUES
from glm4v_patched.finetune.recipe import check_values, fields


def told(**values) -> str:
    trainer = {"learning_rate": 1e-4, "per_device_train_batch_size": 1}
    whole = {"model": "m", "out": "o", "data": {"train": "d"}, "trainer": trainer}
    return "\n".join(fault.text for fault in check_values(whole | values).faults)


def test_each_cure_is_a_key_that_a_recipe_takes_or_says_why_none_is_needed():
    known = dict(fields())
    for name, meant in MEANT.items():
        assert told(**{name: 1}) == f"{name} is not a field of a recipe; did you mean {meant}?"
        key = re.match(r"[a-z_.]+|--", meant).group()
        assert key == "--" or key in known, meant  # -- of the command line
    for name, why in NOT_NEEDED.items():
        assert told(**{name: 1}).endswith(f"it is not needed: {why}")
        assert {*re.findall(r"\b(?:data|engine|lora|trainer)\.[a-z_]+", why)} <= {*known}


def test_a_value_of_another_program_is_answered_with_ours():
    for name, values in OTHER_VALUES.items():
        for value, meant in values.items():
            assert told(**{name: value}).endswith(f"; did you mean {meant}?")
            assert all(f"{name} is" not in told(**{name: w}) for w in meant.split(" or "))
