"""Run transformers' own shared suites on this package's classes: ``run.py SDIST --out FILE.json``.

The sdist of the installed transformers holds ``tests/*.py``; they are unpacked to a temporary
folder and nothing of them stays. What they import from elsewhere in transformers' repository is
not in the sdist: stand-ins are written beside them (:data:`STAND_INS`), or, with ``--checkout``,
it is taken from a checkout of transformers' repository or of a fork, with the suites of generation
and export. What the sdist has stays that of the sdist, so the checkout need only be near.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # the same everywhere: what would be fetched is not there

import pytest  # noqa: E402
import transformers  # noqa: E402
from packaging.version import Version  # noqa: E402

HERE = Path(__file__).parent
SUITES = ("model", "image_processor", "processor", "tokenizer")
PACKAGE = "transformers_tests"  # not "tests", which is ours
CODE = "src/transformers/__init__.py"

# What the shared suites import and the sdist lacks.
STAND_INS = {
    f"{PACKAGE}/generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    f"{PACKAGE}/exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    # Images and sounds of the Hub, which only tests of other modalities load.
    "utils/fetch_hub_objects_for_ci.py": "def url_to_local_path(url):\n    return url\n",
    f"{PACKAGE}/fixtures/sample_text.txt": "A text.\n\nAnother one.\n",
}


class Results:
    """A pytest plugin that notes what became of every test."""

    def __init__(self):
        self.of_test: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report) -> None:
        suite, _, test = report.nodeid.rpartition("/")[2].partition("::")
        name = f"{suite.removeprefix('suite_').removesuffix('.py')}::{test}"
        # A failed subtest is reported before its test, which then passes.
        has_failed = self.of_test.get(name, {}).get("outcome") == "failed"
        if has_failed or (report.when != "call" and report.outcome == "passed"):
            return
        reason = report.longrepr or ""
        if report.outcome == "skipped":
            reason = report.longrepr[2]
        reason = str(getattr(reason, "reprcrash", reason))
        self.of_test[name] = {"outcome": report.outcome, "reason": reason[:500]}


def unpack(sdist: Path, folder: Path, checkout: Path | None) -> None:
    """Make ``folder/transformers_tests`` and ``folder/utils``."""
    with tarfile.open(sdist) as archive:
        # Python before 3.11.4 has no filters; the archive is the package index's.
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        archive.extractall(folder / "sdist")
    (root,) = (folder / "sdist").iterdir()
    if root.name != f"transformers-{transformers.__version__}":
        raise SystemExit(f"{sdist} holds {root.name}, installed is {transformers.__version__}")
    if checkout is not None:
        no_models = shutil.ignore_patterns("models", "__pycache__")
        shutil.copytree(checkout / "tests", folder / PACKAGE, ignore=no_models)
        shutil.copytree(checkout / "utils", folder / "utils")
    shutil.copytree(root / "tests", folder / PACKAGE, dirs_exist_ok=True)
    for name, text in STAND_INS.items():
        if not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    for file in (folder / PACKAGE).rglob("*.py"):  # they call their package "tests"
        text = file.read_text(encoding="utf-8")
        renamed = re.sub(r"(?m)^(\s*(?:from|import) )tests\b", rf"\1{PACKAGE}", text)
        file.write_text(renamed, encoding="utf-8")


def nearest_checkout(folder: Path) -> tuple[Path, str]:
    """Find the checkout of transformers with the version nearest to the installed one.

    Args:
        folder: A checkout, or a folder of checkouts.

    Returns:
        The checkout and its version.

    Raises:
        SystemExit: no checkout has the same major version.
    """
    installed, checkouts = Version(transformers.__version__), {}
    for file in [*folder.glob(CODE), *folder.glob(f"*/{CODE}")]:
        version = Version(re.search('(?m)^__version__ = "(.+)"', file.read_text())[1])
        root = file.parents[2]
        if version.major == installed.major and (root / "tests" / "generation").is_dir():
            checkouts[abs(version.minor - installed.minor), version] = root
    if not checkouts:
        raise SystemExit(
            f"{folder} contains no checkout of transformers {installed.major}: give one"
        )
    nearest = min(checkouts)
    return checkouts[nearest], str(nearest[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("sdist", type=Path)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument(
        "--checkout", type=Path, help="a checkout of transformers, or a folder of several"
    )
    parser.add_argument("--suite", choices=SUITES, nargs="+", default=SUITES)
    options, for_pytest = parser.parse_known_args()
    out = options.out and options.out.resolve()  # the suites run in another folder
    results = Results()
    checkout, of_checkout = None, None
    if options.checkout is not None:
        checkout, of_checkout = nearest_checkout(options.checkout.resolve())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        unpack(options.sdist.resolve(), folder, checkout)
        sys.path[:0] = [str(HERE.parents[1]), str(folder), str(folder / "utils")]
        os.chdir(folder)
        files = [str(HERE / f"suite_{name}.py") for name in options.suite]
        quiet = ["-q", "--tb=short", "-p", "no:cacheprovider", "-c", os.devnull]
        quiet += ["--rootdir", HERE, "--confcutdir", HERE]
        code = pytest.main([*map(str, quiet), "-W", "ignore", *files, *for_pytest], [results])
        os.chdir(HERE)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with {code!r}")
    if out is not None:
        document = {"transformers": transformers.__version__, "generation": of_checkout}
        document["results"] = results.of_test
        out.write_text(json.dumps(document, indent=1) + "\n")
    print(Counter(result["outcome"] for result in results.of_test.values()))


if __name__ == "__main__":
    main()
