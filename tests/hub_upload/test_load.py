"""A built folder loads, answers and trains where there is nothing else of ours.

This runs with every supported transformers, also beside a huggingface_hub that is too old for the
commands.
"""

import transformers

from hub_upload.checks import CHECKS, PASSED
from hub_upload.load_check import STEPS
from hub_upload.verify import verify


def test_a_build_passes_every_check(built, in_a_process):
    """The last ones in a process that cannot import the package."""
    report = verify(str(built), check_weights=True)
    details = {check.name: check.detail for check in report.checks}
    assert [*details] == [*CHECKS, "rebuilt", "parameters", *STEPS, "versions"]
    *checks, versions = report.checks
    assert {check.status for check in checks} == {PASSED}, report.as_table()
    assert "sha256 compared" in details["weights"]
    assert "another picture changes logits by" in details["answers"]
    assert "gradients, with activation checkpointing" in details["trains"]
    # One interpreter has one end of the range, or none.
    assert transformers.__version__ in versions.detail and "give --python PATH" in versions.detail
