"""mkdocs hooks: add README in both languages and CHANGELOG.md to the site, and adapt links.

The pages are written to be read on GitHub as well. Links and images inside of ``docs/`` are made
relative to the page of the site. Links to files outside of ``docs/`` lead to the repository, or
become plain code if none is named (``repo_url``).
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
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config) -> Files:
    for name in ELSEWHERE:
        text = source(name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    included = [file.src_uri for file in files if file.inclusion.is_included()]
    pages = {source(name): name for name in included}

    def adapt(link: re.Match) -> str:
        words, target, anchor = link[1], link[2], link[3] or ""
        path = (source(page.file.src_uri).parent / target).resolve()
        if path in pages:
            folder = posixpath.dirname(page.file.src_uri)
            return f"[{words}]({posixpath.relpath(pages[path], folder)}{anchor})"
        if not path.exists():
            return link[0]  # mkdocs reports it
        relative = path.relative_to(ROOT).as_posix()
        if config.repo_url:
            return f"[{words}]({config.repo_url.rstrip('/')}/blob/main/{relative}{anchor})"
        return words if words.startswith("`") else f"{words} (`{relative}`)"

    return LINK.sub(adapt, markdown)


def source(name: str) -> Path:
    """Return the path in the repository of a page of the site."""
    return ROOT / ELSEWHERE.get(name, f"docs/{name}")
