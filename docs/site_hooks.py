"""Pages of the site that stand elsewhere in the repository: README.md and CHANGELOG.md.

The pages are written to be read on GitHub, too, so that links to files outside of ``docs/`` have to
lead to the repository; where none is named (``repo_url``), they become plain code.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ELSEWHERE = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config) -> Files:
    for name, source in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    pages = {Path(name).as_posix() for name in files.src_uris}
    folder = Path(page.file.src_uri).parent

    def fitted(link: re.Match) -> str:
        words, target, anchor = link[1], link[2], link[3] or ""
        path = (ROOT / "docs" / folder / target).resolve()
        if page.file.src_uri in ELSEWHERE and not path.exists():
            path = (ROOT / target).resolve()
        for name, source in ELSEWHERE.items():
            if path == ROOT / source:
                return f"[{words}]({'../' * (len(folder.parts))}{name}{anchor})"
        if (
            path.is_relative_to(ROOT / "docs")
            and path.relative_to(ROOT / "docs").as_posix() in pages
        ):
            return link[0]
        if not path.exists():
            return link[0]  # which mkdocs reports
        relative = path.relative_to(ROOT).as_posix()
        if config.repo_url:
            return f"[{words}]({config.repo_url.rstrip('/')}/blob/main/{relative}{anchor})"
        return words if words.startswith("`") else f"{words} (`{relative}`)"

    return LINK.sub(fitted, markdown)
