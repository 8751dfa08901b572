"""Run a script of this folder, with a package as it is installed or with the text's change.

``python docs/upstream/reproduce.py bitsandbytes_strides`` runs ``bitsandbytes_strides.py``.
With ``--with-change``, the script imports a copy of the package to which the ``diff`` blocks of
``bitsandbytes_strides.md`` were applied. The installed package stays as it is. The exit status is 1
if the bug is there, 0 if it is not, and 2 if the script could not find out.
"""

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import traceback
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = sorted(path.stem for path in HERE.glob("*.py") if path.with_suffix(".md").exists())


def copy_with_change(text: str, folder: Path) -> None:
    """Copy the packages that the diffs of a text change to ``folder``, and apply the diffs.

    Raises ``CalledProcessError`` if a diff does not fit the installed version.
    """
    diff = "".join(re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    for name in re.findall(r"^--- a/(\S+)$", diff, re.MULTILINE):
        package = Path(name).parts[0]
        spec = find_spec(package)
        assert spec and spec.submodule_search_locations, f"{package} is not installed"
        source = Path(spec.submodule_search_locations[0]).absolute()
        if not (folder / package).exists():
            # Only what is changed is copied; large libraries are not.
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / package, ignore=ignored, copy_function=os.symlink)
        (folder / name).unlink()
        shutil.copyfile(source.parent / name, folder / name)
    # git would skip files of a folder that lies inside a repository.
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(["git", "apply"], input=diff, text=True, cwd=folder, env=outside, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=SCRIPTS)
    parser.add_argument(
        "--with-change", action="store_true", help="apply the text's diff to a copy"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            if options.with_change:
                copy_with_change((HERE / f"{options.name}.md").read_text(), Path(folder).resolve())
                sys.path.insert(0, folder)
            runpy.run_path(str(HERE / f"{options.name}.py"), run_name="__main__")
        except Exception:
            traceback.print_exc()
            sys.exit(2)


if __name__ == "__main__":
    main()
