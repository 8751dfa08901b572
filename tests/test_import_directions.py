"""Rooms import each other in one direction, and files in none that leads back."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import glm4v_patched

PACKAGE = Path(glm4v_patched.__file__).parent
# A room imports those before it; files at the root that are no command belong to none.
ROOMS = ["remote", "patch", "engine", "models", "data", "integrations", "inference", "finetune"]
ROOMS += ["demo", "bench", "compare", "doctor", "cli", "run"]
# The rooms that go elsewhere, and what they may import.
ALONE = {"remote": {"remote"}, "patch": {"remote"}, "integrations": {"remote", "patch"}}
# Modules that are imported late, because they need a package or much time, not to break a cycle.
ROOT = {"atomic", "cpu", "option_fields", "paths", "terminal_text", "installed_versions"}
ROOT |= {"__main__", "__init__"}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in PACKAGE.rglob("*.py") if "recipes" not in path.parts}


@cache
def imported_by(module: str) -> set[str]:
    """Modules of the package that a file imports, wherever in it."""
    path, imported = MODULES[module], set()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            parts = package[: len(package) + 1 - node.level]
        elif node.module and node.module.split(".")[0] == PACKAGE.name:
            parts = []
        else:
            continue
        below = (node.module or "").split(".") if node.level else node.module.split(".")[1:]
        base = ".".join([*parts, *filter(None, below)])
        for name in (alias.name for alias in node.names):
            inner = f"{base}.{name}".lstrip(".")
            imported.add(inner if inner in MODULES else base)
    return imported - {module, ""}


def test_rooms_import_in_one_direction():
    wrong = []
    for module in MODULES:
        package = module.partition(".")[0]
        for other in imported_by(module) if package not in ROOT else ():
            to = other.partition(".")[0]
            allowed = ALONE.get(package) or {*ROOMS[: ROOMS.index(package)]}
            if to not in {package} | ROOT | allowed:
                wrong.append(f"{module} imports {other}")
    assert not wrong


def test_no_file_imports_itself_by_way_of_others():
    """Late imports are among them."""
    graph = {module: imported_by(module) & MODULES.keys() for module in MODULES}
    TopologicalSorter(graph).prepare()  # it raises with the circle
