"""`rlhf-megatron generate URL`: answers of any OpenAI-compatible server, into the same file, with the same promises.

Each sample is a request of its own, with a seed of its own. One that fails for a reason that may pass (no connection,
no answer in time, status 408, 429 or 5xx) is asked again, less and less often, for `rollout.request_timeout_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from rlhf_megatron.config.schema import DataConfig, RolloutConfig
from rlhf_megatron.data.rows import ChatMessage, PromptRow, read_rows
from rlhf_megatron.data.seeds import derive_seed
from rlhf_megatron.generation.answer_file import AnswerFile, asked_of, digest_of
from rlhf_megatron.generation.pace import Pace
from rlhf_megatron.rollout.engine import EngineError, EngineRequestError
from rlhf_megatron.stop import StopRequest

STEP = -1  # of the seeds: those of an evaluation
PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
_POLL_S = 0.2
_PASSING = (408, 425, 429)


@dataclass(frozen=True)
class Choice:
    text: str
    finish_reason: str
    num_tokens: int


@dataclass(frozen=True)
class EndpointJob:
    """A checked job: `run` does it."""

    data: DataConfig
    rollout: RolloutConfig  # how answers are sampled, and how long they are waited for
    seed: int
    url: str  # with /v1
    model: str
    key: str | None
    rows: tuple[PromptRow, ...]
    out: Path
    num_at_once: int  # prompts
    is_chat: bool
    overwrite: bool

    @classmethod
    def of(
        cls,
        data: DataConfig,
        rollout: RolloutConfig,
        seed: int,
        url: str,
        model: str,
        key: str | None,
        out: Path,
        num_at_once: int,
        is_chat: bool,
        overwrite: bool,
    ) -> EndpointJob:
        """Read the prompts. Raises ValueError for what a user can fix; asks nothing."""
        if not data.val_files:
            raise ValueError(f"generate {url} needs files of prompts: name them behind the address.")
        if data.few_shot.num_shots or rollout.stop:
            raise ValueError(
                "data.few_shot and rollout.stop would be ignored: an endpoint has its own tokens; write examples into"
                " data.prompt_template, and leave out the stop."
            )
        rows, _ = read_rows(data.val_files, data.prompt_key, data.label_key, data.skip_bad_rows)
        if not is_chat and any(not isinstance(row.prompt, str) for row in rows):
            raise ValueError("--completions needs prompts that are texts; some rows hold chats.")
        return cls(data, rollout, seed, url, model, key, rows, out, num_at_once, is_chat, overwrite)

    def run(self, stop: StopRequest, report: Callable[[str], None]) -> dict[str, float]:
        """Write the answers, as `generation.job.GenerateJob.run` does."""
        asked = asked_of(self.rollout.val_kwargs, self.data.max_response_length, self.seed) | {
            "model": f"{self.model} at {self.url}",
            "prompts": digest_of([str(self._messages(row)) for row in self.rows]),
            "is_chat": self.is_chat,
        }
        with AnswerFile(self.out, asked, len(self.rows), self.overwrite) as answers:
            if answers.done:
                report(f"{len(answers.done)} of {len(self.rows)} prompts have an answer already")
            pace = Pace(len(self.rows) - len(answers.done), report)
            if not answers.is_complete:
                asyncio.run(self._answer_all(answers, pace, stop))
            answers.finish()
        return pace.figures()

    async def _answer_all(self, answers: AnswerFile, pace: Pace, stop: StopRequest) -> None:
        waiting = iter([number for number in range(len(self.rows)) if number not in answers.done])
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        limits = aiohttp.ClientTimeout(self.rollout.request_timeout_s)

        async def work(session: aiohttp.ClientSession) -> None:
            for number in waiting:
                samples = range(self.rollout.val_kwargs.n)
                choices = await asyncio.gather(*(self._choice(session, number, sample) for sample in samples))
                answers.append(self._row(number, choices))
                pace.add([choice.num_tokens for choice in choices])

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=limits, headers=headers) as session:
            tasks = {asyncio.create_task(work(session)) for _ in range(self.num_at_once)}
            try:
                while tasks:
                    stop.check()
                    done, tasks = await asyncio.wait(tasks, timeout=_POLL_S, return_when=asyncio.FIRST_EXCEPTION)
                    for task in done:
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _choice(self, session: aiohttp.ClientSession, number: int, sample: int) -> Choice:
        """Raises EngineRequestError where the server refuses the request, EngineError where time is over."""
        body, where = self._body(number, sample), self.rows[number].origin
        path = f"{self.url}/{'chat/' if self.is_chat else ''}completions"
        end, pause_s = time.monotonic() + self.rollout.request_timeout_s, PAUSE_S
        while True:
            try:
                async with session.post(path, json=body) as response:
                    status, text = response.status, await response.text()
                    if status == 200:
                        return _choice_of(await response.json(content_type=None))
                words = f"{status}: {text[:300]}"
                if status < 500 and status not in _PASSING:
                    raise EngineRequestError(f"{path} refuses {where}: {words}")
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError, TypeError) as error:
                words = f"{type(error).__name__}: {error}"
            if time.monotonic() + pause_s > end:
                raise EngineError(f"{path} has not answered {where} within rollout.request_timeout_s: {words}.")
            await asyncio.sleep(pause_s * (0.5 + derive_seed(number, sample, int(pause_s * 8)) / 2**32))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _body(self, number: int, sample: int) -> dict[str, Any]:
        """Only what differs from OpenAI's own defaults is said beside temperature and top_p."""
        sampling = self.rollout.val_kwargs
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.data.max_response_length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": derive_seed(self.seed, STEP, number, sample),
        }
        body |= {"top_k": sampling.top_k} if sampling.top_k != -1 else {}
        body |= {"min_p": sampling.min_p} if sampling.min_p else {}
        messages = self._messages(self.rows[number])
        if self.is_chat:
            return body | {"messages": [{"role": m.role, "content": m.content} for m in messages]}
        return body | {"prompt": messages[-1].content}

    def _messages(self, row: PromptRow) -> tuple[ChatMessage, ...]:
        data, prompt = self.data, row.prompt
        if isinstance(prompt, str):
            prompt = (ChatMessage("user", data.prompt_template.replace("{prompt}", prompt)),)
        return prompt if data.system_prompt is None else (ChatMessage("system", data.system_prompt), *prompt)

    def _row(self, number: int, choices: list[Choice]) -> dict[str, Any]:
        row = self.rows[number]
        found: dict[str, Any] = {
            "index": number,
            "source": row.source,
            "prompt": "\n".join(message.content for message in self._messages(row)),
            "answer": row.label,
            "responses": [choice.text for choice in choices],
            "finish_reasons": [choice.finish_reason for choice in choices],
            "num_tokens": [choice.num_tokens for choice in choices],
        }
        return found | ({"extra": row.extra} if row.extra else {})


async def model_of(url: str, key: str | None, timeout_s: float) -> str:
    """The first model that the server names. Raises ValueError."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        limits = aiohttp.ClientTimeout(timeout_s)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=limits) as session,
            session.get(f"{url}/models") as response,
        ):
            return str((await response.json(content_type=None))["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{url}/models names no model ({error!r}); give --model, or correct the address.") from error


def _choice_of(answer: Any) -> Choice:
    """Raises KeyError, IndexError or TypeError for what is no answer of OpenAI's form."""
    choice = answer["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"].get("content") or ""
    return Choice(str(text), str(choice["finish_reason"]), int(answer["usage"]["completion_tokens"]))
