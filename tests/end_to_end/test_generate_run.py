"""`rlhf-megatron generate` and `evaluate` as users run them: engines and the job itself are killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from end_to_end_tools import MARKER, ONE_RANK, processes_with, train, wait_for_the_end, write_config
from places import ROOT

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


class Job:
    """The program in a directory of its own."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.marker = f"{MARKER}={os.urandom(16).hex()}"
        name, _, value = self.marker.partition("=")
        environment = {**os.environ, name: value, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.console = directory / "console"
        with self.console.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlhf_megatron", *words],
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for_answers(self, path: Path, count: int) -> None:
        deadline = time.monotonic() + 120
        while not path.exists() or path.read_bytes().count(b"\n") < count:
            assert self.process.poll() is None and time.monotonic() < deadline, self.console.read_text()
            time.sleep(0.01)

    def engines(self) -> list[int]:
        words = "rlhf_megatron.rollout.local.server"
        return [pid for pid in processes_with(self.marker) if words in " ".join(psutil.Process(pid).cmdline())]

    def end(self) -> int:
        try:
            return self.process.wait(180)
        finally:
            for pid in wait_for_the_end(self.marker, within_s=10):
                os.kill(pid, signal.SIGKILL)


def write_prompts(path: Path, count: int) -> Path:
    rows = [{"prompt": f"{i // 100:02d}+{i % 100:02d}=", "answer": f"{i // 100 + i % 100:03d}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(directory: Path, *words: str, code: int = 0) -> str:
    job = Job(directory, *words)
    assert job.end() == code, job.console.read_text()
    return job.console.read_text()


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


def test_a_run_s_checkpoint_has_the_figure_of_its_own_evaluation(tmp_path: Path) -> None:
    """Of the last step, from the state that a run keeps by default."""
    trained = train(write_config(tmp_path), ONE_RANK | {"trainer.deterministic": True})
    assert trained.exit_code == 0 and not (trained.run_dir / "hf").exists(), trained.console
    own = trained.rows("evaluation")[-1]
    words = ("--out", "answers.jsonl", "--json", "figures.json")
    run(tmp_path, "evaluate", str(trained.run_dir), "--step", str(own["step"]), *words)
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["sets"][0]["num_items"] == own["val/num_items"]
    assert [found[name] for name in ("mean", "low", "high")] == [
        own[f"val/accuracy{ending}"] for ending in ("", "_low", "_high")
    ]
