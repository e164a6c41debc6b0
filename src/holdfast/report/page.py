"""The page about a run: HTML with its style in it, no script, and nothing that is loaded from elsewhere."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import groupby
from statistics import median
from typing import Final

from holdfast.catalog.ledger import WORDS, StartTimes
from holdfast.catalog.survey import Found, State
from holdfast.events.kinds import Committed, Event, Failed, Leaving, NoticeHeard
from holdfast.numbers import size_text, time_text
from holdfast.report.charts import Instant, Span, draw_points, draw_shares, draw_timeline, thin
from holdfast.report.facts import RunFacts

_MOST_ROWS: Final = 40
"""So many starts have a row of the timeline: the newest ones."""
_MOST_STEPS: Final = 300
_WHEN: Final = frozenset({"begun", "saved", "when"})
_LOUD: Final = (Failed,)

_STYLE: Final = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1f2328;--faint:#59636e;--line:#d1d9e0;--card:#f6f8fa;--train:#2f7d4f;
--evaluate:#6b8e23;--data:#8a6d1f;--save:#b3541e;--restore:#2a6f9e;--setup:#7a6a9b;--leave:#4f8f8b;--lost:#b42d2d;--away:#aeb6bf;--dot:#2f7d4f}
@media (prefers-color-scheme:dark){:root{--paper:#0f1318;--ink:#e6edf3;--faint:#9aa4ae;--line:#30363d;--card:#171c22;
--train:#4fae78;--evaluate:#9db85a;--data:#c7a13f;--save:#e08a50;--restore:#5fa8d8;--setup:#a697cc;--leave:#74b8b3;--lost:#ea6a6a;--away:#4a525b;
--dot:#4fae78}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1040px;padding:20px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}h1{font-size:1.5rem;margin:0;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:2rem 0 .5rem}
p{margin:.3rem 0}.faint{color:var(--faint)}.tiles{display:flex;flex-wrap:wrap;gap:12px;margin:1rem 0}
.tile{flex:1 1 150px;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px}
.tile b{display:block;font-size:1.25rem}.wide{overflow-x:auto}svg{width:100%;min-width:520px;height:auto;display:block}
svg text{fill:var(--faint);font:11px system-ui,sans-serif}
.grid{stroke:var(--line)}.line{fill:none;stroke:var(--dot);stroke-width:1.5}
.dot{fill:var(--dot)}.dot.marked{fill:var(--paper);stroke:var(--save);stroke-width:2.5}
.train{fill:var(--train);background:var(--train)}.evaluate{fill:var(--evaluate);background:var(--evaluate)}
.data{fill:var(--data);background:var(--data)}
.save{fill:var(--save);background:var(--save)}.restore{fill:var(--restore);background:var(--restore)}
.setup{fill:var(--setup);background:var(--setup)}.leave{fill:var(--leave);background:var(--leave)}
.lost{fill:var(--lost);background:var(--lost)}.away{fill:var(--away);background:var(--away)}
line.commit{stroke:var(--ink);stroke-opacity:.55}line.notice{stroke:var(--save);stroke-width:2.5}
line.failure{stroke:var(--lost);stroke-width:2.5}table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:4px 10px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--faint);font-weight:500}td.figure,th.figure{text-align:right;white-space:nowrap}td{overflow-wrap:anywhere}
td.when{white-space:nowrap}
code{font:13px ui-monospace,monospace}.key{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:13px;color:var(--faint)}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px}
.bad{color:var(--lost);font-weight:600}
@media print{body{max-width:none;padding:0}svg{min-width:0}h2,tr{break-after:avoid;break-inside:avoid}}
@media (max-width:600px){body{padding:12px}td,th{padding-right:6px}}
"""


def render_page(facts: RunFacts) -> str:
    """**Pure.** Returns the page as HTML."""
    title = escape(f"{facts.location}: holdfast report")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{_STYLE}</style></head><body>{render_body(facts)}</body></html>\n"
    )


def render_frame(facts: RunFacts) -> str:
    """**Pure.** Returns the page as a part of another one, such as a notebook, which it cannot change."""
    return (
        f'<iframe srcdoc="{escape(render_page(facts))}" sandbox="" style="width:100%;height:640px;border:0"></iframe>'
    )


def render_body(facts: RunFacts) -> str:
    """**Pure.** Returns what is on the page."""
    newest = facts.survey.newest
    where = f"at step {newest.step:,}" if newest is not None else "without a checkpoint"
    return "".join([
        f"<header><h1>{escape(facts.location)}</h1>",
        f'<p class="faint">{where} · looked at {_when(facts.looked_at)}</p></header>',
        _render_tiles(facts),
        _render_times(facts),
        _render_timeline(facts),
        *_render_metrics(facts),
        *_render_saves(facts),
        *_render_workers(facts),
        _render_steps(facts),
        _render_news(facts),
    ])  # fmt: skip


def _render_tiles(facts: RunFacts) -> str:
    shares, living = facts.times.shares, facts.survey.of(State.LIVING)
    whole = sum(shares)
    tiles = {
        "starts": f"{len(facts.times.starts):,}",
        "from the first start to the last record": time_text(whole),
        WORDS["train"]: f"{shares.train / whole:.1%}" if whole else "unknown",
        WORDS["save"]: f"{shares.save / whole:.2%}" if whole else "unknown",
        "saves": f"{len(facts.saves):,}",
        "checkpoints": f"{len(living):,}, {size_text(sum(one.size_bytes for one in living))}",
    }
    cells = "".join(f'<div class="tile"><b>{text}</b>{label}</div>' for label, text in tiles.items())
    return f'<div class="tiles">{cells}</div>'


def _render_times(facts: RunFacts) -> str:
    times, shares = facts.times, facts.times.shares._asdict()
    whole = sum(shares.values())
    if not whole:
        return "<p>This run has recorded no times.</p>"
    texts = [
        (name, f"{WORDS[name]}: {time_text(size)} ({size / whole:.1%})", size) for name, size in shares.items() if size
    ]
    chart = f'<div class="wide">{draw_shares(texts)}</div>{_key(texts)}'
    return f"<h2>Where the time went</h2>{chart}<p>{times.describe_interval()}</p>"


def _key(texts: Iterable[tuple[str, str, float]]) -> str:
    entries = "".join(f'<span><i class="{kind}"></i>{escape(text)}</span>' for kind, text, _ in texts)
    return f'<div class="key">{entries}</div>'


def _render_timeline(facts: RunFacts) -> str:
    starts = facts.times.starts[-_MOST_ROWS:]
    if not starts:
        return ""
    first = len(facts.times.starts) - len(starts) + 1
    ends = [*(after.begun_at_unix_seconds for after in starts[1:]), facts.looked_at]
    rows = []
    for number, (start, end) in enumerate(zip(starts, ends, strict=True), first):
        spans, at = [], start.begun_at_unix_seconds
        for kind in ("setup", "restore", "lost", "train", "evaluate", "data", "save", "leave"):
            seconds = start.repeated_seconds if kind == "lost" else getattr(start, kind)
            if seconds:
                text = f"start {number}, {WORDS[kind]}: {time_text(seconds)}"
                spans.append(Span(kind, at, at + seconds, text))
                at += seconds
        marks = _find_marks(facts, start.begun_at_unix_seconds, end)
        rows.append((f"{number}: {start.step:,}", spans, marks))
    earlier = f" The newest {len(starts)} of {len(facts.times.starts):,}." if first > 1 else ""
    begin, last = starts[0].begun_at_unix_seconds, max(one.ended_at_unix_seconds for one in starts)
    words = (
        "A row for each start, with the step that it came to; its bar shows the sums of its phases in this order. Thin "
        "lines are commits, thick ones notices and failures; a gap is a time without a record."
    )
    chart = f'<div class="wide">{draw_timeline(rows, begin, last)}</div>'
    return f'<h2>Starts</h2><p class="faint">{words}{earlier}</p>{chart}{_list_starts(starts, first)}'


def _find_marks(facts: RunFacts, begin: float, end: float) -> list[Instant]:
    saves = [one for one in facts.saves if begin <= one.at_unix_seconds < end]
    marks = [Instant("commit", one.at_unix_seconds, f"step {one.step} committed") for one in thin(saves, 60)]
    for event in facts.news:
        if begin <= event.at_unix_seconds < end and isinstance(event, Failed | NoticeHeard | Leaving):
            kind = "failure" if isinstance(event, Failed) else "notice"
            marks.append(Instant(kind, event.at_unix_seconds, str(event)))
    return marks


def _list_starts(starts: Sequence[StartTimes], first: int) -> str:
    rows = [
        [
            str(number),
            _when(one.begun_at_unix_seconds),
            f"{one.first_step:,}",
            f"{one.step:,}",
            f"{one.repeated_steps:,}",
            time_text(one.setup + one.restore),
            time_text(one.train + one.evaluate + one.data),
            time_text(one.lost),
            time_text(one.away),
            one.end,
        ]
        for number, one in enumerate(starts, first)
    ]
    titles = ["start", "begun", "from step", "to step", "repeated", "until trained", "trained"]
    return _table([*titles, WORDS["lost"], "away before", "end"], rows, figures=range(2, 9))


def _render_metrics(facts: RunFacts) -> Iterable[str]:
    living = facts.survey.of(State.LIVING)
    marked = frozenset(float(one.step or 0) for one in living if one is facts.survey.newest)
    for name in sorted({name for one in living for name in one.metrics}):
        points = [
            (float(one.step or 0), one.metrics[name], f"step {one.step}: {one.metrics[name]:.6g}")
            for one in living
            if name in one.metrics
        ]
        chart = draw_points(points, title=name, write="{:.4g}".format, marked=marked, is_line=True)
        yield f'<h2>{escape(name)} of the checkpoints that are kept</h2><div class="wide">{chart}</div>'


def _render_saves(facts: RunFacts) -> Iterable[str]:
    def points(value: str, write: str) -> list[tuple[float, float, str]]:
        return [
            (float(one.step), float(getattr(one, value)), f"step {one.step}: {write} {_say(value, one)}")
            for one in sorted(facts.saves, key=lambda one: one.step)
        ]

    if not facts.saves:
        return
    charts = {
        "How long each save stopped training": ("blocked_seconds", time_text, "stopped training for"),
        "How long each save took in the background": ("background_seconds", time_text, "durable after"),
        "What each save wrote": ("size_bytes", size_text, "wrote"),
    }
    for title, (value, write, words) in charts.items():
        middle = median(float(getattr(one, value)) for one in facts.saves)
        chart = draw_points(points(value, words), title=title, write=write)
        yield (
            f'<h2>{title}</h2><p class="faint">{write(middle)} in the median of {len(facts.saves):,} saves</p>'
            f'<div class="wide">{chart}</div>'
        )


def _render_workers(facts: RunFacts) -> Iterable[str]:
    if not facts.times.workers:
        return
    points = [
        (float(save.step), seconds, f"step {save.step}: the part of rank {rank} is durable after {time_text(seconds)}")
        for save in sorted(facts.parts, key=lambda save: save.step)
        for rank, seconds in zip(save.ranks, save.background_seconds, strict=False)
    ]
    title = "How long each worker took for its part in the background"
    chart = draw_points(points, title=title, write=time_text)
    rows = [
        [
            f"{one.rank}",
            f"{one.saves:,}",
            time_text(one.blocked_seconds),
            time_text(one.background_seconds),
            time_text(one.slowest_seconds),
            size_text(one.size_bytes),
            f"{one.last:,}",
        ]
        for one in facts.times.workers
    ]
    titles = ["rank", "saves", "stopped for", "durable after", "at the longest", "wrote", "was the last"]
    yield f'<h2>{title}</h2><p class="faint">{facts.times.describe_slowest()}</p><div class="wide">{chart}</div>'
    yield "<p>Of each worker, in the median:</p>" + _table(titles, rows, figures=range(7))


def _say(value: str, one: Committed) -> str:
    return size_text(one.size_bytes) if value == "size_bytes" else time_text(getattr(one, value))


def _render_steps(facts: RunFacts) -> str:
    found = facts.survey.of(State.LIVING, State.OFF_LINE, State.LOST)[-_MOST_STEPS:]
    if not found:
        return "<h2>Checkpoints</h2><p>There are none.</p>"
    rows = [[*_describe_step(facts, one)] for one in reversed(found)]
    titles = ["step", "saved", "size", "kept because", *["is in"] * bool(facts.places), "metrics"]
    titles.append("go back to it, or export it")
    return "<h2>Checkpoints</h2>" + _table(titles, rows, figures=[0, 2], raw=[len(titles) - 1])


def _describe_step(facts: RunFacts, one: Found) -> Iterable[str]:
    place = shlex.quote(f"{facts.location}@{one.step}")  # It is copied into a shell.
    yield f"{one.step:,}"
    yield _when(one.committed_at_unix_seconds) if one.committed_at_unix_seconds else "unknown"
    yield size_text(one.size_bytes)
    remarks = [] if one.manifest is None or one.manifest.facts.is_finite else ["not finite"]
    if one.state is State.LIVING:
        holds = [str(hold.reader or "pinned") for hold in facts.survey.find_holds(one)]
        why = [facts.kept.get(one.step or 0, ""), *holds]
    else:
        lost = "its manifest is lost"
        why = [{State.OFF_LINE: "off the line: the run went on from elsewhere"}.get(one.state, lost)]
    yield "; ".join(filter(None, [*why, *remarks]))
    if facts.places:
        yield ", ".join(facts.places.get(one.name, []) if one.name else [])
    yield ", ".join(f"{name} {value:.6g}" for name, value in one.metrics.items())
    commands = (f"holdfast rollback {place}", f"holdfast export {place} --to safetensors out/")
    yield "<br>".join(f"<code>{escape(command)}</code>" for command in commands)


def _render_news(facts: RunFacts) -> str:
    if not facts.news:
        return "<h2>Warnings and errors</h2><p>There are none.</p>"
    rows = []
    for text, group in groupby(facts.news, key=str):
        events = list(group)
        times = f" ({len(events)} times)" if len(events) > 1 else ""
        kind = f'<span class="bad">{_name(events[0])}</span>' if isinstance(events[0], _LOUD) else _name(events[0])
        rows.append([_when(events[0].at_unix_seconds), kind, f"{text}{times}"])
    return "<h2>Warnings and errors</h2>" + _table(["when", "what", ""], rows, raw=[1])


def _name(event: Event) -> str:
    return escape(str(event.__struct_config__.tag).replace("_", " "))


def _table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, figures: Iterable[int] = (), raw: Iterable[int] = ()
) -> str:
    """**Pure.** Returns a table; what is in columns of `raw` is HTML already, all else is escaped."""
    right, whole = set(figures), set(raw)

    def kind(column: int) -> str:
        return ' class="figure"' if column in right else ' class="when"' if titles[column] in _WHEN else ""

    head = "".join(f"<th{kind(column)}>{escape(title)}</th>" for column, title in enumerate(titles))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind(n)}>{cell if n in whole else escape(cell)}</td>" for n, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _when(unix_seconds: float) -> str:
    try:
        return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return "unknown"
