"""Pages of the site that stand elsewhere in the repository: README in both languages, CHANGELOG.md.

The pages are written to be read on GitHub, too, so that links to files outside of ``docs/`` have to
lead to the repository; where none is named (``repo_url``), they become plain code.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "index.md": "README.md",
    "zh/index.md": "README.zh-CN.md",
    "changelog.md": "CHANGELOG.md",
}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config) -> Files:
    for name in ELSEWHERE:
        text = source(name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    there = [file.src_uri for file in files if file.inclusion.is_included()]
    pages = {source(name): name for name in there}

    def fitted(link: re.Match) -> str:
        words, target, anchor = link[1], link[2], link[3] or ""
        path = (source(page.file.src_uri).parent / target).resolve()
        if path in pages:
            folder = posixpath.dirname(page.file.src_uri)
            return f"[{words}]({posixpath.relpath(pages[path], folder)}{anchor})"
        if not path.exists():
            return link[0]  # which mkdocs reports
        relative = path.relative_to(ROOT).as_posix()
        if config.repo_url:
            return f"[{words}]({config.repo_url.rstrip('/')}/blob/main/{relative}{anchor})"
        return words if words.startswith("`") else f"{words} (`{relative}`)"

    return LINK.sub(fitted, markdown)


def source(name: str) -> Path:
    """Where in the repository a page of the site stands."""
    return ROOT / ELSEWHERE.get(name, f"docs/{name}")
