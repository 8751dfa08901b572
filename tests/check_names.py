"""Check names, docstrings and commit subjects: ``python tests/check_names.py`` (part of lint).

Reports top-level classes and functions of the package that are defined in two files, local
variables and parameters whose names say nothing about their content, docstrings that do not begin
with a verb or a noun, and subjects of commits above 72 characters. Exits with 1 if it reports any.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("glm4v_patched", "hub_upload")
EVERYWHERE = (*PRODUCT, "tests", "docs", ".github")

# Participles, prepositions and pronouns: they hide what a value is.
BANNED_LOCALS = {
    *str.split(
        "told found given each of grown held drawn asked shown said meant kept got had made those "
        "these this that here there which whose room stood taken"
    )
}
BANNED_OPENINGS = {*str.split("Of What That Those These This Whose Who Which With By In For")}

# Defined in several files on purpose.
SAME_NAME_ALLOWED = {
    "main": "the entry point of a command or process",
    "run": "the entry point of a command's module",
    "add_arguments": "the options of a command's module",
    "register": "the entry point that a framework calls",
    "GLM4VForCausalLM": "vLLM finds a class by the architecture's name",
    "GLM4VTemplate": "a template in ms-swift and in LLaMA-Factory",
}
# Each kernel has a reference of the same name there.
REFERENCE = "glm4v_patched/engine/kernels/reference.py"
KERNELS = "glm4v_patched/engine/kernels/"

MAX_SUBJECT = 72
FIRST_CHECKED_COMMIT = "391e5473"  # subjects before it are as they are


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def names_defined_twice() -> Iterator[str]:
    files = defaultdict(list)
    for path in python_files(*PRODUCT):
        relative = str(path.relative_to(ROOT))
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != "_":
                files[node.name].append(relative)
    for name, paths in sorted(files.items()):
        if name in SAME_NAME_ALLOWED or len(set(paths)) < 2:
            continue
        if REFERENCE in paths and all(path.startswith(KERNELS) for path in paths):
            continue
        yield f"{name} is defined in {', '.join(paths)}: give each its own name"


def banned_locals(path: Path, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        else:
            continue
        if name in BANNED_LOCALS:
            yield f"{path}:{node.lineno}: {name!r} does not say what it contains"


def banned_openings(path: Path, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            first = (ast.get_docstring(node) or "").split(" ", 1)[0].rstrip(",:")
            if first in BANNED_OPENINGS:
                line = getattr(node, "lineno", 1)
                yield f"{path}:{line}: the docstring begins with {first!r}; begin with a verb"


def long_subjects() -> Iterator[str]:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    if not (ROOT / ".git").exists():
        return
    commits = git("rev-list", "HEAD").split()
    first = next((commit for commit in commits if commit.startswith(FIRST_CHECKED_COMMIT)), None)
    if first is None:  # a shallow clone
        return
    for line in git("log", "--format=%h %s", f"{first}..HEAD").splitlines():
        commit, subject = line.split(" ", 1)
        if len(subject) > MAX_SUBJECT:
            yield f"commit {commit}: its subject has {len(subject)} characters, of {MAX_SUBJECT}"


def main() -> int:
    problems = [*names_defined_twice(), *long_subjects()]
    for path in python_files(*EVERYWHERE):
        tree, relative = ast.parse(path.read_text("utf-8")), path.relative_to(ROOT)
        problems += banned_locals(relative, tree)
        if str(relative).startswith(PRODUCT):
            problems += banned_openings(relative, tree)
    print("\n".join(problems) or "names, docstrings and subjects are as they should be")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
