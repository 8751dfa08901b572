"""Findings of the checks, and their formats: a text table and JSON."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

OK: Final = "ok"
WARNING: Final = "warning"
FAILS: Final = "fails"
TABLE_WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        check: Name of the check.
        verdict: ``fails`` if training will fail; ``warning`` if it may fail or will be slow.
        detail: What was found.
        cure: What to do about it; empty if there is nothing to do.
    """

    check: str
    verdict: Literal["ok", "warning", "fails"]
    detail: str
    cure: str = ""


def finding_from_error(check: str, verdict: Literal["warning", "fails"], message: str) -> Finding:
    """Split an error message of this package into detail and cure.

    The cure follows the last ``; `` or ``: `` if it begins with "expected" or with a command.
    """
    for separator in ("; ", ": "):
        detail, matched, cure = message.rpartition(separator)
        if matched and cure.startswith(("expected", "run ", "install ", "download ", "pip ")):
            return Finding(check, verdict, detail, cure)
    return Finding(check, verdict, message)


def format_findings(findings: Sequence[Finding], seconds: float) -> str:
    """Format findings as a table. Failures come last, where users of a terminal see them first.

    Args:
        seconds: How long the checks took.
    """
    order = (OK, WARNING, FAILS)
    ordered = sorted(findings, key=lambda finding: order.index(finding.verdict))
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in ordered:
        prefix = f"{finding.verdict:<8}{finding.check:<{width}}  "
        lines += _wrap(prefix, finding.detail)
        if finding.cure:
            # Never wrapped: often it is a command to be copied.
            lines.append(" " * (len(prefix) - 2) + "> " + finding.cure)
    failing = sum(finding.verdict == FAILS for finding in findings)
    warnings = sum(finding.verdict == WARNING for finding in findings)
    lines.append(
        f"{len(findings)} checks in {seconds:.1f} s: {failing} will fail, "
        f"{warnings} warning{'' if warnings == 1 else 's'}"
    )
    return "\n".join(lines)


def _wrap(prefix: str, text: str) -> list[str]:
    """Wrap a text after a prefix, and indent the other lines by the length of the prefix."""
    width = max(TABLE_WIDTH - len(prefix), 40)
    lines: list[str] = []
    for line in text.splitlines():
        # Paths are not broken, so that they can be copied.
        lines += textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
    first, *others = lines or [""]
    return [prefix + first, *(" " * len(prefix) + line for line in others)]


def findings_to_json(findings: Sequence[Finding], seconds: float) -> str:
    """Return findings as JSON: ``fails`` (whether any does), ``seconds`` and ``findings``."""
    return json.dumps(
        {
            "fails": any(finding.verdict == FAILS for finding in findings),
            "seconds": round(seconds, 2),
            "findings": [asdict(finding) for finding in findings],
        },
        indent=2,
        ensure_ascii=False,
    )
