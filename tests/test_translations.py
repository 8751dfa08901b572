"""The Chinese pages have the code, figures, tables, links and levels of headings of the English."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.pages import FENCE, README, ROOT

CHINESE = ROOT / "README.zh-CN.md"
PAIRS = {README: CHINESE} | {
    page.parents[1] / page.name: page for page in sorted((ROOT / "docs" / "zh").glob("*.md"))
}
COUNTERPART = PAIRS | {chinese: english for english, chinese in PAIRS.items()}
HEADING = re.compile(r"^(?=#+ )", re.M)
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\((?P<target>[^)#]*)(?:#[^)]*)?\)")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def sections(page: Path) -> list[str]:
    return HEADING.split(FENCE.sub("", page.read_text(encoding="utf-8")))[1:]


def code_in_text(section: str) -> Counter:
    return Counter(" ".join(code.split()) for code in CODE.findall(section))


def figures(section: str) -> Counter:
    return Counter(NUMBER.findall(LINK.sub("]", CODE.sub("", section))))


def rows_of_tables(section: str) -> list[tuple[int, Counter, Counter]]:
    """Return for each row the number of cells, the code and the figures."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [(CODE.sub("", row).count("|"), code_in_text(row), figures(row)) for row in lines]


def links(section: str, page: Path) -> Counter:
    """Return links to the Web as they are, and links to files as paths in the repository."""
    targets = [link["target"] for link in LINK.finditer(CODE.sub("", section))]
    return Counter(to if ":" in to else (page.parent / to).resolve() for to in targets if to)


def links_in_chinese(section: str, page: Path) -> Counter:
    """Return the links of an English section, each to the Chinese page if there is one."""
    targets = links(section, page)
    return Counter({COUNTERPART.get(to, to): times for to, times in targets.items()})


@pytest.mark.parametrize("page", PAIRS, ids=lambda page: page.name)
def test_a_translated_page_says_the_same(page):
    english, chinese = page, PAIRS[page]
    blocks = [FENCE.findall(file.read_text(encoding="utf-8")) for file in (english, chinese)]
    assert blocks[1] == blocks[0]
    of_english, of_chinese = sections(english), sections(chinese)
    levels = [[section.split()[0] for section in of_page] for of_page in (of_english, of_chinese)]
    assert levels[1] == levels[0]
    for ours, theirs in zip(of_english, of_chinese, strict=True):
        name = theirs.splitlines()[0]
        assert code_in_text(theirs) == code_in_text(ours), name
        assert figures(theirs) == figures(ours), name
        assert rows_of_tables(theirs) == rows_of_tables(ours), name
        assert links(theirs, chinese) == links_in_chinese(ours, english), name
