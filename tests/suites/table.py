"""Renew the tables of docs/suites.md by results of ``run.py``: ``table.py RESULTS.json... --out``.

Exits with 1 if a test fails without a reason in reasons.json, or has one and does not fail.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from fnmatch import fnmatchcase
from pathlib import Path

REASONS = Path(__file__).with_name("reasons.json")
OUTCOMES = ("passed", "failed", "skipped")
BEGIN = "The suites of generation are those of "  # what stands above is written by hand


def reason_for(name: str, version: str, reasons: list[dict]) -> int | None:
    """The index of the reason that ``name`` (suite::class::test) fails for."""
    for index, entry in enumerate(reasons):
        if version in entry.get("transformers", [version]) and any(
            fnmatchcase(name, pattern) for pattern in entry["tests"]
        ):
            return index
    return None


def surprises(document: dict, reasons: list[dict]) -> list[str]:
    """Return a line for each result that differs from reasons.json."""
    version, results = document["transformers"], document["results"]
    if document["generation"] is None:
        reasons = [one for one in reasons if one.get("suite") != "generation"]
    lines = []
    for name, result in results.items():
        is_expected = reason_for(name, version, reasons) is not None
        if result["outcome"] == "failed" and not is_expected:
            lines.append(f"{version}: {name} failed: {result['reason']}")
        if result["outcome"] == "passed" and is_expected:
            lines.append(f"{version}: {name} passed, but reasons.json says that it fails")
    for entry in reasons:
        if version in entry.get("transformers", [version]):
            lines += [
                f"{version}: no test is named {pattern}, for which reasons.json has a reason"
                for pattern in entry["tests"]
                if not any(fnmatchcase(name, pattern) for name in results)
            ]
    return lines


def tables(documents: list[dict], reasons: list[dict]) -> str:
    """Return the page's tables, with columns for every version."""
    counts, failures, skips = defaultdict(Counter), defaultdict(Counter), Counter()
    versions = [document["transformers"] for document in documents]
    for version, document in zip(versions, documents, strict=True):
        for name, result in document["results"].items():
            suite, of_class, _ = name.split("::", 2)
            counts[suite, of_class][version, result["outcome"]] += 1
            index = reason_for(name, version, reasons)
            if result["outcome"] == "failed" and index is not None:
                failures[index][version] += 1
            if result["outcome"] == "skipped":
                skips[result["reason"].removeprefix("Skipped: ").partition("\n")[0]] += 1
    columns = [(version, outcome) for version in versions for outcome in OUTCOMES]
    checkouts = [f"{one['generation'] or 'none'} for {one['transformers']}" for one in documents]
    lines = [f"{BEGIN}checkouts: {', '.join(checkouts)}.", ""]
    lines += ["| suite | rows or part | " + " | ".join(map(" ".join, columns)) + " |"]
    lines.append("|---|---|" + "---:|" * len(columns))
    for (suite, of_class), numbers in counts.items():
        cells = " | ".join(str(numbers[column]) for column in columns)
        lines.append(f"| {suite} | {of_class} | {cells} |")
    lines += ["", "## Failures, and why they are right", ""]
    lines += ["| tests | " + " | ".join(versions) + " | reason |"]
    lines.append("|---|" + "---:|" * len(versions) + "---|")
    for index, entry in enumerate(reasons):
        tests = ", ".join(f"`{pattern.partition('::')[2]}`" for pattern in entry["tests"])
        numbers = " | ".join(str(failures[index][version]) for version in versions)
        lines.append(f"| {tests} | {numbers} | {entry['reason']} |")
    lines += ["", "## Why tests were skipped", ""]
    lines += [f"- {number}: {reason[:150]}" for reason, number in skips.most_common(15)]
    if rest := sum(number for _, number in skips.most_common()[15:]):
        lines.append(f"- {rest}: {len(skips) - 15} more reasons")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    reasons = json.loads(REASONS.read_text())
    documents = [json.loads(path.read_text()) for path in options.results]
    above = options.out.read_text().partition(BEGIN)[0]
    options.out.write_text(above + tables(documents, reasons))
    lines = [line for document in documents for line in surprises(document, reasons)]
    print("\n".join(lines) or "every failure has its reason")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
