"""Renew the tables of docs/suites.md by results of ``run.py``: ``table.py RESULTS.json... --out``.

Exits with 1 if a test fails without a reason in reasons.json, or has one and does not fail.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import fill

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
    version, results = document["version"], document["results"]
    suites = {name.partition("::")[0] for name in results}
    reasons = [one for one in reasons if one["tests"][0].partition("::")[0] in suites]
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


def cell(numbers: Counter, version: str, outcome: str) -> str:
    """Return a number for a table, or a dash if nothing was run."""
    was_run = any(numbers[version, one] for one in OUTCOMES)
    return str(numbers[version, outcome]) if was_run else "-"


def counts(documents: list[dict]) -> dict[tuple[str, str], Counter]:
    """Return how many tests of each suite and class ended how, with each version."""
    numbers = defaultdict(Counter)
    for document in documents:
        for name, result in document["results"].items():
            suite, of_class, _ = name.split("::", 2)
            numbers[suite, of_class][document["version"], result["outcome"]] += 1
    return numbers


def failures(documents: list[dict], reasons: list[dict]) -> list[str]:
    """Return a table of the reasons that these documents' failures have."""
    versions = [document["version"] for document in documents]
    numbers = defaultdict(Counter)
    for document in documents:
        for name, result in document["results"].items():
            index = reason_for(name, document["version"], reasons)
            numbers[index][document["version"], result["outcome"]] += 1
    lines = ["| tests | " + " | ".join(versions) + " | reason |"]
    lines.append("|---|" + "---:|" * len(versions) + "---|")
    for index, entry in enumerate(reasons):
        if index in numbers:
            tests = ", ".join(f"`{pattern.partition('::')[2]}`" for pattern in entry["tests"])
            cells = " | ".join(cell(numbers[index], version, "failed") for version in versions)
            lines.append(f"| {tests} | {cells} | {entry['reason']} |")
    return lines


def tables(documents: list[dict], reasons: list[dict]) -> str:
    """Return the page's tables: of transformers, with columns for every version, and of others."""
    shared = [one for one in documents if one["package"] == "transformers"]
    others = [one for one in documents if one["package"] != "transformers"]
    versions = [document["version"] for document in shared]
    columns = [(version, outcome) for version in versions for outcome in OUTCOMES]
    checkouts = [f"{one['generation'] or 'none'} for {one['version']}" for one in shared]
    lines = [f"{BEGIN}checkouts: {', '.join(checkouts)}.", ""]
    lines += ["| suite | class | " + " | ".join(map(" ".join, columns)) + " |"]
    lines.append("|---|---|" + "---:|" * len(columns))
    for (suite, of_class), numbers in counts(shared).items():
        cells = " | ".join(cell(numbers, *column) for column in columns)
        lines.append(f"| {suite} | {of_class} | {cells} |")
    lines += ["", "## Failures, and why they are right", "", *failures(shared, reasons)]
    lines += ["", "## peft, accelerate, TRL", ""]
    lines += ["| package | transformers | class | passed | failed | skipped |"]
    lines.append("|---|---|---|---:|---:|---:|")
    for one in others:
        for (_, of_class), numbers in counts([one]).items():
            cells = " | ".join(str(numbers[one["version"], outcome]) for outcome in OUTCOMES)
            package = f"{one['package']} {one['version']}"
            lines.append(f"| {package} | {one['transformers']} | {of_class} | {cells} |")
    together = {name: result for one in others for name, result in one["results"].items()}
    lines += ["", *failures([{"version": "failed", "results": together}], reasons)]
    lines += ["", "## Why tests were skipped", ""]
    skips = Counter(
        result["reason"].removeprefix("Skipped: ").partition("\n")[0]
        for document in documents
        for result in document["results"].values()
        if result["outcome"] == "skipped"
    )
    for reason, number in skips.most_common(15):
        lines.append(fill(f"- {number}: {reason[:150]}", 100, subsequent_indent="  "))
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
