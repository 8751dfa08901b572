"""Run other packages' own tests on this package's classes: ``run.py SDIST --out FILE.json``.

The sdist of the installed transformers, peft or accelerate holds ``tests/*.py``; they are unpacked
to a temporary folder and nothing of them stays. A folder PACKAGE-VERSION does, too: TRL's sdist
has no tests. What they import from elsewhere in transformers' repository is not in its sdist:
stand-ins are written beside them (:data:`STAND_INS`), or, with ``--checkout``, it is taken from a
checkout of transformers' repository or of a fork, with the suites of generation, export and
pipelines. What the sdist has stays that of the sdist, so the checkout need only be near.
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
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # the same everywhere: what would be fetched is not there

import pytest  # noqa: E402
from packaging.version import Version  # noqa: E402

HERE = Path(__file__).parent
SUITES = {
    "transformers": ["model", "image_processor", "processor", "tokenizer", "pipelines"],
    "peft": ["peft"],
    "accelerate": ["accelerate"],
    "trl": ["trl"],
}
CODE = "src/transformers/__init__.py"

# What the shared suites of transformers import and the sdist lacks.
STAND_INS = {
    "transformers_tests/generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "transformers_tests/exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    # Images and sounds of the Hub, which only tests of other modalities load.
    "utils/fetch_hub_objects_for_ci.py": "def url_to_local_path(url):\n    return url\n",
    "transformers_tests/fixtures/sample_text.txt": "A text.\n\nAnother one.\n",
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


def unpack(source: Path, folder: Path, checkout: Path | None) -> str:
    """Make ``folder/PACKAGE_tests`` (and, for transformers, ``folder/utils``), return PACKAGE."""
    root = source
    if source.is_file():
        with tarfile.open(source) as archive:
            # Python before 3.11.4 has no filters; the archive is the package index's.
            archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
            archive.extractall(folder / "sdist")
        (root,) = (folder / "sdist").iterdir()
    package, _, package_version = root.name.partition("-")
    if package not in SUITES:
        raise SystemExit(f"{source} holds {root.name}, expected one of {', '.join(SUITES)}")
    if package_version != version(package):
        raise SystemExit(f"{source} holds {root.name}, installed is {version(package)}")
    name = f"{package}_tests"  # not "tests", which is ours
    if checkout is not None:
        no_models = shutil.ignore_patterns("models", "__pycache__")
        shutil.copytree(checkout / "tests", folder / name, ignore=no_models)
        shutil.copytree(checkout / "utils", folder / "utils")
        (folder / "tests").symlink_to(name)  # for images, which they find by this path
    shutil.copytree(root / "tests", folder / name, dirs_exist_ok=True)
    if package == "transformers":
        for file, text in STAND_INS.items():
            if not (folder / file).exists():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text(text)
    for file in (folder / name).rglob("*.py"):  # they call their package "tests"
        text = file.read_text(encoding="utf-8")
        renamed = re.sub(r"(?m)^(\s*(?:from|import) )tests\b", rf"\1{name}", text)
        file.write_text(renamed, encoding="utf-8")
    return package


def nearest_checkout(folder: Path) -> tuple[Path, str]:
    """Find the checkout of transformers with the version nearest to the installed one.

    Args:
        folder: A checkout, or a folder of checkouts.

    Returns:
        The checkout and its version.

    Raises:
        SystemExit: no checkout has the same major version.
    """
    installed, checkouts = Version(version("transformers")), {}
    for file in [*folder.glob(CODE), *folder.glob(f"*/{CODE}")]:
        checkout_version = Version(re.search('(?m)^__version__ = "(.+)"', file.read_text())[1])
        root = file.parents[2]
        if checkout_version.major == installed.major and (root / "tests" / "generation").is_dir():
            difference = abs(checkout_version.minor - installed.minor)
            checkouts[difference, checkout_version] = root
    if not checkouts:
        raise SystemExit(
            f"{folder} contains no checkout of transformers {installed.major}: give one"
        )
    nearest = min(checkouts)
    return checkouts[nearest], str(nearest[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("sdist", type=Path, help="or a folder PACKAGE-VERSION")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument(
        "--checkout", type=Path, help="a checkout of transformers, or a folder of several"
    )
    parser.add_argument("--suite", nargs="+", help="some of a package's suites")
    options, for_pytest = parser.parse_known_args()
    out = options.out and options.out.resolve()  # the suites run in another folder
    results = Results()
    checkout, of_checkout = None, None
    if options.checkout is not None and options.sdist.name.startswith("transformers-"):
        checkout, of_checkout = nearest_checkout(options.checkout.resolve())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        package = unpack(options.sdist.resolve(), folder, checkout)
        sys.path[:0] = [str(HERE.parents[1]), str(folder), str(folder / "utils")]
        os.chdir(folder)
        files = [str(HERE / f"suite_{name}.py") for name in options.suite or SUITES[package]]
        quiet = ["-q", "--tb=short", "-p", "no:cacheprovider", "-c", os.devnull]
        quiet += ["--rootdir", HERE, "--confcutdir", HERE]
        code = pytest.main([*map(str, quiet), "-W", "ignore", *files, *for_pytest], [results])
        os.chdir(HERE)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with {code!r}")
    if out is not None:
        document = {"package": package, "version": version(package), "generation": of_checkout}
        document |= {"transformers": version("transformers"), "results": results.of_test}
        out.write_text(json.dumps(document, indent=1) + "\n")
    print(Counter(result["outcome"] for result in results.of_test.values()))


if __name__ == "__main__":
    main()
