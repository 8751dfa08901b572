"""Write docs/suites.md from the results of ``run.py``: ``table.py RESULTS.json... --out FILE.md``.

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

HEAD = """# transformers' own shared suites

transformers tests each of its models with suites that all models share. \
`nox -f tests/noxfile.py -s suites` takes them from the sdist of each end of the supported \
versions and runs them on this package's classes. It also writes this page; it fails if a test \
fails that is not listed below, or if a listed one does not fail any more.

The models' suite runs four times: with rows of text, with an image in every row in the grown \
form, with two, and with the published three ids.

The suites of generation (`GenerationTesterMixin`) and of export (`ExportTesterMixin`) are in \
folders below `tests` of transformers' repository, of which an sdist has only the files directly \
in `tests`. `nox -f tests/noxfile.py -s suites -- --checkout FOLDER` takes them from a checkout of \
the repository or of a fork, whose version need only be near: `FOLDER` is one, or holds some. \
{checkouts}

What the suite of generation is about has tests of this repository's own, in \
`tests/remote/test_generation.py`, `test_generation_modes.py`, `test_caches.py` and \
`test_transformers_interface.py`: greedy search, sampling, beams and sampled beams, each with and \
without a cache and with images; the scores, logits, hidden states, attentions and caches that \
they give; assistant models, early exit and prompt lookup; padding on the left; embeddings in the \
place of ids; going on from a cache; static, quantized and compiled caches; the last logits alone. \
Without a test are offloaded caches, which need a GPU, the rounding of quantized ones, which is \
of other packages, and contrastive search, DoLa, group and constrained beams, which transformers \
4.57 has moved to repositories of the Hub.
"""


def checkouts(documents: list[dict]) -> str:
    """What the suites of generation came from."""
    said = [
        f"{document['transformers']} by a checkout of {document['generation']}"
        for document in documents
        if document["generation"] is not None
    ]
    return f"Below: {', '.join(said)}." if said else "**Below they were not run.**"


def reason_for(name: str, version: str, reasons: list[dict]) -> int | None:
    """The index of the reason that ``name`` (suite::class::test) fails for."""
    for index, entry in enumerate(reasons):
        if version in entry.get("transformers", [version]) and any(
            fnmatchcase(name, pattern) for pattern in entry["tests"]
        ):
            return index
    return None


def surprises(
    version: str, results: dict[str, dict], reasons: list[dict], has_generation: bool = True
) -> list[str]:
    """What is not as reasons.json says."""
    reasons = [one for one in reasons if has_generation or one.get("suite") != "generation"]
    found = []
    for name, result in results.items():
        is_expected = reason_for(name, version, reasons) is not None
        if result["outcome"] == "failed" and not is_expected:
            found.append(f"{version}: {name} failed: {result['reason']}")
        if result["outcome"] == "passed" and is_expected:
            found.append(f"{version}: {name} passed, but reasons.json says that it fails")
    for entry in reasons:
        if version in entry.get("transformers", [version]):
            found += [
                f"{version}: no test is named {pattern}, for which reasons.json has a reason"
                for pattern in entry["tests"]
                if not any(fnmatchcase(name, pattern) for name in results)
            ]
    return found


def page(documents: list[dict], reasons: list[dict]) -> str:
    """The page, with a column for every version."""
    all_results = {document["transformers"]: document["results"] for document in documents}
    counts = defaultdict(Counter)
    failures = defaultdict(Counter)
    skips = Counter()
    for version, results in all_results.items():
        for name, result in results.items():
            suite, of_class, _ = name.split("::", 2)
            counts[suite, of_class, version][result["outcome"]] += 1
            index = reason_for(name, version, reasons)
            if result["outcome"] == "failed" and index is not None:
                failures[index][version] += 1
            if result["outcome"] == "skipped":
                skips[result["reason"].removeprefix("Skipped: ").partition("\n")[0]] += 1
    versions = list(all_results)
    head = [f"{version} {outcome}" for version in versions for outcome in OUTCOMES]
    lines = ["| suite | rows or part | " + " | ".join(head) + " |"]
    lines.append("|---|---|" + "---:|" * len(head))
    for suite, of_class in dict.fromkeys(key[:2] for key in counts):
        numbers = [counts[suite, of_class, v][outcome] for v in versions for outcome in OUTCOMES]
        lines.append(f"| {suite} | {of_class} | " + " | ".join(map(str, numbers)) + " |")
    lines += ["", "## Failures, and why they are right", ""]
    lines += ["| tests | " + " | ".join(versions) + " | reason |"]
    lines.append("|---|" + "---:|" * len(versions) + "---|")
    for index, entry in enumerate(reasons):
        tests = ", ".join(f"`{pattern.partition('::')[2]}`" for pattern in entry["tests"])
        numbers = " | ".join(str(failures[index][version]) for version in versions)
        lines.append(f"| {tests} | {numbers} | {entry['reason']} |")
    lines += ["", "## Why tests were skipped", ""]
    lines += [f"- {number}: {reason[:150]}" for reason, number in skips.most_common(15)]
    if len(skips) > 15:
        rest = sum(number for _, number in skips.most_common()[15:])
        lines.append(f"- {rest}: {len(skips) - 15} more reasons")
    head = HEAD.replace("{checkouts}", checkouts(documents))
    return head + "\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    reasons = json.loads(REASONS.read_text())
    documents = [json.loads(path.read_text()) for path in options.results]
    options.out.write_text(page(documents, reasons))
    found = [
        line
        for one in documents
        for line in surprises(
            one["transformers"], one["results"], reasons, one["generation"] is not None
        )
    ]
    print("\n".join(found) or "every failure has its reason")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
