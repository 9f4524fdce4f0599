"""Pieces of HTML. Every text goes through `escape`; nothing else in report/ writes a tag around
a run's words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from rlhf_megatron.controller.observe.report.charts import ReportChart, is_all_zero
from rlhf_megatron.controller.observe.report.run_overview import IntervalEstimate, OverviewFact

# Characters that do not print, or that turn the direction of what follows; base.js has
# the same list.
_HIDDEN_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]"
)


def escape_text(value: object) -> str:
    """Escape a value for use between tags and in attributes with double quotes. Hidden characters
    are shown by their code.
    """
    return escape(
        _HIDDEN_CHARACTERS.sub(lambda match: f"\\u{{{ord(match[0]):x}}}", str(value)), quote=True
    )


def render_tile(label: str, value: str, hint: str) -> str:
    """Return a tile (HTML) with a label, a value and a hint. An interval in brackets at the end of
    the value is set smaller.
    """
    number, bracket, interval = value.partition(" [")
    small = f" <small>{escape_text(bracket.strip() + interval)}</small>" if bracket else ""
    return (
        f'<div class="tile"><dt>{escape_text(label)}</dt><dd>'
        f'<div class="value">{escape_text(number)}{small}</div>'
        f'<div class="hint">{escape_text(hint)}</div></dd></div>'
    )


def render_fact_list(facts: Sequence[OverviewFact]) -> str:
    """Return the facts as an HTML definition list."""
    rows = (
        (
            f'<dt title="{escape_text(f.hint)}">{escape_text(f.label)}</dt>'
            f"<dd>{escape_text(f.value)}</dd>"
        )
        for f in facts
    )
    return f'<dl class="facts">{"".join(rows)}</dl>'


def render_table(
    caption: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    number_columns: Sequence[int] = (),
    row_anchors: Sequence[str] = (),
) -> str:
    """Return an HTML card with a table. `number_columns` are the columns that are set flush right.
    The first column names the row; with `row_anchors` it links to an id of the page, one a row.
    """

    def format_class_attribute(column: int, class_name: str = "") -> str:
        """Return the class attribute of a cell of this column, or ""."""
        name = "number" if column in number_columns else class_name
        return f' class="{name}"' if name else ""

    head = "".join(
        f'<th scope="col"{format_class_attribute(i)}>{escape_text(h)}</th>'
        for i, h in enumerate(headings)
    )
    body = []
    for i, row in enumerate(rows):
        name = render_link(f"#{row_anchors[i]}", row[0]) if row_anchors else escape_text(row[0])
        cells = [f'<th scope="row"{format_class_attribute(0)}>{name}</th>']
        cells += [
            f"<td{format_class_attribute(i, 'break')}>{escape_text(cell)}</td>"
            for i, cell in enumerate(row[1:], 1)
        ]
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        '<div class="card"><div class="scroll" tabindex="0">'
        f"<table><caption>{escape_text(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div></div>"
    )


def render_link(address: str, text: str) -> str:
    """Return a link (HTML)."""
    return f'<a href="{escape_text(address)}">{escape_text(text)}</a>'


def render_chart_figure(chart: ReportChart) -> str:
    """Return the HTML frame in which the page's script draws the chart."""
    is_one = len({series.metric_key for series in chart.series}) == 1
    meaning, key = (chart.series[0].meaning, chart.series[0].metric_key) if is_one else ("", "")
    shown = " · ".join(part for part in (meaning, key if key != chart.title else "") if part)
    note = f'<p class="note">{escape_text(chart.note)}</p>' if chart.note else ""
    return (
        f'<figure class="chart{" wide" if chart.is_wide else ""}"'
        f' id="chart-{escape_text(chart.name)}" data-chart="{escape_text(chart.name)}">'
        f"<figcaption><h3>{escape_text(chart.title)}</h3>"
        f'<p class="meaning">{escape_text(shown)}</p></figcaption><div class="plot"></div>{note}'
        '<details class="values"><summary>Values</summary></details></figure>'
    )


def render_chart_grid(charts: Sequence[ReportChart]) -> str:
    """Return an HTML grid with the frames of the charts; "" for no chart. Charts that are 0 at all
    steps are folded behind it, but for wide ones, the main charts of a section.
    """
    folded = [chart for chart in charts if is_all_zero(chart) and not chart.is_wide]
    shown = [chart for chart in charts if chart not in folded]
    html = _render_grid(shown)
    if folded:
        titles = ", ".join(chart.title for chart in folded)
        summary = f"{format_count(len(folded), 'chart')} with nothing but 0: {titles}"
        html += render_details_block(summary, _render_grid(folded))
    return html


def _render_grid(charts: Sequence[ReportChart]) -> str:
    """Return the frames of the charts in a grid, as HTML; "" for no chart."""
    if not charts:
        return ""
    return f'<div class="grid">{"".join(render_chart_figure(chart) for chart in charts)}</div>'


def render_missing_note(reason: str) -> str:
    """Return an HTML paragraph that says why something is missing."""
    return f'<p class="missing">{escape_text(reason)}</p>'


def render_section(name: str, title: str, body: str) -> str:
    """Return a section of the page with its heading; `body` is HTML."""
    own = escape_text(name)
    heading = escape_text(f"h-{name}")
    return (
        f'<section id="{own}" aria-labelledby="{heading}">'
        f'<h2 id="{heading}">{escape_text(title)}</h2>{body}</section>'
    )


def render_details_block(summary: str, body: str) -> str:
    """Return a block that opens at a click on its summary; `body` is HTML."""
    return f'<details class="block"><summary>{escape_text(summary)}</summary>{body}</details>'


def format_estimate(
    estimate: IntervalEstimate | None, num_digits: int = 3, is_signed: bool = False
) -> str:
    """Return the value and its interval, such as "0.915 [0.902, 0.926]"; "–" for None."""
    if estimate is None:
        return "–"
    form = f"{'+' if is_signed else ''}.{num_digits}f"
    interval = (
        f" [{estimate.low:{form}}, {estimate.high:{form}}]"
        if estimate.low is not None and estimate.high is not None
        else ""
    )
    return f"{estimate.value:{form}}{interval}"


def format_count(number: int, noun: str) -> str:
    """Return the number and the noun, such as "1 step" or "2 steps"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
