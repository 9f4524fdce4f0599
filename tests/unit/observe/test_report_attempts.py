"""The report of a run that was killed and resumed: every step once, and what happened to it."""

import json
from pathlib import Path

from report_samples import Page, write_lines, write_run_dir

from rlhf_megatron.controller.observe.report.page_payload import PagePayload, make_timeline
from rlhf_megatron.controller.observe.report.run_files import TraceSpan, read_run_files
from rlhf_megatron.controller.observe.report.run_page import list_attempt_rows, render_run_page

LINES = [
    {"kind": "start", "time": 1000.0, "resumed_from_step": None},
    {
        "kind": "start",
        "time": 1100.0,
        "resumed_from_step": 1,
        "resumed_from": "step_000001",
        "changes": {"actor.optim.lr": ["0.001", "0.002"]},
    },
    {"kind": "end", "time": 1130.0, "reason": "stopped: SIGTERM to [actor dp0 pp0 tp1]"},
    {"kind": "start", "time": 1200.0, "resumed_from_step": 2},
    {"kind": "end", "time": 1240.0, "reason": "complete"},
]


def test_a_row_a_start() -> None:
    rows = list_attempt_rows(LINES)
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert rows[0][2:] == ["–", "–", "killed", "–"]
    assert rows[1][2:] == [
        "1",
        "30 s",
        "stopped: SIGTERM to [actor dp0 pp0 tp1]",
        "actor.optim.lr: 0.001 → 0.002",
    ]
    assert rows[2][2:] == ["2", "40 s", "complete", "–"]
    assert list_attempt_rows(LINES[:1])[0][4] == "no end yet"
    # The wall clock was set back by an hour; the monotonic one is told beside it.
    told = [LINES[0], {"kind": "end", "time": -2600.0, "seconds": 42.0, "reason": "complete"}]
    assert (
        list_attempt_rows(told)[0][3] == "42 s"
        and list_attempt_rows([LINES[0], LINES[2] | {"time": 1.0}])[0][3] == "0 s"
    )


def test_attempts_are_on_the_page_where_there_are_several(tmp_path: Path) -> None:
    path = write_run_dir(tmp_path / "run", summary={"ettr": 0.8312})
    write_lines(path / "attempts.jsonl", LINES[:1])
    assert "attempts" not in Page(render_run_page(read_run_files(path), [])).text
    write_lines(path / "attempts.jsonl", LINES)
    text = Page(render_run_page(read_run_files(path), [])).text
    assert (
        "3 attempts" in text
        and "Effective training time: 83.1% of the time since the first" in text
    )
    assert "actor.optim.lr: 0.001 → 0.002" in text and "killed" in text


def test_rows_that_were_superseded_are_not_read(tmp_path: Path) -> None:
    path = write_run_dir(tmp_path / "run")
    aside = path / "superseded" / "attempt_001"
    aside.mkdir(parents=True)
    (aside / "metrics.jsonl").write_text(
        json.dumps({"kind": "step", "step": 3, "seconds": 1.0}) + "\n"
    )
    assert [row.step for row in read_run_files(path).steps] == [1, 2]


def test_the_timeline_has_the_last_time_of_each_step() -> None:
    """Step 2 was done, killed in step 3, and both were done again."""

    def span(
        name: str, start: float, seconds: float, step: int, is_step: bool = False
    ) -> TraceSpan:
        return TraceSpan(name, start, seconds, step, is_step, False)

    first = [
        span("step 2", 0, 5, 2, True),
        span("generate", 0, 3, 2),
        span("update", 3, 2, 2),
        span("generate", 6, 1, 3),
    ]
    again = [span("step 2", 20, 4, 2, True), span("generate", 20, 1, 2), span("update", 21, 3, 2)]
    again += [span("step 3", 24, 6, 3, True), span("generate", 24, 4, 3)]
    found = make_timeline([*first, *again])
    assert found is not None
    assert found.step_spans == (again[0], again[3])
    assert found.stage_bars == ((0, again[1]), (1, again[2]), (0, again[4]))


def test_the_timeline_opens_on_a_step_of_typical_length() -> None:
    seconds = [60.0, 2.0, 1.0, 2.5, 2.25]  # the first starts everything up
    spans = [
        TraceSpan(f"step {i}", 100.0 * i, took, i, True, False) for i, took in enumerate(seconds, 1)
    ]
    found = make_timeline(spans)
    payload = PagePayload()
    assert found is not None
    payload.add_timeline(found)
    view = json.loads(payload.render_json())["timeline"]
    assert view["steps"][view["open"]][0] == 5
