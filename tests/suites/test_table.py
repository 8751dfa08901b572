"""The page of transformers' shared suites: what is not as the reasons say ends the session."""

import json

import pytest

from tests.suites import table

REASONS = [
    {"tests": ["model::Text::test_a_*"], "reason": "It is right so."},
    {"tests": ["model::Text::test_b"], "transformers": ["5.0"], "reason": "Of the new one."},
]


def results(**outcomes: str) -> dict[str, dict]:
    return {
        f"model::Text::test_{name}": {"outcome": outcome, "reason": "Skipped: no GPU"}
        for name, outcome in outcomes.items()
    }


@pytest.mark.parametrize(
    ("version", "outcomes", "surprise"),
    [
        ("4.0", {"a_1": "failed", "a_2": "failed", "b": "passed"}, None),
        ("4.0", {"a_1": "failed", "a_2": "skipped"}, None),
        ("5.0", {"a_1": "failed", "b": "failed"}, None),
        ("4.0", {"a_1": "failed", "b": "failed"}, "test_b failed: Skipped: no GPU"),
        ("4.0", {"a_1": "failed", "a_2": "passed"}, "test_a_2 passed, but reasons.json says"),
        ("5.0", {"a_1": "failed"}, "no test is named model::Text::test_b"),
    ],
)
def test_says_what_is_not_as_expected(version, outcomes, surprise):
    found = table.surprises(version, results(**outcomes), REASONS)
    assert len(found) == (surprise is not None)
    assert surprise is None or surprise in found[0]


def test_every_reason_is_of_a_suite_that_there_is():
    for entry in json.loads(table.REASONS.read_text()):
        assert entry.keys() <= {"tests", "suite", "transformers", "reason"}
        assert entry["reason"].endswith(".")
        for pattern in entry["tests"]:
            suite, of_class, _ = pattern.split("::")
            module = (table.REASONS.parent / f"suite_{suite}.py").read_text()
            assert of_class == "*" or f"class {of_class}(" in module
