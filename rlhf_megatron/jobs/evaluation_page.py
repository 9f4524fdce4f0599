"""The figures of evaluations as one HTML page without scripts: tables, and over a run's
steps a curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rlhf_megatron.controller.evaluation.held_out_evaluation import EvaluationResult

WIDTH = 720
HEIGHT = 260
EDGE = 48
STYLE = """
 :root{color-scheme:light dark} body{font:15px/1.5 \
system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
 table{border-collapse:collapse;margin:.5rem 0 1.5rem}
 td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #8884}
 td:first-child,th:first-child{text-align:left} pre{white-space:pre-wrap;border-left:3px solid \
#8886;padding-left:.7rem}
 .line{fill:none;stroke:#0072b2;stroke-width:2} .band{fill:#0072b2;opacity:.18} .axis{stroke:#8888}
 text{fill:currentColor;font-size:12px}
"""


def render_evaluation_page(
    title: str, results: Sequence[tuple[str, EvaluationResult]], notes: Sequence[str] = ()
) -> str:
    """Return an HTML page with the tables of each result, the notes below the tables, and the
    examples of the last result. `results` are (name, figures) in order; names of the form "step N"
    also give a curve over the steps.
    """
    steps = [
        (int(name.split()[-1]), result) for name, result in results if name.startswith("step ")
    ]
    parts = (
        ["<p>Mean score over steps, with its 95 % interval</p>", render_score_curve(steps)]
        if len(steps) > 1
        else []
    )
    for name, result in results:
        parts += [
            f"<h2>{escape(name)}</h2>",
            _render_set_table(result),
            _render_figure_table(result),
        ]
    parts += [f"<p>{escape(note)}</p>" for note in notes]
    parts += _render_examples(results[-1][1])
    return (
        (
            '<!doctype html>\n<html lang="en"><head><meta'
            f' charset="utf-8"><title>{escape(title)}</title>'
            f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>\n"
        )
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def render_score_curve(steps: Sequence[tuple[int, EvaluationResult]]) -> str:
    """Return an SVG of the mean score with its 95 % interval over the steps. `steps` are (step,
    figures) in ascending order, at least two.
    """
    first = steps[0][0]
    last = steps[-1][0]
    low = min(0.0, *(result.low for _, result in steps))
    high = max(1.0, *(result.high for _, result in steps))

    def format_point(step: int, value: float) -> str:
        """Return the place of a value at a step in the picture, as "x,y" in pixels."""
        x = EDGE + (WIDTH - 2 * EDGE) * (step - first) / max(1, last - first)
        return f"{x:.1f},{HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * (value - low) / (high - low):.1f}"

    band = [format_point(s, r.high) for s, r in steps] + [
        format_point(s, r.low) for s, r in reversed(steps)
    ]
    marks = [(first, low, f"step {first}", 16), (last, low, f"step {last}", 16)]
    texts = []
    for step, value, words, below in marks:
        x, y = format_point(step, value).split(",")
        texts.append(f'<text x="{x}" y="{float(y) + below}" text-anchor="middle">{words}</text>')
    for value in (low, high):
        texts.append(
            f'<text x="{EDGE - 8}" y="{format_point(first, value).split(",")[1]}"'
            f' text-anchor="end">{value:g}</text>'
        )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="mean score'
        ' over steps">'
        f'<polygon class="band" points="{" ".join(band)}"/>'
        f'<polyline class="axis" fill="none" points="{format_point(first, high)}'
        f' {format_point(first, low)} {format_point(last, low)}"/>'
        '<polyline class="line"'
        f' points="{" ".join(format_point(s, r.accuracy) for s, r in steps)}"/>{"".join(texts)}</'
        "svg>"
    )


def _format_interval(low: float | None, high: float | None) -> str:
    """Return "[low, high]" with four decimals, or a dash where there is no interval."""
    return f"[{low:.4f}, {high:.4f}]" if low is not None and high is not None else "–"


def _render_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table with escaped cells; "" without rows."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""


def _render_set_table(result: EvaluationResult) -> str:
    """Return the HTML table of a result: a row for each set, and one over all sets if there are
    several.
    """
    rows = [
        [s.name, f"{s.num_items}", f"{s.num_samples}", f"{s.mean:.4f}",
         _format_interval(s.low, s.high), f"{s.std:.4f}",
         f"{s.mean_response_length:.1f}", f"{s.num_masked}"]
        for s in result.sets
    ]  # fmt: skip
    if len(result.sets) > 1:
        whole = [
            f"{result.num_items}",
            "",
            f"{result.accuracy:.4f}",
            _format_interval(result.low, result.high),
            "",
            "",
            "",
        ]
        rows.append(["all", *whole])
    return _render_table(
        ["set", "items", "N", "mean@N", "95 % interval", "std@N", "tokens", "left out"], rows
    )


def _render_figure_table(result: EvaluationResult) -> str:
    """Return the HTML table of a result's further figures, such as pass@k, for each set; "" without
    any.
    """
    rows = [
        [s.name, f"{f.name}@{f.k}", f"{f.value:.4f}", _format_interval(f.low, f.high)]
        for s in result.sets
        for f in s.figures
    ]
    return _render_table(["set", "figure", "value", "95 % interval"], rows)


def _render_examples(result: EvaluationResult) -> list[str]:
    """Return the HTML of a result's examples: score, label, prompt and response of each."""
    parts = ["<h2>Examples</h2>"] if result.examples else []
    for example in result.examples:
        score = example.status if example.score is None else f"score {example.score:g}"
        parts.append(
            f"<p>{escape(score)}, answer {escape(example.label)}</p>"
            f"<pre>{escape(example.prompt)}</pre>"
        )
        parts.append(f"<pre>{escape(example.response)}</pre>")
    return parts
