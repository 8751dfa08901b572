"""A built folder loads, answers and trains where there is nothing else of ours.

This runs with every supported transformers, also beside a huggingface_hub that is too old for the
commands.
"""

from hub_upload.load_check import STEPS
from hub_upload.verify import CHECKS, PASSED, verify


def test_a_build_passes_every_check(built):
    """The last ones in a process that cannot import the package."""
    report = verify(str(built), check_weights=True)
    details = {check.name: check.detail for check in report.checks}
    assert [*details] == [*CHECKS, "parameters", *STEPS]
    assert {check.status for check in report.checks} == {PASSED}, report.as_table()
    assert "sha256 compared" in details["weights"]
    assert "another picture changes logits by" in details["answers"]
    assert "gradients, with activation checkpointing" in details["trains"]
