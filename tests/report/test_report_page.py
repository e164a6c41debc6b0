"""The page about a run: real runs, names that are not to be trusted, and a real browser."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.events import Clocked, Committed
from holdfast.report.charts import choose_ticks, draw_points, draw_timeline, thin
from holdfast.report.facts import read_facts
from holdfast.report.page import render_page
from holdfast.storage import LocalStorage

EVIL = "<script>alert(1)</script>"


class Page(HTMLParser):
    """What a browser makes of a page: its tags with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


TRAIN = """
import os, sys
import numpy as np
import holdfast
with holdfast.resumable(sys.argv[1], w=np.zeros(8), save_every=20, quiet=True) as run:
    for step, _ in zip(run.steps(100), run.batches(range(1000))):
        run.report(**{"loss": 1 / (1 + step), "<script>alert(1)</script>": float(step)})
        if step == 30:
            run.warn("<img src=x onerror=alert(1)>")
        if step == int(sys.argv[2]):
            run.manager.wait()
            os.kill(os.getpid(), int(sys.argv[3]))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run of three starts: one was killed, one was asked to leave. Its name is for a browser to trip over."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    name = "runs/<b>a & 'b'"
    for step, number in ((50, signal.SIGKILL), (75, signal.SIGTERM), (-1, 0)):
        subprocess.run([sys.executable, "train.py", name, str(step), str(int(number))], check=False)
    return name


def report(run: str, *words: str) -> str:
    subprocess.run([sys.executable, "-m", "holdfast", "report", run, "-o", "page.html", *words], check=True)
    return Path("page.html").read_text()


def test_the_page_of_a_run_says_what_happened_and_runs_nothing(run: str) -> None:
    page = Page(report(run))
    allowed = {
        *("html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "p", "div", "b", "i", "span", "br"),
        *("svg", "rect", "line", "text", "circle", "polyline", "table", "thead", "tbody", "tr", "th", "td", "code"),
    }
    assert {tag for tag, _ in page.tags} <= allowed
    assert not [
        key for _, attributes in page.tags for key in attributes if key.startswith("on") or key in ("src", "href")
    ]
    policies = [attributes["content"] for tag, attributes in page.tags if attributes.get("http-equiv")]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]
    for text in (
        run,
        "Where the time went",
        EVIL,
        "<img src=x onerror=alert(1)>",
        "died",
        "SIGTERM was sent",
    ):
        assert text in page.text, text
    # What is copied into a shell names the run, and nothing else.
    assert """holdfast rollback 'runs/<b>a & '"'"'b'"'"'@100'""" in page.text
    assert sum(tag == "rect" for tag, _ in page.tags) > 6


def test_the_page_is_written_to_the_output_for_a_dash(run: str) -> None:
    command = [sys.executable, "-m", "holdfast", "report", run, "-o", "-"]
    page = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert not Path("-").exists()


def test_a_notebook_shows_the_run_in_a_frame_of_its_own(tmp_path: Path) -> None:
    with hf.resumable(tmp_path / "run", w=np.zeros(3), save_every=5, quiet=True, preemption="off") as run:
        for _ in run.steps(10):
            pass
    html = run._repr_html_()
    assert html is not None
    ((tag, attributes),) = Page(html).tags
    assert (tag, attributes["sandbox"]) == ("iframe", "")
    assert "Where the time went" in Page(attributes["srcdoc"] or "").text


def test_a_run_that_failed_at_once_and_one_of_another_program_have_a_page(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), hf.resumable(tmp_path / "failed", w=np.zeros(3), quiet=True) as run:
        raise RuntimeError
    del run
    with hf.CheckpointManager(tmp_path / "manager", hf.Checkpoint(w=np.zeros(3))) as manager:
        manager.save(1, metrics={"loss": 1.0})
    page = Page(render_page(read_facts(LocalStorage(tmp_path / "manager"), "manager")))
    assert "recorded no times" in page.text
    assert "There are none." in Page(render_page(read_facts(LocalStorage(tmp_path / "failed"), "failed"))).text


def test_the_page_says_in_which_tiers_a_step_is_and_if_it_is_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    with hf.resumable(hf.Tiers("near", "far"), model=model, save_every=5, keep=1, quiet=True, preemption="off") as run:
        for step in run.steps(10):
            if step == 9:
                model.weight.data.fill_(float("nan"))
    places = [str(Path(name).absolute()) for name in ("near", "far")]
    page = Page(report("near", "--tier", "far"))
    assert ", ".join(places) in page.text
    assert "not finite" in page.text
    assert ", ".join(places) not in Page(report("near")).text


def test_a_file_that_cannot_be_written_is_an_error(run: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "report", run, "-o", "missing/page.html"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "cannot write missing/page.html" in done.stderr


def test_the_page_of_two_thousand_saves_is_small(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with hf.CheckpointManager(path, hf.Checkpoint(w=np.zeros(3))) as manager:
        manager.save(1)
    with (path / "events.jsonl").open("ab") as journal:
        for step in range(2000):
            saved = Committed(
                step=step, generation=1, blocked_seconds=0.01, background_seconds=1.0, size_bytes=10,
                training_saved_seconds=1.0, at_unix_seconds=1e9 + step,
            )  # fmt: skip
            clocked = Clocked(
                begun_at_unix_seconds=1e9 + step // 20 * 20, setup_seconds=1.0, restore_seconds=0.0, train_seconds=9.0,
                data_seconds=0.0, save_seconds=0.0, leave_seconds=0.0, first_step=0, step=step,
                at_unix_seconds=1e9 + step // 20 * 20 + 10,
            )  # fmt: skip
            journal.write(hf.events.encode_event(saved) + b"\n" + hf.events.encode_event(clocked) + b"\n")
    html = render_page(read_facts(LocalStorage(path), "run"))
    assert "100</b>starts" in html
    assert "2,001</b>saves" in html
    assert len(html) < 1_000_000


def test_charts_hold_with_odd_figures() -> None:
    assert thin(list(range(1000)), 5) == [0, 250, 500, 749, 999]
    assert choose_ticks(0.0, 10.0, 5) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    for low, high in ((0.0, 0.0), (5.0, 5.0), (-1e300, 1e300), (0.0, 1e-300), (0.0, float("inf"))):
        assert 1 <= len(choose_ticks(low, high, 5)) < 20
    assert draw_points([(1, float("nan"), "")], title="loss", write=str) == ""
    for values in ([1.0], [2.0, 2.0], [0.0, 0.0], [-1e308, 1e308], [1e-320, 2e-320]):
        assert "nan" not in draw_points([(n, value, "") for n, value in enumerate(values)], title="", write=str)
    assert "<svg" in draw_timeline([("1", [], [])], 5.0, 5.0)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser: Debian's package chromium")
@pytest.mark.parametrize("width", [400, 1280])
def test_a_browser_shows_it_without_an_error_and_within_its_width(run: str, width: int) -> None:
    html = report(run)
    # A page of ours may run a script that measures; the page itself forbids it.
    measured = html.replace("default-src 'none'; ", "script-src 'unsafe-inline'; ").replace(
        "</body>", "<script>document.title = document.documentElement.scrollWidth</script></body>"
    )
    Path("measured.html").write_text(measured)
    for file in ("page.html", "measured.html"):
        shown = subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900",
             "--enable-logging=stderr", "--dump-dom", f"file://{Path(file).absolute()}"],
            capture_output=True, text=True, timeout=120, check=True, env={**os.environ, "HOME": str(Path.cwd())},
        )  # fmt: skip
        assert "CONSOLE" not in shown.stderr
    title = shown.stdout.partition("<title>")[2].partition("</title>")[0]
    assert int(title) <= max(width, 500)  # A window of a browser without a head is 500 wide at least.
