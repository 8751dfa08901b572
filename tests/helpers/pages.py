"""The pages for readers, and what stands in them: blocks of code, and commands."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
RESULTS = ROOT / "docs" / "benchmarks" / "README.md"
PAGES = [README, *DOCS, RESULTS]

# In running text a command is known by its first word, and has at least one more.
PROGRAMS = "apt-get|deepspeed|glm4v-patched|nox|pip|pre-commit|pytest|python3?|torchrun"
INLINE = re.compile(rf"`((?:\w+=\S+ |time )*(?:\.venv/bin/)?(?:{PROGRAMS})\s[^`]+)`")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
# Rows of measurements; tests/bench reads each of their commands.
MEASURED = re.compile("<!-- rows of bench -->.*<!-- end of the rows of bench -->", re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in FENCE.findall(page.read_text("utf-8")) if name == language]


def commands(page: Path) -> list[str]:
    """All that a reader is given to run, in the order of the page: whole blocks of Python, then
    lines for a shell."""
    text = MEASURED.sub("", page.read_text("utf-8"))
    python = blocks(page, "python")
    shell = [line for block in blocks(page, "bash") for line in lines_of_shell(block)]
    inline = [" ".join(code.split()) for code in INLINE.findall(FENCE.sub("", text))]
    return [*python, *shell, *inline]


def lines_of_shell(block: str) -> list[str]:
    """Each command, without the comment behind it; a chain of several is taken apart."""
    lines = re.sub(r"\s*\\\n\s*", " ", block).splitlines()
    code = (re.split(r"(?:^|\s{2,})#", line)[0].strip() for line in lines)
    return [part for line in code if line for part in line.split(" && ")]
