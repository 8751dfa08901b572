"""What was found, as a table and as JSON."""

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
    """Of one check: ``fails`` is what a training will end with; a warning is what it may end with,
    or what makes it slow. ``cure`` is empty where there is nothing to be done."""

    check: str
    verdict: Literal["ok", "warning", "fails"]
    found: str
    cure: str = ""


def finding_from_error(check: str, verdict: Literal["warning", "fails"], text: str) -> Finding:
    """Of a message as this package's errors are: what is wrong, then ``; expected`` and the cure,
    or a sentence or a command behind a colon."""
    for sign in ("; ", ": "):
        found, divided, cure = text.rpartition(sign)
        if divided and cure.startswith(("expected", "run ", "install ", "download ", "pip ")):
            return Finding(check, verdict, found, cure)
    return Finding(check, verdict, text)


def format_findings(findings: Sequence[Finding], seconds: float) -> str:
    """What will fail comes last, where it is read first."""
    order = (OK, WARNING, FAILS)
    ordered = sorted(findings, key=lambda each: order.index(each.verdict))
    width = max(len(each.check) for each in findings)
    lines = []
    for each in ordered:
        start = f"{each.verdict:<8}{each.check:<{width}}  "
        lines += _wrapped(start, each.found)
        if each.cure:
            # In one line: often it is a command to be copied.
            lines.append(" " * (len(start) - 2) + "> " + each.cure)
    failing = sum(each.verdict == FAILS for each in findings)
    warnings = sum(each.verdict == WARNING for each in findings)
    lines.append(
        f"{len(findings)} checks in {seconds:.1f} s: {failing} will fail, "
        f"{warnings} warning{'' if warnings == 1 else 's'}"
    )
    return "\n".join(lines)


def _wrapped(start: str, text: str) -> list[str]:
    width = max(TABLE_WIDTH - len(start), 40)
    lines: list[str] = []
    for line in text.splitlines():
        # A path stays whole, so that it can be copied.
        lines += textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
    first, *others = lines or [""]
    return [start + first, *(" " * len(start) + line for line in others)]


def findings_to_json(findings: Sequence[Finding], seconds: float) -> str:
    return json.dumps(
        {
            "fails": any(each.verdict == FAILS for each in findings),
            "seconds": round(seconds, 2),
            "findings": [asdict(each) for each in findings],
        },
        indent=2,
        ensure_ascii=False,
    )
