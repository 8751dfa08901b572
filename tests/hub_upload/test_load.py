"""A built folder loads, answers and trains without our package.

This runs with every supported transformers, also beside a huggingface_hub that is too old for the
commands.
"""

import transformers

from hub_upload.checks import PASSED
from hub_upload.verify import verify


def test_a_build_passes_every_check(built, in_a_process):
    """The last checks run in a process that cannot import the package."""
    report = verify(str(built), read_weights=True)
    details = {check.name: check.detail for check in report.checks}
    assert [*details] == ["files", "weights", "loads"]
    assert {check.status for check in report.checks} == {PASSED}, report.as_table()
    assert details["weights"].endswith("by size and sha256")
    assert "another image changes the logits by" in details["loads"]
    assert "gradients, with activation checkpointing" in details["loads"]
    assert f"transformers {transformers.__version__}, torch" in details["loads"]
