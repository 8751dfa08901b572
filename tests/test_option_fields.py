"""A dataclass that is a section of a recipe gives a command its options, with the same limits."""

import argparse
from dataclasses import fields, make_dataclass

import pytest
from pydantic import TypeAdapter, ValidationError

from glm4v_patched.engine.options import EngineOptions, EngineSection, LoraOptions
from glm4v_patched.option_fields import add_option, find_field_problems, option, to_cli_arguments

SECTION = {"zero_stage": 0, "precision": "fp32", "fp8": True, "tower": "every 2"}
SECTION |= {"compile": False, "offload": True, "memory_limit": 7.5, "zero_hpz_partition_size": 2}


def parse(arguments: list[str]) -> EngineSection:
    parser = argparse.ArgumentParser(exit_on_error=False)
    for field in fields(EngineSection):
        add_option(parser, field)
    return EngineSection(**vars(parser.parse_args(arguments)))


def test_options_ask_for_what_a_recipe_does():
    section = TypeAdapter(EngineSection).validate_python(SECTION)
    assert to_cli_arguments(section)[:2] == ["--zero-stage", "0"] and {"--compile", "false"} <= {
        *to_cli_arguments(section)
    }
    assert parse(to_cli_arguments(section)) == section == EngineSection(**SECTION)
    assert parse([]) == EngineSection()


@pytest.mark.parametrize(
    "name, value",
    [
        ("zero_stage", 4),
        ("zero_stage", True),
        ("tower", "every 0"),
        ("compile", 1),
        ("optimizer", "sgd"),
        ("memory_limit", 0.5),
        ("zero_hpz_partition_size", 0),
        ("may_store_transposed_fp8", False),
    ],
)
def test_what_neither_takes(name, value):
    """The last is an option of the engine that nobody is asked for."""
    with pytest.raises(ValidationError):
        TypeAdapter(EngineSection).validate_python({name: value})
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parse([f"--{name.replace('_', '-')}", str(value)])
    assert name in {field.name for field in fields(EngineOptions)}


@pytest.mark.parametrize(("field", "value"), [("number", 0), ("numbers", (1, 0)), ("word", "")])
def test_0_and_empty_text_are_values_with_limits(field, value):
    options = [("number", int, option(1, "", at_least=1))]
    options += [("numbers", tuple, option((1,), "", at_least=1))]
    options += [("word", str, option("a", "", choices=("a", "b")))]
    make = make_dataclass("Options", options)
    assert [*find_field_problems(make())] == []
    assert len([*find_field_problems(make(**{field: value}))]) == 1


@pytest.mark.parametrize("value", [True, 8.0, "8", 0, 4097])
def test_a_rank_is_a_whole_number_in_its_range(value):
    with pytest.raises(ValidationError):
        TypeAdapter(LoraOptions).validate_python({"rank": value})
