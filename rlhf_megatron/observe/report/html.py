"""Pieces of HTML. Every text goes through `escape`; nothing else in report/ writes a tag around a run's words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from rlhf_megatron.observe.report.charts import Chart
from rlhf_megatron.observe.report.facts import Estimate, Fact

# Characters that do not print, or that turn the direction of what follows; base.js has the same list.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def text(value: object) -> str:
    """Escape a value for use between tags and in attributes with double quotes. Hidden characters are shown by their
    code.
    """
    return escape(_HIDDEN.sub(lambda match: f"\\u{{{ord(match[0]):x}}}", str(value)), quote=True)


def tile(label: str, value: str, hint: str) -> str:
    """An interval at the end of the value, in brackets, is set smaller."""
    number, bracket, interval = value.partition(" [")
    small = f" <small>{text(bracket.strip() + interval)}</small>" if bracket else ""
    return (
        f'<div class="tile"><dt>{text(label)}</dt><dd><div class="value">{text(number)}{small}</div>'
        f'<div class="hint">{text(hint)}</div></dd></div>'
    )


def fact_list(facts: Sequence[Fact]) -> str:
    rows = (f'<dt title="{text(f.hint)}">{text(f.label)}</dt><dd>{text(f.value)}</dd>' for f in facts)
    return f'<dl class="facts">{"".join(rows)}</dl>'


def table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A card. `numbers`: the columns that are set flush right. The first column names the row."""

    def attributes(i: int, class_name: str = "") -> str:
        name = "number" if i in numbers else class_name
        return f' class="{name}"' if name else ""

    head = "".join(f'<th scope="col"{attributes(i)}>{text(h)}</th>' for i, h in enumerate(headings))
    body = []
    for row in rows:
        cells = [f'<th scope="row"{attributes(0)}>{text(row[0])}</th>']
        cells += [f"<td{attributes(i, 'break')}>{text(cell)}</td>" for i, cell in enumerate(row[1:], 1)]
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="card"><div class="scroll" tabindex="0"><table><caption>{text(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div></div>"
    )


def figure(chart: Chart) -> str:
    """The frame that the page's script draws in."""
    is_one = len({series.key for series in chart.series}) == 1
    meaning, key = (chart.series[0].meaning, chart.series[0].key) if is_one else ("", "")
    shown = " · ".join(part for part in (meaning, key if key != chart.title else "") if part)
    note = f'<p class="note">{text(chart.note)}</p>' if chart.note else ""
    return (
        f'<figure class="chart{" wide" if chart.is_wide else ""}" id="chart-{text(chart.name)}"'
        f' data-chart="{text(chart.name)}"><figcaption><h3>{text(chart.title)}</h3>'
        f'<p class="meaning">{text(shown)}</p></figcaption><div class="plot"></div>{note}'
        '<details class="values"><summary>Values</summary></details></figure>'
    )


def grid(charts: Sequence[Chart]) -> str:
    return f'<div class="grid">{"".join(figure(chart) for chart in charts)}</div>' if charts else ""


def missing(reason: str) -> str:
    return f'<p class="missing">{text(reason)}</p>'


def section(name: str, title: str, body: str) -> str:
    own, heading = text(name), text(f"h-{name}")
    return f'<section id="{own}" aria-labelledby="{heading}"><h2 id="{heading}">{text(title)}</h2>{body}</section>'


def block(summary: str, body: str) -> str:
    return f'<details class="block"><summary>{text(summary)}</summary>{body}</details>'


def estimate(value: Estimate | None, digits: int = 3, signed: bool = False) -> str:
    """ "0.915 [0.902, 0.926]" """
    if value is None:
        return "–"
    form = f"{'+' if signed else ''}.{digits}f"
    interval = f" [{value.low:{form}}, {value.high:{form}}]" if value.low is not None and value.high is not None else ""
    return f"{value.value:{form}}{interval}"


def count(number: int, noun: str) -> str:
    """ "1 step", "2 steps" """
    return f"{number} {noun}{'' if number == 1 else 's'}"
