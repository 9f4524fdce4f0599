"""What OpenAI's endpoints are asked, read strictly: a field that this server would ignore is
refused, with the reason.

The wire format is that of https://platform.openai.com/docs/api-reference (chat and
legacy completions).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from rlhf_megatron.data.chat_template import ChatFormat
from rlhf_megatron.data.message_content import drop_absent_entries
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.rollout.engine_interface import SamplingParams

MOST_CHOICES = 1024  # of one request, over all its prompts
_Count = Annotated[int, msgspec.Meta(ge=1)]
T = TypeVar("T", bound="CommonRequest")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class CommonRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Fields of both endpoints. top_k, min_p and stop_token_ids are not OpenAI's; vLLM and
    SGLang name them so.
    """

    model: str | None = None
    max_tokens: _Count | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHOICES)] = 1
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str = ""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] = {}

    def find_refusal(self) -> str:
        """Return what this server cannot do of the request, with the reason; "" if it can do
        everything.
        """
        if self.frequency_penalty or self.presence_penalty or self.logit_bias:
            return (
                "frequency_penalty, presence_penalty and logit_bias change the distribution, and"
                " log-probs are those of the model's own; leave them out."
            )
        if self.stream_options is not None and not self.stream:
            return "stream_options needs stream: true."
        return ""


class CompletionRequest(CommonRequest, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]] = msgspec.field(default_factory=list)
    logprobs: int | None = None
    echo: bool = False
    # of vLLM and SGLang; null: as data.add_special_tokens says
    add_special_tokens: bool | None = None
    best_of: int | None = None

    def find_refusal(self) -> str:
        """Return what this server cannot do of the completion request, with the reason; "" if it
        can do everything.
        """
        if self.logprobs:
            return (
                f"logprobs is {self.logprobs}: engines tell the log-prob of the drawn token"
                " alone; ask for 0."
            )
        if self.echo or self.best_of not in (None, self.n):
            return "echo and best_of are not offered: send n, and put the prompt in front yourself."
        return super().find_refusal()


class ChatRequest(CommonRequest, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_completion_tokens: _Count | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] | dict[str, Any] | str = "auto"
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def find_refusal(self) -> str:
        """Return what this server cannot do of the chat request, with the reason; "" if it can do
        everything.
        """
        if self.top_logprobs:
            return (
                f"top_logprobs is {self.top_logprobs}: engines tell the log-prob of the drawn"
                " token alone."
            )
        if self.tool_choice not in ("auto", "none"):
            return (
                f"tool_choice {json.dumps(self.tool_choice)} needs a grammar, which no engine here"
                " has; use auto."
            )
        if self.response_format not in (None, {"type": "text"}):
            return (
                "response_format needs a grammar, which no engine here has; leave it out, and ask"
                " for it in words."
            )
        return super().find_refusal()


@dataclass(frozen=True)
class CheckedRequest:
    """A request that was read and checked."""

    prompts: tuple[tuple[int, ...], ...]
    num_choices: int  # choices a prompt
    seed: int
    sampling_params: SamplingParams
    stop_texts: tuple[str, ...]
    is_stream: bool
    includes_usage: bool  # a last chunk with counts
    includes_log_probs: bool
    has_tools: bool  # calls of tools are looked for


@dataclass(frozen=True)
class ServedModel:
    """The model that answers: its names, texts and limits."""

    name: str
    tokenizer: Tokenizer
    chat_format: ChatFormat | None
    stop_token_ids: tuple[int, ...]
    max_tokens: int  # prompt and response together
    vocab_size: int
    # write what the tokenizer writes before a plain text, where a request does not say
    add_special_tokens: bool = True


class RequestError(ValueError):
    """A request that is wrong: the message says why, and `status` is the HTTP status of
    the answer.
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        """Keep the HTTP status and OpenAI's error code beside the message."""
        super().__init__(message)
        self.status = status
        self.code = code


def parse_request(data: bytes, request_type: type[T], served_model: ServedModel) -> T:
    """Return the body as a request of this type; a null counts as a field left out. Raise
    RequestError for a malformed body, another model (404), and fields that this server cannot
    honour.
    """
    try:
        raw = msgspec.json.decode(data or b"{}")
        given = (
            {name: value for name, value in raw.items() if value is not None}
            if isinstance(raw, dict)
            else raw
        )
        body = msgspec.convert(given, request_type)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise RequestError(f"the body is not understood: {error}.") from None
    if body.model not in (None, served_model.name):
        raise RequestError(
            f"there is no model {body.model!r} here; it is {served_model.name!r}.",
            404,
            "model_not_found",
        )
    problem = body.find_refusal()
    if problem:
        raise RequestError(problem)
    return body


def check_request(
    body: ChatRequest | CompletionRequest, served_model: ServedModel
) -> CheckedRequest:
    """Return the request with its prompts as token ids, and its sampling parameters. Raise
    RequestError for a prompt that cannot be tokenized or is too long, too many answers, and
    impossible values. Without a seed, draw one.
    """
    if isinstance(body, ChatRequest):
        # the chat template writes the control tokens of a chat itself
        prompts: Sequence[tuple[int, ...]] = (
            _encode_text(render_chat_prompt(body, served_model), served_model, False),
        )
        most = body.max_completion_tokens or body.max_tokens
        log_probs = body.logprobs
    else:
        adds_tokens = body.add_special_tokens
        if adds_tokens is None:
            adds_tokens = served_model.add_special_tokens
        prompts = _encode_prompts(body.prompt, served_model, adds_tokens)
        most = body.max_tokens or 16
        log_probs = body.logprobs is not None
    longest = max(map(len, prompts))
    room = served_model.max_tokens - longest
    if room < 1 or (most or 1) > room:
        asked = f" and {most} of the response" if most else ""
        raise RequestError(
            (
                f"the prompt has {longest} tokens{asked}; together they may be"
                f" {served_model.max_tokens} at most."
            ),
            code="context_length_exceeded",
        )
    if len(prompts) * body.n > MOST_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with n {body.n} are more than {MOST_CHOICES} answers at once."
        )
    for prompt in prompts:
        if not prompt or not 0 <= min(prompt) <= max(prompt) < served_model.vocab_size:
            raise RequestError(
                f"a prompt needs at least one token, each from 0 to {served_model.vocab_size - 1}."
            )
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if "" in stops:
        raise RequestError("a stop must not be empty.")
    return CheckedRequest(
        tuple(prompts),
        body.n,
        secrets.randbits(31) if body.seed is None else body.seed,
        _make_sampling_params(body, most or room, served_model),
        stops,
        body.stream,
        body.stream_options is not None and body.stream_options.include_usage,
        log_probs,
        isinstance(body, ChatRequest) and bool(body.tools) and body.tool_choice == "auto",
    )


def render_chat_prompt(body: ChatRequest, served_model: ServedModel) -> str:
    """Return the messages in the model's chat template, with tools if they may be called. Raise
    RequestError without a template, and with the template's own message where it refuses them.
    """
    if served_model.chat_format is None:
        raise RequestError("the model's tokenizer has no chat template; use /v1/completions.")
    messages = [_convert_message(message) for message in body.messages]
    variables = dict(body.chat_template_kwargs)
    if body.tools and body.tool_choice == "auto":
        variables["tools"] = body.tools
    try:
        # Weight syncs map files of any size meanwhile: a limit on the process's memory
        # would hit them.
        return served_model.chat_format.render_messages(messages, is_bounded=False, **variables)
    except (ValueError, TypeError) as error:
        raise RequestError(f"the model's chat template refuses the messages: {error}.") from error


def _convert_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in the form that templates read: its content as text, and the arguments of
    tool calls as objects. Raise RequestError for another form.
    """
    if not isinstance(message.get("role"), str):
        raise RequestError('each message needs a "role".')
    read = {
        **drop_absent_entries(message),
        "content": _join_text_content(message.get("content")),
    }
    try:
        if message.get("tool_calls"):
            calls = [{**call, "function": dict(call["function"])} for call in message["tool_calls"]]
            for function in (
                call["function"] for call in calls if isinstance(call["function"]["arguments"], str)
            ):
                function["arguments"] = json.loads(function["arguments"])
            read["tool_calls"] = calls
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(
            "tool_calls of a message must be calls of functions with arguments as JSON."
        ) from error
    return read


def _join_text_content(content: Any) -> str:
    """Return the text of a message's content, joined from its parts if it is a list; None gives "".
    Raise RequestError for content that is no text.
    """
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise RequestError("a part of a message is no text; this server reads text alone.")
        return "".join(str(part.get("text") or "") for part in content)
    if content is not None and not isinstance(content, str):
        raise RequestError(f"the content of a message must be text, not {type(content).__name__}.")
    return content or ""


def _make_sampling_params(
    body: CommonRequest, max_new_tokens: int, served_model: ServedModel
) -> SamplingParams:
    """Return the sampling parameters of a request, with the model's stop tokens added to its own.
    Raise RequestError for values out of range.
    """
    if not 0 <= body.temperature <= 100 or not 0 < body.top_p <= 1 or not 0 <= body.min_p <= 1:
        raise RequestError(
            "temperature must be from 0 to 100, top_p above 0 and at most 1, min_p from 0 to 1."
        )
    if body.top_k not in (-1, 0) and body.top_k < 1:
        raise RequestError(f"top_k ({body.top_k}) must be at least 1, or -1 (off).")
    stops = tuple(dict.fromkeys((*served_model.stop_token_ids, *body.stop_token_ids)))
    return SamplingParams(
        max_new_tokens, body.temperature, stops, body.top_p, body.top_k or -1, body.min_p
    )


def _encode_prompts(
    prompt: str | list[Any], served_model: ServedModel, add_special_tokens: bool
) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt; `prompt` is a text, a list of token ids, or a list of
    these. Token ids stay as they are. `add_special_tokens`: a text gets what the tokenizer writes
    before it. Raise RequestError for anything else.
    """
    if isinstance(prompt, str):
        return [_encode_text(prompt, served_model, add_special_tokens)]
    if prompt and all(isinstance(item, int) for item in prompt):
        return [tuple(prompt)]
    if not prompt or any(isinstance(item, int) for item in prompt):
        raise RequestError("prompt must be a text, a list of token ids, or a list of these.")
    return [
        _encode_text(item, served_model, add_special_tokens)
        if isinstance(item, str)
        else tuple(item)
        for item in prompt
    ]


def _encode_text(text: str, served_model: ServedModel, add_special_tokens: bool) -> tuple[int, ...]:
    """Return the token ids of a text, behind what the tokenizer writes before text where
    `add_special_tokens`. Raise RequestError where the tokenizer refuses the text.
    """
    try:
        return served_model.tokenizer.encode_opening([text], add_special_tokens)[0]
    except ValueError as error:
        raise RequestError(str(error)) from error
