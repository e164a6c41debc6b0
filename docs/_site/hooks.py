"""What MkDocs does with a page before it is shown, and what it writes beside the pages."""

import re
import shutil
from pathlib import Path
from typing import Any

import yaml

_FENCE = re.compile(r"^```(\w+) (?:run|torchrun)$", re.MULTILINE)
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)

MOVED = {
    "reference/preemption.html": "reference/preemption-notices.html",
    "reference/several-workers.html": "reference/workers.html",
    "reference/python/epochs.html": "reference/python/jobs.html",
}
"""Addresses that pages had before, and those that they have now."""

RANKS = {
    "design/": 0.02,
    "internals/": 0.2,
    "coming-from/accelerate.md": 0.9,
    "reference/format.md": 0.5,
    "reference/python/": 0.8,
}
"""How pages rank in the search: what explains decisions comes after what helps users."""

WORDS = yaml.safe_load(Path(__file__).with_name("words.yml").read_text())

_MOVED_PAGE = """<!doctype html><meta charset="utf-8"><title>Moved</title>
<link rel="canonical" href="{0}"><meta http-equiv="refresh" content="0; url={0}">
<a href="{0}">This page has moved.</a>
"""


def on_config(config: Any) -> Any:
    """Lists the pages that the navigation names by a pattern.

    Without an address of the repository, no page has a link to edit it.
    """
    if not config.repo_url:
        config.edit_uri = None
    config.nav = _expand(config.nav, Path(config.docs_dir))
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Sets how the search ranks a page; drops what tests know of a block: `python run`."""
    source = page.file.src_uri
    boost = next((boost for prefix, boost in RANKS.items() if source.startswith(prefix)), 1)
    page.meta["search"] = {"boost": boost}
    if source in WORDS:
        page.meta["tags"] = WORDS[source].split(", ")
    if source == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    if config.repo_url:
        markdown = markdown.replace("git clone ADDRESS", f"git clone {config.repo_url}")
        markdown = markdown.replace("git+ADDRESS", f"git+{config.repo_url}")
    return _FENCE.sub(r"```\1", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Keeps the API's source out of the search, and shows a bar in a table as it is typed.

    GitHub's Markdown needs a backslash before it, which the site's Markdown would show.
    """
    html = re.sub(
        r"<td[^>]*>.*?</td>",
        lambda cell: cell[0].replace("\\|", "|"),
        html,
        flags=re.DOTALL,
    )
    return html.replace(
        '<details class="mkdocstrings-source">',
        '<details class="mkdocstrings-source" data-search-exclude>',
    )


def on_post_build(config: Any) -> None:
    """Writes a page for each old address, and the list of pages for language models."""
    site, docs = Path(config.site_dir), Path(config.docs_dir)
    for old, new in MOVED.items():
        target = "../" * old.count("/") + new
        (site / old).write_text(_MOVED_PAGE.format(target))
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    _list_pages(config.nav, docs, config.site_url or "", lines, ())
    (site / "llms.txt").write_text("\n".join(lines) + "\n")
    for page in docs.rglob("*.md"):
        shutil.copyfile(page, site / page.relative_to(docs))


def _list_pages(
    nav: Any, docs: Path, address: str, lines: list[str], titles: tuple[str, ...]
) -> None:
    """Adds the pages of a part of the navigation, as links to their Markdown."""
    for item in nav:
        for title, value in item.items() if isinstance(item, dict) else [("", item)]:
            if isinstance(value, list):
                lines += ["", f"## {': '.join((*titles, title))}", ""]
                _list_pages(value, docs, address, lines, (*titles, title))
            else:
                heading = _TITLE.search((docs / value).read_text())
                lines.append(
                    f"- [{title or (heading[1] if heading else value)}]({address}{value})"
                )


def _expand(nav: Any, docs: Path) -> Any:
    if isinstance(nav, dict):
        return {title: _expand(value, docs) for title, value in nav.items()}
    if not isinstance(nav, list):
        return nav
    pages: list[Any] = []
    for item in nav:
        if isinstance(item, str) and "*" in item:
            named = {one for one in nav if isinstance(one, str)}
            found = sorted(page.relative_to(docs).as_posix() for page in docs.glob(item))
            pages += [page for page in found if page not in named]
        else:
            pages.append(_expand(item, docs))
    return pages
