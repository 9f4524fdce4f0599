"""`rlhf-megatron generate` and `evaluate` as users run them: engines and the job itself are killed on the way."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from end_to_end_tools import ONE_RANK, train, write_config
from places import ROOT
from program_jobs import Job, run

from rlhf_megatron.evaluation.evaluation import best_of
from rlhf_megatron.generation.answer_file import read_answers

pytestmark = pytest.mark.dist
MODEL = ROOT / "examples" / "quickstart" / "warm_model"
SMALL = (
    "trainer.deterministic=true",
    "trainer.device=cpu",
    "rollout.max_num_seqs=16",
    "rollout.health_interval_s=0.2",
    "rollout.num_engines=2",
)
SAMPLED = ("-n", "3", "--temperature", "1.0", "--max-tokens", "4", *SMALL)


def write_prompts(path: Path, count: int) -> Path:
    rows = [{"prompt": f"{i // 100:02d}+{i % 100:02d}=", "answer": f"{i // 100 + i % 100:03d}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with prompts and the answers of a job that was left alone."""
    directory = tmp_path_factory.mktemp("whole")
    write_prompts(directory / "prompts.jsonl", 300)
    run(directory, "generate", str(MODEL), "prompts.jsonl", *SAMPLED, "--tokens", "--out", "answers.jsonl")
    return directory


def test_killed_engines_and_a_killed_job_lose_and_double_nothing(whole: Path, tmp_path: Path) -> None:
    words = ("generate", str(MODEL), str(whole / "prompts.jsonl"), *SAMPLED, "--tokens")
    answers = tmp_path / "answers.jsonl"
    job = Job(tmp_path, *words, "--out", "answers.jsonl")
    try:
        job.wait_for_answers(answers, 1)
        os.kill(job.engines()[0], signal.SIGKILL)
        job.wait_for_answers(answers, 60)
        job.process.kill()
    finally:
        assert job.end() == -signal.SIGKILL
    with answers.open("ab") as file:
        file.write(b'{"index": 299, "respon')  # the end of a line that was being written
    assert 60 <= answers.read_bytes().count(b"\n") < 300
    console = run(tmp_path, *words, "--out", "answers.jsonl")
    assert "of 300 prompts have an answer already" in console and "answers to 300 prompts" in console
    assert answers.read_bytes() == (whole / "answers.jsonl").read_bytes(), "bit for bit, in order"
    assert [row["index"] for row in read_answers(answers)] == list(range(300))


@pytest.mark.long
def test_random_kills_of_engines_and_job_over_two_thousand_prompts(tmp_path: Path) -> None:
    """Six engines while they answer, and the job itself at about half: the file is that of a job left alone."""
    write_prompts(tmp_path / "prompts.jsonl", 2000)
    words = ("generate", str(MODEL), "prompts.jsonl", "--temperature", "1.0", "--max-tokens", "8", *SMALL)
    words = (*words, "rollout.num_engines=3", "rollout.max_engine_restarts=100", "rollout.request_retries=10")
    run(tmp_path, *words, "--out", "whole.jsonl")
    draw, answers, num_kills, is_killed = random.Random(7), tmp_path / "answers.jsonl", 0, False
    for _ in range(2):
        job, deadline = Job(tmp_path, *words, "--out", "answers.jsonl"), time.monotonic() + 600
        try:
            while job.process.poll() is None:
                assert time.monotonic() < deadline, job.console.read_text()
                count = answers.read_bytes().count(b"\n") if answers.exists() else 0
                if count >= 1000 and not is_killed:
                    job.process.kill()
                    is_killed = True
                engines = job.engines() if "engine(s) serve" in job.console.read_text().split("already")[-1] else []
                if engines and num_kills < 6 and draw.random() < 0.3:
                    with suppress(ProcessLookupError):
                        os.kill(draw.choice(engines), signal.SIGKILL)
                        num_kills += 1
                time.sleep(0.5)
        finally:
            code = job.end()
    assert code == 0 and is_killed and num_kills > 2, job.console.read_text()
    assert answers.read_bytes() == (tmp_path / "whole.jsonl").read_bytes(), "each once, bit for bit"


def test_a_stopped_job_says_how_it_goes_on(whole: Path, tmp_path: Path) -> None:
    words = ("generate", str(MODEL), str(whole / "prompts.jsonl"), *SAMPLED, "--out", "answers.jsonl")
    job = Job(tmp_path, *words)
    job.wait_for_answers(tmp_path / "answers.jsonl", 1)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 75 and "the same command goes on" in job.console.read_text()
    refused = run(tmp_path, *words, "trainer.seed=7", code=1)
    assert "has answers of another job (seed: 1 there, 7 here)" in refused and "--overwrite" in refused


def test_evaluate_counts_as_brute_force_does(whole: Path, tmp_path: Path) -> None:
    console = run(whole, "evaluate", "answers.jsonl", "--json", str(tmp_path / "figures.json"))
    found: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())["sets"][0]
    right = [
        [text.strip() == row["answer"] for text in row["responses"]] for row in read_answers(whole / "answers.jsonl")
    ]
    assert found["scores"] == [[float(r) for r in item] for item in right]
    assert found["mean"] == pytest.approx(sum(map(sum, right)) / 900, abs=1e-12)
    best = {f["k"]: f["value"] for f in found["figures"] if f["name"] == "best"}
    assert best[2] == pytest.approx(sum(best_of([float(r) for r in item], 2) for item in right) / 300, abs=1e-12)
    assert best[3] == pytest.approx(sum(any(item) for item in right) / 300, abs=1e-12)
    assert f"{found['mean']:6.4f}" in console


def test_two_files_are_compared_prompt_by_prompt(whole: Path) -> None:
    greedy = ("--temperature", "0", "--max-tokens", "4", *SMALL)
    run(whole, "generate", str(MODEL), "prompts.jsonl", *greedy, "--out", "greedy.jsonl")
    console = run(whole, "evaluate", "answers.jsonl", "greedy.jsonl").splitlines()[-1]
    means = []
    for name in ("answers.jsonl", "greedy.jsonl"):
        rows = list(read_answers(whole / name))
        means.append([sum(t.strip() == r["answer"] for t in r["responses"]) / len(r["responses"]) for r in rows])
    difference = sum(b - a for a, b in zip(*means, strict=True)) / 300
    assert console.startswith(f"greedy.jsonl minus answers.jsonl: {difference:+.4f} [") and "over 300 items" in console


def test_a_run_s_checkpoints_have_the_figures_of_its_own_evaluations(tmp_path: Path) -> None:
    """Along its steps, to the last digit, with engines that are started once; and of one step alone."""
    settings = {"trainer.deterministic": True, "trainer.save_freq": 1, "trainer.test_freq": 1}
    trained = train(write_config(tmp_path), ONE_RANK | settings)
    assert trained.exit_code == 0 and not (trained.run_dir / "hf").exists(), trained.console
    own = {row["step"]: row for row in trained.rows("evaluation")}
    words = ("--every-step", "--out", "answers", "--json", "figures.json", "--report", "page.html")
    console = run(tmp_path, "evaluate", str(trained.run_dir), *words)
    found = json.loads((tmp_path / "figures.json").read_text())["steps"]
    assert len(found) > 1 and {figures["step"] for figures in found} <= own.keys()
    for figures in found:
        row = own[figures["step"]]
        assert figures["sets"][0]["num_items"] == row["val/num_items"]
        assert [figures[name] for name in ("mean", "low", "high")] == [
            row[f"val/accuracy{ending}"] for ending in ("", "_low", "_high")
        ]
    assert console.count("engine(s) serve") == 1
    html = (tmp_path / "page.html").read_text()
    assert html.count("<h2>step") == len(found) and "mean score over steps" in html
    step = str(found[0]["step"])
    run(tmp_path, "evaluate", str(trained.run_dir), "--step", step, "--out", "one.jsonl", "--json", "one.json")
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "answers" / f"step_{int(step):06d}.jsonl").read_bytes()
    assert json.loads((tmp_path / "one.json").read_text())["mean"] == found[0]["mean"]
