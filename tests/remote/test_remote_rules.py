"""The files that go to the Hub obey its loader: read as text, so checked as text."""

import ast
import sys
from pathlib import Path

import pytest

import glm4v_patched.remote

REMOTE = Path(glm4v_patched.remote.__file__).parent
FILES = sorted(path for path in REMOTE.glob("*.py") if path.name != "__init__.py")
ENTRIES = ["modeling_chatglm.py", "processing_chatglm.py"]
# torch, transformers, and what transformers itself requires.
ALLOWED = {"torch", "transformers", "numpy", "tokenizers", "packaging"}
STANDARD = set(sys.stdlib_module_names)


def imports(path: Path) -> list[ast.stmt]:
    """All imports except those of PIL, which are conditional."""
    tree = ast.parse(path.read_text("utf-8"))
    guarded = [
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "is_vision_available()"
        for node in branch.body
    ]
    assert {name.name.split(".")[0] for node in guarded for name in node.names} <= {"PIL"}
    kinds = (ast.Import, ast.ImportFrom)
    return [n for n in ast.walk(tree) if isinstance(n, kinds) and n not in guarded]


def siblings(path: Path) -> set[str]:
    return {f"{node.module}.py" for node in imports(path) if getattr(node, "level", 0)}


def closure(path: Path) -> set[str]:
    names, todo = set(), [path.name]
    while todo:
        for name in siblings(REMOTE / todo.pop()) - names:
            names.add(name)
            todo.append(name)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_only_siblings_torch_and_what_transformers_requires_are_imported(path):
    assert "glm4v_patched" not in path.read_text("utf-8")  # the package is never named
    for node in imports(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            # `from . import x`, `from ..x` and `from .a.b` are not seen by the loader.
            assert node.level == 1 and node.module and "." not in node.module
            continue
        names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        assert {name.split(".")[0] for name in names} <= ALLOWED | STANDARD


def test_an_entry_file_imports_all_it_needs_itself_and_every_file_is_needed():
    reached = set(ENTRIES)
    for entry in ENTRIES:
        # transformers 4.57 copies only the direct imports of a local folder's entry file.
        assert siblings(REMOTE / entry) == closure(REMOTE / entry)
        reached |= closure(REMOTE / entry)
    assert reached == {path.name for path in FILES}
