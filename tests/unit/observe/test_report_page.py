"""The page of a run, read as a browser reads it: what it holds, that it holds nothing else,
and hostile text.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from report_samples import (
    Page,
    evaluation_row,
    mismatch_line,
    sample,
    step_row,
    write_lines,
    write_run_dir,
)

from benchmarks.synthetic_run import Shape, write_run
from rlhf_megatron.controller.observe.metrics.metric_catalogue import METRIC_CATALOGUE
from rlhf_megatron.controller.observe.report.chart_catalogue import REPORT_SECTIONS, describe_metric
from rlhf_megatron.controller.observe.report.report_writer import PALETTE
from rlhf_megatron.controller.observe.report.run_files import read_run_files
from rlhf_megatron.controller.observe.report.run_page import read_asset, render_run_page

HOSTILE = "</script><img src=x onerror=alert(1)><!-- \u2028 &amp; \" ' \u202e \x00 \x1b[31m $x$"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    path = tmp_path_factory.mktemp("runs") / "ppo"
    write_run(path, Shape(steps=30, total_steps=30, warmup_steps=20))
    return path, Page(render_run_page(read_run_files(path), ["reward.png"]))


def page_of(path: Path) -> Page:
    return Page(render_run_page(read_run_files(path), []))


def test_embedded_curves_are_those_of_the_files(whole: tuple[Path, Page]) -> None:
    path, page = whole
    run = read_run_files(path)
    rows = {"step": run.steps, "evaluation": run.evaluations, "warmup": run.warmups}
    num_curves = 0
    for section in REPORT_SECTIONS:
        for spec in section.charts:
            for series in page.series(spec.name) if spec.name in page.data["charts"] else ():
                found = [row for row in rows[spec.row_kind] if series["key"] in row.metrics]
                assert series["x"] == [row.step for row in found]
                assert series["y"] == pytest.approx(
                    [row.metrics[series["key"]] for row in found], rel=1e-5
                )
                num_curves += 1
    assert num_curves > 50
    low = [row.metrics["val/chain_sum/low"] for row in run.evaluations]
    by_label = {series["label"]: series for series in page.series("held_out_source")}
    assert by_label["chain_sum"]["lo"] == pytest.approx(low, rel=1e-5)
    assert [series["label"] for series in page.series("stages")][:3] == [
        "next",
        "generate",
        "score",
    ]


def test_every_metric_is_somewhere_on_the_page(whole: tuple[Path, Page]) -> None:
    path, page = whole
    run = read_run_files(path)
    shown = {series["key"] for chart in page.data["charts"].values() for series in chart["series"]}
    assert {series["key"] for series in page.data["charts"]["other-0"]["series"]} <= shown
    changing = {k for k in run.steps[0].metrics if len({row.metrics[k] for row in run.steps}) > 1}
    bands = {"/min", "/max", "/std", "/low", "/high"}
    changing -= {"reward/status/ok"}  # the rest of the others
    assert {key for key in changing - shown if not any(key.endswith(end) for end in bands)} == set()


def test_samples_timeline_and_histograms_are_embedded(whole: tuple[Path, Page]) -> None:
    path, page = whole
    run = read_run_files(path)
    assert [(s["step"], s["response"]) for s in page.data["samples"]] == [
        (s.step, s.response) for s in run.samples
    ]
    assert len(page.data["timeline"]["steps"]) == 31  # step 0 is the evaluation before the first
    tokens = sum(cell["tokens"] for cell in page.data["mismatch"]["cells"])
    counts = sum(sum(cell["counts"]) for cell in page.data["mismatch"]["cells"])
    assert (
        tokens
        == counts
        == sum(group.num_tokens for step in run.mismatch_steps for group in step.groups)
    )
    assert max(w["difference"] for w in page.data["mismatch"]["worst"]) == pytest.approx(
        max(token.difference for step in run.mismatch_steps for token in step.worst), rel=1e-5
    )


def test_the_page_needs_nothing_from_elsewhere(whole: tuple[Path, Page]) -> None:
    path, page = whole
    html = render_run_page(read_run_files(path), ["reward.png"])
    named = [
        v
        for _, attributes in page.tags
        for k, v in attributes.items()
        if k in ("src", "href", "action")
    ]
    assert all(
        v is not None and (v.startswith(("#", "data:,")) or v == "reward.png") for v in named
    )
    assert (
        html.count("url(") == html.count("url(#")
        and "@import" not in html
        and "http" not in read_asset("report.css")
    )
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert (
        policy is not None
        and f"script-src 'sha256-{digest}'" in policy
        and "default-src 'none'" in policy
    )
    assert len(page.scripts) == 2
    assert not [
        name
        for name in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(")
        if name in html
    ]


def test_every_link_and_figure_has_its_place(whole: tuple[Path, Page]) -> None:
    _, page = whole
    ids = page.ids()
    assert len(ids) == len(set(ids))
    links = [a["href"] for tag, a in page.tags if tag == "a" and str(a.get("href")).startswith("#")]
    assert len(links) == 11 and {str(link)[1:] for link in links} <= set(ids)
    figures = [a["data-chart"] for tag, a in page.tags if tag == "figure"]
    assert sorted(map(str, figures)) == sorted(page.data["charts"])


def test_the_head_tells_the_result_with_intervals(tmp_path: Path) -> None:
    rows = [
        evaluation_row(0, 0.2, 0.1, 0.3),
        step_row(1, 0.25),
        step_row(2, 0.75),
        evaluation_row(2, 0.6, 0.5, 0.7),
    ]
    summary = {
        "majority_answer_accuracy": 0.125,
        "seconds": 3720.0,
        "layout": "tp2 pp1 dp2",
        "versions": {"torch": "2.6"},
    }
    page = page_of(write_run_dir(tmp_path / "mine", rows, summary=summary))
    text = page.text
    assert "mine finished finished at step 2 of 4" in text
    assert (
        "Held-out accuracy 0.600 [0.500, 0.700] from 0.200 [0.100, 0.300]; always the most"
        " common answer: 0.125"
    ) in text
    assert "Gain +0.400 [+0.259, +0.541]" in text  # sqrt(0.1^2 + 0.1^2) = 0.1414 on both sides
    assert "1 h 02 min 2 steps, median 4.5 s a step; tp2 pp1 dp2" in text
    assert (
        "Samples a step 4 prompts × 2" in text
        and "Algorithm grpo" in text
        and "Versions torch 2.6" in text
    )
    assert "actor.optim.lr 0.001 1e-06 peak learning rate" in page.text
    assert page.data["charts"]["held_out"]["rules"] == [[0.125, "always the most common answer"]]


def test_what_is_missing_says_why(tmp_path: Path) -> None:
    page = page_of(write_run_dir(tmp_path / "old", [step_row(1, 0.5), step_row(2, 0.5)]))
    for words in (
        "this run made no evaluation (no held-out items, or a replay)",
        "No timeline: this run wrote no trace.json: it is older, or was replayed.",
        "No samples: this run wrote no samples.jsonl: it is older, or was replayed.",
        (
            "No histogram and no worst tokens: this run wrote no mismatch.jsonl: it is older, or"
            " was replayed."
        ),
        "This run made no supervised warm-up",
    ):
        assert words in page.text
    assert not {"samples", "timeline", "mismatch", "held_out"} & page.data.keys()
    assert not {"critic", "held_out_samples"} & set(page.ids()), "neither a critic nor evaluations"
    (tmp_path / "old" / "config.yaml").unlink()
    assert "No settings: this run directory has no config.yaml." in page_of(tmp_path / "old").text


def test_a_run_that_only_warmed_up_has_a_page(tmp_path: Path) -> None:
    rows = [
        {"kind": "warmup", "step": 3, "seconds": 1.5, "warmup/loss": 2.5, "warmup/grad_norm": 1.0}
    ]
    page = page_of(write_run_dir(tmp_path / "warm", rows))
    assert page.series("warmup_loss")[0]["y"] == [2.5] and "warm-up step 3" in page.text
    assert "The run has not finished a step yet." in page.text


def test_notes_and_log_errors_are_on_the_page(tmp_path: Path) -> None:
    path = write_run_dir(
        tmp_path / "bad", [step_row(1, 0.5, **{"actor/grad_norm": float("inf")}), step_row(2, 0.5)]
    )
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    (path / "logs").mkdir()
    (path / "logs" / "rank0.log").write_text(
        f"2026-01-01 10:00:01,1 [actor dp0] ERROR x: {HOSTILE}\n"
    )
    page = page_of(path)
    assert "Left out: metrics.jsonl: the last line is cut off and left out" in page.text
    assert "1 number(s) left out that are not finite" in page.text
    assert "What its logs say" in page.text and "failed after step 2 of 4" in page.text
    assert "actor/grad_norm is not a finite number at 1 step(s) (1)." in page.text
    assert page.series("grad_norm")[0]["y"] == [None, 2.0]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    rows = [evaluation_row(0, 0.2, 0.1, 0.3, **{f"val/{HOSTILE}/mean@2": 0.5})]
    hostile = {f"reward/source/{HOSTILE}/mean": 0.5, "reward/source/b/mean": 0.5}
    rows += [step_row(i, 0.5, **hostile, **{f"new/{HOSTILE}": i}) for i in (1, 2)]
    line = mismatch_line(1, {HOSTILE: [1, 2, 3]})
    line["worst"][0] |= {"token": HOSTILE, "context": HOSTILE}
    fields = ("prompt", "response", "label", "source", "status", "finish_reason", "kind")
    path = write_run_dir(
        tmp_path / "evil",
        rows,
        samples=[sample(1, **dict.fromkeys(fields, HOSTILE), parts={HOSTILE: 1.0})],
        mismatch=[line],
        summary={
            "model": HOSTILE,
            "layout": HOSTILE,
            "versions": {HOSTILE: HOSTILE},
            "seed": HOSTILE,
        },
        trace=(
            '[\n{"name": "</script><img>", "ph": "X", "ts": 1, "dur": 1, "tid": 1, "args":'
            ' {"step": 1}},\n'
        ),
    )
    config = (
        (path / "config.yaml")
        .read_text()
        .replace("models/tiny", "'</pre><script>alert(1)</script>'")
    )
    (path / "config.yaml").write_text(config)
    html = render_run_page(read_run_files(path), [])
    page = Page(html)
    assert len(page.scripts) == 2 and not [tag for tag, _ in page.tags if tag == "img"]
    assert not [a for _, attributes in page.tags for a in attributes if a.startswith("on")]
    assert all(page.data["samples"][0][field] == HOSTILE for field in fields)
    assert page.data["mismatch"]["worst"][0]["token"] == HOSTILE
    assert page.data["mismatch"]["reasons"] == [HOSTILE]
    assert "</pre><script>alert(1)</script>" in page.text and "\\u{202e}" in page.text
    assert not set("\x00\x1b\u202e\u2028") & set(html)
    assert not set("<>&") & set(html.split('id="data">')[1].split("</script>")[0])


def test_sources_are_told_apart_only_where_there_are_several(tmp_path: Path) -> None:
    def row(step: int, *names: str) -> dict[str, object]:
        found = {f"reward/source/{name}/mean": 0.25 * step for name in names}
        return step_row(
            step, 0.5, **found, **{f"reward/source/{name}/count": 4.0 for name in names}
        )

    one = page_of(write_run_dir(tmp_path / "one", [row(1, "sums"), row(2, "sums")]))
    assert "reward_source" not in one.data["charts"] and "samples a step" not in one.text
    scores = {
        "val/sums/mean@4": 0.5,
        "val/sums/low": 0.4,
        "val/sums/high": 0.625,
        "val/sums/num_items": 40.0,
    }
    rows = [
        evaluation_row(0, 0.2, 0.1, 0.3, **scores),
        row(1, "sums", "words"),
        row(2, "sums", "words"),
    ]
    two = page_of(
        write_run_dir(
            tmp_path / "two",
            [*rows, evaluation_row(2, 0.2, 0.1, 0.3, **{**scores, "val/sums/mean@4": 0.75})],
        )
    )
    assert [series["label"] for series in two.series("reward_source")] == ["sums", "words"]
    assert "sums 4.0 0.250 0.500 0.500 [0.400, 0.625] 0.750 [0.400, 0.625] +0.250 40" in two.text
    assert "words 4.0 0.250 0.500 – – – 0" in two.text


def test_only_statuses_that_are_not_ok_are_drawn(tmp_path: Path) -> None:
    good = page_of(
        write_run_dir(
            tmp_path / "good", [step_row(i, 0.5, **{"reward/status/ok": 1.0}) for i in (1, 2)]
        )
    )
    assert (
        "The status of every reward was ok." in good.text
        and "reward_status" not in good.data["charts"]
    )
    rows = [step_row(1, 0.5, **{"reward/status/ok": 1.0})]
    rows += [step_row(2, 0.5, **{"reward/status/ok": 0.75, "reward/status/timeout": 0.25})]
    page = page_of(write_run_dir(tmp_path / "bad", rows))
    assert [(s["label"], s["x"], s["y"]) for s in page.series("reward_status")] == [
        ("timeout", [1, 2], [0.0, 0.25])
    ]
    assert "of every reward was ok" not in page.text and not any(
        "other" in name for name in page.data["charts"]
    )


def test_a_run_without_engines_says_so(tmp_path: Path) -> None:
    replayed = page_of(
        write_run_dir(
            tmp_path / "replayed", [step_row(1, 0.5, **{"rollout/finish_reason/stop": 1.0})]
        )
    )
    assert "This run had no engine: it was trained on recorded samples." in replayed.text
    assert [s["label"] for s in replayed.series("finish_reason")] == ["stop"]
    generated = page_of(
        write_run_dir(tmp_path / "generated", [step_row(1, 0.5, **{"sync/seconds": 0.25})])
    )
    assert "had no engine" not in generated.text and generated.series("sync")[0]["y"] == [0.25]


def test_the_head_says_what_the_health_rules_found(tmp_path: Path) -> None:
    rows = [step_row(step, 0.5, **{"reward/masked": 0.5}) for step in range(1, 8)]
    text = page_of(write_run_dir(tmp_path / "bad", rows)).text
    assert (
        "reward_errors (now) 3 5 7 the mean of reward/masked over 5 steps should be at most"
        " 0.05; it is 0.5."
    ) in text
    rows = [step_row(step, 0.5, **{"reward/masked": 0.0}) for step in range(1, 8)]
    assert "reward_errors" not in page_of(write_run_dir(tmp_path / "good", rows)).text


def test_a_health_verdict_links_to_what_it_means(tmp_path: Path) -> None:
    rows = [step_row(step, 0.5, **{"reward/masked": 0.5}) for step in range(1, 8)]
    page = page_of(write_run_dir(tmp_path / "bad", rows))
    links = {str(a.get("href")) for tag, a in page.tags if tag == "a"}
    assert {"#verdict-reward_errors", "#chart-groups"} <= links
    assert {"verdict-reward_errors", "chart-groups"} <= set(page.ids())
    assert "The step is smaller than it was meant to be. See reward/status/* for why" in page.text
    assert "All rules: docs/monitoring.md, section Health." in page.text


def test_charts_with_nothing_but_0_are_folded(tmp_path: Path) -> None:
    zeros = {"actor/pg_clipfrac": 0.0, "rollout/num_retractions": 0.0, "actor/entropy": 0.5}
    rows = [step_row(step, 0.0, **zeros) for step in (1, 2)]
    html = render_run_page(read_run_files(write_run_dir(tmp_path / "a", rows)), [])
    folded = re.findall(
        r"<details class=\"block\"><summary>(.*?)</summary>(.*?)</details>\n?", html
    )
    summaries = {summary for summary, _ in folded}
    assert "1 chart with nothing but 0: Clip fractions" in summaries
    assert "1 chart with nothing but 0: Retractions" in summaries
    page = Page(html)
    assert page.series("clip")[0]["y"] == [0.0, 0.0], "they are drawn when somebody unfolds them"
    before = html.partition("1 chart with nothing but 0: Clip fractions")[0]
    assert 'id="chart-entropy"' in before and 'id="chart-clip"' not in before
    assert not [
        summary for summary in summaries if "Reward," in summary or summary.endswith("Reward")
    ]


HELD_OUT = {
    "source": "sums",
    "prompt": "1+1=",
    "label": "2",
    "status": "ok",
    "parts": {"right": 1.0},
    "num_tokens": 2,
}


def held_out_line(step: int, item: int, response: str, **more: object) -> dict[str, object]:
    score = float(response == "2")
    texts = {"response": response, "score": score, "reward": score}
    return {**HELD_OUT, "step": step, "item": item, **texts, **more}


def test_held_out_samples_are_shown_with_one_prompt_over_the_steps(tmp_path: Path) -> None:
    rows = [step_row(1, 0.5), *(evaluation_row(step, 0.5, 0.4, 0.6) for step in (0, 1))]
    path = write_run_dir(tmp_path / "a", rows)
    assert (
        "No held-out samples: this run wrote no held_out_samples.jsonl: it is older, or was"
        " replayed."
    ) in page_of(path).text
    lines = [
        held_out_line(0, 0, "3"),
        held_out_line(1, 0, "5"),  # of an evaluation that was cut off and made again
        held_out_line(1, 0, "2"),
        held_out_line(0, 1, HOSTILE),
        held_out_line(1, 1, "9", score=None, reward=None, status="masked:endpoint"),
    ]
    write_lines(path / "held_out_samples.jsonl", lines)
    page = page_of(path)
    assert [(s["step"], s["item"], s["response"]) for s in page.data["held_out"]] == [
        (0, 0, "3"),
        (0, 1, HOSTILE),
        (1, 0, "2"),
        (1, 1, "9"),
    ]
    assert page.data["held_out"][3]["score"] is None
    assert "4 samples, of 2 evaluations" in page.text and "held_out_samples" in page.ids()


def test_units_and_meanings_are_found(whole: tuple[Path, Page]) -> None:
    for key, name in (("critic/rewards/mean",) * 2, ("timing_s/generate", "timing_s/<stage>")):
        assert describe_metric(key) == (METRIC_CATALOGUE[name].unit, METRIC_CATALOGUE[name].meaning)
    assert describe_metric("actor/pg_clipfrac")[0] == "share" and describe_metric("no/such") == (
        "",
        "",
    )
    assert whole[1].data["charts"]["entropy"]["unit"] == "nats"
    named = [
        key for section in REPORT_SECTIONS for spec in section.charts for key in spec.metric_keys
    ]
    assert [key for key in named if describe_metric(key) == ("", "")] == []


def test_page_and_pictures_share_their_colours() -> None:
    light = read_asset("report.css").split("@media")[0]
    assert re.findall(r"--c\d: (#\w+)", light) == list(PALETTE)


def test_a_report_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, rlhf_megatron.cli.report_command,"
        " rlhf_megatron.controller.observe.report.report_writer;"
        "print([m for m in ('torch', 'numpy', 'megatron', 'matplotlib', 'transformers') if m"
        " in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_the_page_of_a_long_run_stays_below_1_MB(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Shape())
    assert len(render_run_page(read_run_files(tmp_path / "run"), None).encode()) < 1_000_000
