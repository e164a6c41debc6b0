"""`python -m benchmarks.several_workers`: writes the page and the picture of the docs again, from their figures."""

from __future__ import annotations

from benchmarks.several_workers.page import DOCS, render

if __name__ == "__main__":
    print(render(DOCS))
