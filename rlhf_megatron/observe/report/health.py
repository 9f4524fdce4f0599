"""What the health rules say of a run: a table in the head of the page. Told of any run, also of one that was killed."""

from __future__ import annotations

from rlhf_megatron.observe.health import HealthWatch
from rlhf_megatron.observe.report import html
from rlhf_megatron.observe.report.records import RunFiles

HEADINGS = ["verdict", "steps", "first", "last", "at the last of them"]


def health_block(run: RunFiles) -> str:
    """Empty where no verdict was ever bad."""
    watch = HealthWatch()
    for row in run.steps:
        watch.seen(row.step, row.metrics)
    if not watch.troubles:
        return ""
    rows = [
        [name + (" (now)" if found.is_now else ""), str(found.num_steps), str(found.first_step), str(found.last_step)]
        + [found.text.partition(": ")[2]]
        for name, found in sorted(watch.troubles.items(), key=lambda item: item[1].first_step)
    ]
    return f'<div class="card">{html.table("Health", HEADINGS, rows, range(1, 4))}</div>'
