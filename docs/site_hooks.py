"""mkdocs hooks: add README in both languages and CHANGELOG.md to the site, and adapt links.

The pages are written to be read on GitHub as well. Links and images inside of ``docs/`` are made
relative to the page of the site, and links to files outside of it lead to the repository. Both
addresses are pyproject.toml's.

For readers that are programs, each page is also there as Markdown (``training.md`` beside
``training/``), except those that are made of docstrings, and ``llms.txt`` (https://llmstxt.org)
lists them.
"""

import posixpath
import re
import tomllib
from pathlib import Path

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "index.md": "README.md",
    "zh/index.md": "README.zh-CN.md",
    "changelog.md": "CHANGELOG.md",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ROLE = re.compile(r":(?:func|class|meth|attr|data|mod|exc):(?=<code>)")
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)")


markdown_of_pages: dict[str, str] = {}


@event_priority(100)  # before mike, which appends the version to site_url
def on_config(config):
    config.site_url, config.repo_url = PROJECT["urls"]["Documentation"], PROJECT["urls"]["Homepage"]
    config.repo_name = config.repo_url.removeprefix("https://github.com/")
    return config


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
        return f"[{words}]({config.repo_url}/blob/main/{relative}{anchor})"

    adapted = LINK.sub(adapt, markdown)
    if "\n::: " not in adapted:
        markdown_of_pages[page.file.src_uri] = adapted
    return adapted


def on_page_content(html: str, **_) -> str:
    """Remove Sphinx's roles, which mkdocstrings shows as they are."""
    return ROLE.sub("", html)


def on_post_build(config) -> None:
    """Write the pages as Markdown, and ``llms.txt``, in the order of the navigation."""
    site = Path(config.site_dir)
    for name, markdown in markdown_of_pages.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(markdown, encoding="utf-8")
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section in config.nav:
        [(title, entries)] = section.items()
        lines += [f"## {title}", "", *_entries(title, entries, config.site_url), ""]
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def _entries(title: str, entries, site_url: str) -> list[str]:
    """Return a line for each page of a part of the navigation: its title, address and heading."""
    if isinstance(entries, str):
        markdown = markdown_of_pages.get(entries)
        address = entries if markdown else entries.removesuffix(".md") + "/"
        heading = re.search(r"^# (.*)", markdown or "", re.M)
        about = f": {heading[1]}" if heading and heading[1] != title else ""
        return [f"- [{title}]({site_url}{address}){about}"]
    items = [entry if isinstance(entry, dict) else {title: entry} for entry in entries]
    return [line for item in items for pair in item.items() for line in _entries(*pair, site_url)]


def source(name: str) -> Path:
    """Return the path in the repository of a page of the site."""
    return ROOT / ELSEWHERE.get(name, f"docs/{name}")
