"""The scripts of docs/upstream end as their pages say, today and with the proposed change."""

import importlib.util
import re
import subprocess
import sys

import pytest

from docs.upstream.reproduce import HERE, SCRIPTS
from tests.helpers.pages import ROOT

README = (HERE / "README.md").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_its_text_a_row_and_a_page(name):
    text = (HERE / f"{name}.md").read_text()
    assert all(f"**{part}" in text for part in ("Title:", "Versions:", "Proposed change."))
    assert re.search(r"^```diff\n--- a/(\S+)\n\+\+\+ b/\1$", text, re.MULTILINE)
    row = rf"^\| (\S+) ([\d.]+) \| \[.*\]\({name}\.md\) \| `{name}` \|"
    [(project, version)] = re.findall(row, README, re.MULTILINE)
    assert f"{project} {version}" in text, "README names another version than the text"
    assert f"upstream/{name}.md" in (ROOT / "mkdocs.yml").read_text()


def test_a_changed_package_is_a_copy(tmp_path, monkeypatch):
    installed, script = tmp_path / "site" / "a_package", tmp_path / "texts"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("value = 1\n")
    (installed / "other.py").write_text("value = 3\n")
    script.mkdir()
    (script / "a.py").write_text(
        "import sys, a_package, a_package.other\nsys.exit(a_package.value != 2)"
    )
    diff = "--- a/a_package/__init__.py\n+++ b/a_package/__init__.py\n@@ -1 +1 @@\n-value = {}\n"
    ends = {}
    for old in ("1", "5"):  # as it is installed, and as it was in another release
        (script / "a.md").write_text(f"```diff\n{diff.format(old)}+value = 2\n```\n")
        for option in ([], ["--with-change"]):
            source = f"from docs.upstream import reproduce as r; r.HERE = r.Path({str(script)!r})"
            source += "; r.SCRIPTS = ['a']; r.main()"
            command = [sys.executable, "-c", source, "a", *option]
            monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{installed.parent}")
            ends[old, bool(option)] = subprocess.run(command, capture_output=True).returncode
    assert ends == {("1", False): 1, ("1", True): 0, ("5", False): 1, ("5", True): 2}
    assert (installed / "__init__.py").read_text() == "value = 1\n"


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize("with_change", [False, True], ids=["today", "with the change"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_as_its_text_says(name, with_change):
    text = (HERE / f"{name}.md").read_text()
    package = re.search(r"^--- a/(\w+)/", text, re.MULTILINE)[1]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: nox -f tests/noxfile.py -s upstream")
    command = [sys.executable, str(HERE / "reproduce.py"), name, *["--with-change"] * with_change]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    if done.returncode == 2 and "this CPU has no" in done.stdout:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == (0 if with_change else 1), done.stdout + done.stderr
    blocks = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    if blocks:  # its last line; those before may have losses, or versions
        assert done.stdout.splitlines()[-1] == blocks[with_change].splitlines()[-1]
