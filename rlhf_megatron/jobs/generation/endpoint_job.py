"""`rlhf-megatron generate URL`: answers of any OpenAI-compatible server, into the same file, with
the same promises.

Each sample is a request of its own, with a seed of its own. One that fails for a reason that may
pass (no connection, no answer in time, a status that `retry.may_pass` names) is asked again, less
and less often, for `rollout.request_timeout_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from rlhf_megatron.config.schema import DataConfig, RolloutConfig
from rlhf_megatron.data.data_rows import ChatMessage, PromptRow, read_prompt_rows
from rlhf_megatron.data.extra_columns import (
    ExtraColumnWriter,
    LeftOutColumn,
    describe_left_out_columns,
)
from rlhf_megatron.data.seeds import derive_seed
from rlhf_megatron.jobs.generation.answer_file import (
    AnswerFile,
    digest_texts,
    make_sampling_fingerprint,
)
from rlhf_megatron.jobs.generation.answer_progress import ProgressReporter
from rlhf_megatron.retry import RetryPauses, may_pass, parse_retry_after
from rlhf_megatron.rollout.engine_interface import EngineError, EngineRequestError
from rlhf_megatron.stop import StopRequest

STEP = -1  # of the seeds: those of an evaluation
PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
_POLL_S = 0.2


@dataclass(frozen=True)
class EndpointChoice:
    text: str
    finish_reason: str
    num_tokens: int


@dataclass(frozen=True)
class EndpointJob:
    """A checked job that asks an OpenAI-compatible server; `run` does the work."""

    data: DataConfig
    rollout: RolloutConfig  # how answers are sampled, and how long they are waited for
    seed: int
    url: str  # with /v1
    model: str
    api_key: str | None
    rows: tuple[PromptRow, ...]
    output_path: Path
    num_concurrent_prompts: int  # prompts
    is_chat: bool
    overwrite: bool
    left_out_columns: tuple[LeftOutColumn, ...] = ()  # what rewards cannot read of the rows

    @classmethod
    def from_config(
        cls,
        data: DataConfig,
        rollout: RolloutConfig,
        seed: int,
        url: str,
        model: str,
        api_key: str | None,
        output_path: Path,
        num_concurrent_prompts: int,
        is_chat: bool,
        overwrite: bool,
    ) -> EndpointJob:
        """Return a job with the prompts of data.val_files. The server is not asked yet. Raise
        ValueError for errors that a user can fix, such as settings that an endpoint would ignore.
        """
        if not data.val_files:
            raise ValueError(
                f"generate {url} needs files of prompts: name them behind the address."
            )
        if data.few_shot.num_shots or rollout.stop:
            raise ValueError(
                "data.few_shot and rollout.stop would be ignored: an endpoint has its own tokens;"
                " write examples into data.prompt_template, and leave out the stop."
            )
        extra_writer = ExtraColumnWriter(data.extra_columns)
        rows, _ = read_prompt_rows(
            data.val_files, data.prompt_key, data.label_key, data.skip_bad_rows, extra_writer
        )
        extra_writer.check_named_columns()
        if not is_chat and any(not isinstance(row.prompt, str) for row in rows):
            raise ValueError("--completions needs prompts that are texts; some rows hold chats.")
        return cls(
            data,
            rollout,
            seed,
            url,
            model,
            api_key,
            rows,
            output_path,
            num_concurrent_prompts,
            is_chat,
            overwrite,
            extra_writer.list_left_out_columns(),
        )

    def list_labels(self) -> list[tuple[str, str, str]]:
        """Return (source, label, extra) of each prompt."""
        return [(row.source, row.label, row.extra) for row in self.rows]

    def run(self, stop: StopRequest, report: Callable[[str], None]) -> dict[str, float]:
        """Ask for all answers that the file lacks, and return the figures of this call, as
        `AnswerGenerationJob.run` does. Raise EngineError where the server refuses or does not
        answer, RunStopped when `stop` is requested.
        """
        if note := describe_left_out_columns(self.left_out_columns):
            report(note)
        fingerprint = make_sampling_fingerprint(
            self.rollout.val_kwargs, self.data.max_response_length, self.seed
        ) | {
            "model": f"{self.model} at {self.url}",
            "prompts": digest_texts([str(self._make_messages(row)) for row in self.rows]),
            "is_chat": self.is_chat,
        }
        with AnswerFile(self.output_path, fingerprint, len(self.rows), self.overwrite) as answers:
            if answers.answered_indices:
                report(
                    f"{len(answers.answered_indices)} of {len(self.rows)} prompts have an"
                    " answer already"
                )
            pace = ProgressReporter(len(self.rows) - len(answers.answered_indices), report)
            if not answers.is_complete:
                asyncio.run(self._answer_all(answers, pace, stop))
            answers.write_ordered_rows()
        return pace.collect_figures()

    async def _answer_all(
        self, answers: AnswerFile, pace: ProgressReporter, stop: StopRequest
    ) -> None:
        """Ask for all missing answers, a number of prompts at a time, and append each as it comes.
        Cancel the open requests on a stop or an error.
        """
        waiting = iter(
            [number for number in range(len(self.rows)) if number not in answers.answered_indices]
        )
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = aiohttp.ClientTimeout(self.rollout.request_timeout_s)

        async def answer_waiting_prompts(session: aiohttp.ClientSession) -> None:
            """Answer one waiting prompt after another until none is left."""
            for number in waiting:
                samples = range(self.rollout.val_kwargs.n)
                choices = await asyncio.gather(
                    *(self._request_choice(session, number, sample) for sample in samples)
                )
                answers.append(self._make_answer_row(number, choices))
                pace.count_prompt([choice.num_tokens for choice in choices])

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=limits, headers=headers
        ) as session:
            tasks = {
                asyncio.create_task(answer_waiting_prompts(session))
                for _ in range(self.num_concurrent_prompts)
            }
            try:
                while tasks:
                    stop.raise_if_requested()
                    done, tasks = await asyncio.wait(
                        tasks, timeout=_POLL_S, return_when=asyncio.FIRST_EXCEPTION
                    )
                    for task in done:
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _request_choice(
        self, session: aiohttp.ClientSession, prompt_number: int, sample_number: int
    ) -> EndpointChoice:
        """Return the server's answer for one sample of a prompt; ask again, less and less often,
        after failures that may pass. Raise EngineRequestError where the server refuses the request,
        EngineError when the time is over.
        """
        body = self._make_request_body(prompt_number, sample_number)
        where = self.rows[prompt_number].origin
        path = f"{self.url}/{'chat/' if self.is_chat else ''}completions"
        pauses = RetryPauses(
            self.rollout.request_timeout_s,
            PAUSE_S,
            LONGEST_PAUSE_S,
            # the same pauses each time, and others for each sample
            draw=lambda: derive_seed(prompt_number, sample_number, pauses.num_retries) / 2**31,
        )
        while True:
            pauses.start_try()
            retry_after_s = 0.0
            try:
                async with session.post(path, json=body) as response:
                    status = response.status
                    text = await response.text()
                    if status == 200:
                        return _parse_choice(await response.json(content_type=None))
                    retry_after_s = parse_retry_after(response.headers.get("Retry-After"))
                words = f"{status}: {text[:300]}"
                if not may_pass(status):
                    raise EngineRequestError(f"{path} refuses {where}: {words}")
            except (
                aiohttp.ClientError,
                TimeoutError,
                ValueError,
                KeyError,
                IndexError,
                TypeError,
            ) as error:
                words = f"{type(error).__name__}: {error}"
            pause_s = pauses.choose_pause(retry_after_s)
            if pause_s is None:
                raise EngineError(
                    f"{path} has not answered {where} within rollout.request_timeout_s: {words}."
                )
            await asyncio.sleep(pause_s)

    def _make_request_body(self, prompt_number: int, sample_number: int) -> dict[str, Any]:
        """Return the request for a sample, with a seed of its own. top_k and min_p are sent only if
        they are on, since OpenAI does not know them.
        """
        sampling = self.rollout.val_kwargs
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.data.max_response_length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": derive_seed(self.seed, STEP, prompt_number, sample_number),
        }
        body |= {"top_k": sampling.top_k} if sampling.top_k != -1 else {}
        body |= {"min_p": sampling.min_p} if sampling.min_p else {}
        messages = self._make_messages(self.rows[prompt_number])
        if self.is_chat:
            return body | {"messages": [{"role": m.role, "content": m.content} for m in messages]}
        return body | {"prompt": messages[-1].content}

    def _make_messages(self, row: PromptRow) -> tuple[ChatMessage, ...]:
        """Return the chat of a row: its messages, or its text in the prompt template, after the
        system prompt if there is one.
        """
        data = self.data
        prompt = row.prompt
        if isinstance(prompt, str):
            prompt = (ChatMessage("user", data.prompt_template.replace("{prompt}", prompt)),)
        return (
            prompt
            if data.system_prompt is None
            else (ChatMessage("system", data.system_prompt), *prompt)
        )

    def _make_answer_row(self, prompt_number: int, choices: list[EndpointChoice]) -> dict[str, Any]:
        """Return the row of the file for a prompt and its choices."""
        row = self.rows[prompt_number]
        found: dict[str, Any] = {
            "index": prompt_number,
            "source": row.source,
            "prompt": "\n".join(message.content for message in self._make_messages(row)),
            "answer": row.label,
            "responses": [choice.text for choice in choices],
            "finish_reasons": [choice.finish_reason for choice in choices],
            "num_tokens": [choice.num_tokens for choice in choices],
        }
        return found | ({"extra": row.extra} if row.extra else {})


async def fetch_model_name(url: str, api_key: str | None, timeout_s: float) -> str:
    """Return the name of the first model that the server lists. Raise ValueError if it lists none
    or does not answer. `url` ends in /v1.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        limits = aiohttp.ClientTimeout(timeout_s)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=limits) as session,
            session.get(f"{url}/models") as response,
        ):
            return str((await response.json(content_type=None))["data"][0]["id"])
    except (
        aiohttp.ClientError,
        TimeoutError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
    ) as error:
        raise ValueError(
            f"{url}/models names no model ({error!r}); give --model, or correct the address."
        ) from error


def _parse_choice(answer: Any) -> EndpointChoice:
    """Return the choice in a server's answer. Raise KeyError, IndexError, TypeError or ValueError
    for an answer that does not have OpenAI's form.
    """
    choice = answer["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"].get("content") or ""
    return EndpointChoice(
        str(text), str(choice["finish_reason"]), int(answer["usage"]["completion_tokens"])
    )
