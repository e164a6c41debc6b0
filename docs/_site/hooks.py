"""What MkDocs does with a page before it is shown."""

import re
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"^```(\w+)[^\n`]*$", re.MULTILINE)
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Lists the pages that the navigation names by a pattern."""
    config.nav = _expand(config.nav, Path(config.docs_dir))
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Drops the words that tell the tests how to run a block: `python run`."""
    return _FENCE.sub(r"```\1", markdown)


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
