"""A built folder loads, answers and trains where there is nothing else of ours.

This runs with every supported transformers, also beside a huggingface_hub that is too old for the
commands.
"""

import transformers

from hub_upload.checks import PASSED
from hub_upload.verify import OF_MODEL, verify


def test_a_build_passes_every_check(built, in_a_process):
    """The last ones in a process that cannot import the package."""
    report = verify(str(built), read_weights=True)
    details = {check.name: check.detail for check in report.checks}
    assert [*details] == OF_MODEL
    assert {check.status for check in report.checks} == {PASSED}, report.as_table()
    assert details["files"].endswith("by size and sha256")
    assert "another image changes logits by" in details["answers"]
    assert "gradients, with activation checkpointing" in details["trains"]
    assert f"transformers {transformers.__version__}, torch" in details["loads"]
