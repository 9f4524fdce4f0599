"""Made-up talks of 14 kinds, and an oracle of joins that shares no code with the package's own:
the whole conversation is rendered and encoded, and the ids behind the last answer are compared.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import tokenizers

from rlhf_megatron.agents.dialogue import Dialogue, DialogueFormat, JoinRefusedError
from rlhf_megatron.data.chat_template import make_chat_format
from rlhf_megatron.data.tokenizer import Tokenizer

Messages = list[dict[str, Any]]
TEXTS = ("Paris.", "the sum is 42", "naïve café — 東京 🙂", "line one\nline two", "a  b\tc",
         '{"k": true}', "x < y && z > 0", "1,234.5 %")  # fmt: skip
RESULTS = (*TEXTS, "7", "  padded ", "\nnew line first")
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"x": 1},
    {"x": -3, "flag": True},
    {"x": 7, "flag": False, "s": 'a "quoted" word'},
    {"x": 0, "s": "東京 🙂"},
    {"x": 5, "s": "two\nlines"},
    {"x": 1, "s": ""},
    {"x": 2, "l": [1, 2.5, None], "o": {"a": {"b": True}}},
)
PROPERTIES = {"x": {"type": "integer"}, "flag": {"type": "boolean"}, "s": {"type": "string"},
              "zz": {"type": "string"}}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["x"]},
        },
    }
    for name in ("f", "g")
]
# special tokens that templates begin a message with, and that are stop tokens of these models
ROLE_STARTS = ("<|user|>", "<|observation|>", "<|tool_response>")
# with what a template ends an answer of the past where the model writes a stop token
REPLACED_ENDS = ("<|end|>",)


@dataclass(frozen=True)
class Talk:
    """A conversation up to an answer, and what follows the answer."""

    kind: str
    past: Messages  # up to the message that is answered
    answer: dict[str, Any]
    new: Messages
    tools: list[dict[str, Any]] | None
    is_cut: bool = False  # the answer has no stop token


class TalkMaker:
    """Makes messages whose texts occur once: each has a serial number."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.num_tags = 0

    def tag(self) -> str:
        self.num_tags += 1
        return f"tag{self.num_tags}e"

    def text(self, texts: Sequence[str] = TEXTS) -> str:
        """A text with its tag in front of white space at its end."""
        text = self.rng.choice(texts)
        visible = text.rstrip()
        return f"{visible} {self.tag()}{text[len(visible) :]}"

    def user(self) -> dict[str, Any]:
        return {"role": "user", "content": self.text()}

    def system(self) -> dict[str, Any]:
        return {"role": "system", "content": self.text()}

    def says(
        self, text: str, thought: str | None = None, calls: Messages | None = None
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thought is not None:
            message |= {"reasoning_content": thought, "thinking": thought}
        if calls:
            message["tool_calls"] = calls
        return message

    def calls(self, num_calls: int) -> Messages:
        """Calls whose last argument, by order and by name, is a tag."""
        return [
            {
                "id": f"call{self.num_tags:05d}",
                "type": "function",
                "function": {
                    "name": self.rng.choice("fg"),
                    "arguments": {**self.rng.choice(ARGUMENTS), "zz": self.tag()},
                },
            }
            for _ in range(num_calls)
        ]

    def results(self, calls: Messages) -> Messages:
        return [
            {
                "role": "tool",
                "content": self.text(RESULTS),
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
            }
            for call in calls
        ]


def make_talks(seed: int) -> Iterator[Talk]:
    """One talk of each kind."""
    make = TalkMaker(seed)
    user, says, calls, results, text = make.user, make.says, make.calls, make.results, make.text
    yield Talk("user after plain", [user()], says(text()), [user()], None)
    yield Talk("user after thought", [user()], says(text(), text()), [user()], None)
    yield Talk("user after empty thought", [user()], says(text(), ""), [user()], None)
    third = [make.system(), user(), says(text()), user()]
    yield Talk("third user turn", third, says(text()), [user()], None)
    first, second, last, pair = calls(1), calls(1), calls(1), calls(2)
    yield Talk("tool after call", [user()], says("", None, first), results(first), TOOLS)
    told = says(text(), None, first)
    yield Talk("tool after text and call", [user()], told, results(first), TOOLS)
    thought = says("", text(), first)
    yield Talk("tool after thought and call", [user()], thought, results(first), TOOLS)
    two = says("", None, pair)
    yield Talk("two results after two calls", [user()], two, results(pair), TOOLS)
    past = [make.system(), user(), says("", text(), first), *results(first)]
    again = says("", text(), second)
    yield Talk("second tool turn", past, again, results(second), TOOLS)
    past = [user(), says("", text(), first), *results(first)]
    yield Talk("user after a tool turn", past, says(text(), text()), [user()], TOOLS)
    past = [user(), says("", None, first), *results(first), says(text()), user()]
    yield Talk("tool in the second user turn", past, says("", None, last), results(last), TOOLS)
    yield Talk("truncated, then user", [user()], says(text(TEXTS[:2])), [user()], None, True)
    padded = says(f"  hello {make.tag()} \n")
    yield Talk("text with spaces at its ends", [user()], padded, [user()], None)
    called = says("", None, first)
    yield Talk("tool result and user", [user()], called, [*results(first), user()], TOOLS)


def make_walk(seed: int, num_answers: int) -> Iterator[Talk]:
    """The joins of one long talk of random turns, in order: the past of each is that of the one
    before it, its answer and what followed.
    """
    make = TalkMaker(seed)
    past = [make.system(), make.user()] if seed % 2 else [make.user()]
    for _ in range(num_answers):
        calls = make.calls(make.rng.choice((0, 1, 1, 2)))
        content = "" if calls and make.rng.random() < 0.7 else make.text()
        answer = make.says(content, make.rng.choice((None, make.text())), calls)
        new = make.results(calls) if calls else [make.user()]
        yield Talk("walk", list(past), answer, new, TOOLS)
        past += [answer, *new]


def find_tags(value: Any) -> set[str]:
    """The tags that stand in messages or in a text."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return set(re.findall(r"tag\d+e", text))


def find_last_tag(answer: dict[str, Any]) -> str:
    """The tag with which an answer ends."""
    calls = answer.get("tool_calls")
    if calls:
        return str(calls[-1]["function"]["arguments"]["zz"])
    return re.findall(r"tag\d+e", answer["content"])[-1]


def render_whole(dialogue_format: DialogueFormat, talk: Talk) -> str | None:
    """The whole conversation as the template writes it, in the first spelling of calls that has the
    answer's last argument in it; "" where none has. None where the template refuses all.
    """
    assert dialogue_format.chat is not None
    text = None
    for content, is_text in product(("", None), (False, True)):
        messages = []
        for message in (*talk.past, talk.answer, *talk.new):
            if message.get("tool_calls"):
                message = {
                    **message,
                    "content": message["content"] or content,
                    "tool_calls": [
                        {
                            **call,
                            "function": {
                                "name": call["function"]["name"],
                                "arguments": json.dumps(
                                    call["function"]["arguments"], ensure_ascii=False
                                )
                                if is_text
                                else call["function"]["arguments"],
                            },
                        }
                        for call in message["tool_calls"]
                    ],
                }
            messages.append(message)
        variables = {"tools": talk.tools} if talk.tools else {}
        try:
            written = dialogue_format.chat.render_messages(messages, is_bounded=False, **variables)
        except ValueError:
            continue
        if find_last_tag(talk.answer) in written:
            return written
        text = ""
    return text


def judge_join(
    dialogue_format: DialogueFormat, talk: Talk, stop_id: int | None, ids: tuple[int, ...]
) -> str:
    """ "exact", or what is wrong with the ids that were put behind the answer."""
    tokenizer = dialogue_format.tokenizer
    whole = render_whole(dialogue_format, talk)
    if not whole:
        return "joined although the template fails or leaves the answer out"
    whole_ids, offsets = tokenizer.encode_with_offsets(whole)
    if not ids or whole_ids[-len(ids) :] != ids:
        return "the template's text has other ids at its end"
    begin = offsets[-len(ids)][0]
    last_tag = find_last_tag(talk.answer)
    answer_end = whole.rindex(last_tag) + len(last_tag)
    if begin < answer_end:
        return "the ids begin within the answer"
    closing = whole[answer_end:begin]
    missing = find_tags(talk.new) & find_tags(whole) - find_tags(whole[begin:])
    if missing:
        return f"new messages are missing: {missing}"
    if find_tags(talk.answer) & find_tags(whole[answer_end:]):
        return "a part of the answer stands behind its end"
    stop_texts = [tokenizer.special_tokens_by_id[i] for i in dialogue_format.stop_token_ids]
    if stop_id is None:
        return "exact" if not closing else f"{closing!r} is missing behind the cut answer"
    stop_text = tokenizer.special_tokens_by_id[stop_id]
    if closing.endswith(stop_text):
        return "exact"
    if closing.endswith(ROLE_STARTS):
        return f"{stop_text} stands where the template begins a message"
    if closing.endswith((*stop_texts, *REPLACED_ENDS)):
        return "exact"
    return f"the answer ends with {stop_text}, and the template writes {closing!r}"


def join_talk(
    dialogue_format: DialogueFormat, talk: Talk, stop_id: int | None
) -> tuple[int, ...] | str:
    """The ids that a dialogue puts behind the answer, or why it refuses."""
    dialogue = Dialogue(dialogue_format)
    text = talk.answer["content"] or "a call"
    answer_ids = dialogue_format.tokenizer.encode(text.rstrip())
    try:
        dialogue.append_messages(talk.past, talk.tools)
        dialogue.append_answer((*answer_ids, *([] if stop_id is None else [stop_id])), talk.answer)
        return dialogue.append_messages([*talk.past, talk.answer, *talk.new], talk.tools)
    except JoinRefusedError as error:
        return str(error)


@dataclass(frozen=True)
class Verdict:
    """What became of one talk."""

    outcome: str  # "exact", "refused", "template fails" or "wrong"
    detail: str


def judge_talk(dialogue_format: DialogueFormat, talk: Talk) -> Verdict:
    """Join a talk behind each stop token: one that is exact makes the talk exact, and one that is
    wrong makes it wrong.
    """
    stop_ids: tuple[int | None, ...] = dialogue_format.stop_token_ids
    if talk.is_cut:
        stop_ids = (None,)
    num_exact = 0
    reasons = []
    for stop_id in stop_ids:
        joined = join_talk(dialogue_format, talk, stop_id)
        if isinstance(joined, str):
            reasons.append(joined)
            continue
        problem = judge_join(dialogue_format, talk, stop_id, joined)
        if problem != "exact":
            return Verdict("wrong", problem)
        num_exact += 1
    if num_exact:
        return Verdict("exact", "")
    if not render_whole(dialogue_format, talk):
        return Verdict("template fails", reasons[0])
    return Verdict("refused", reasons[0])


SPECIAL_TOKENS = re.compile(
    r"<\|[^|<>{}'\"\s]{1,40}\|>|<｜[^｜]{1,40}｜>|<\|[a-z_\"]{1,20}>|<[a-z_]{1,20}\|>"
    r"|</?(?:start_of_turn|end_of_turn|bos|eos|end_of_utterance|s)>|\[/?[A-Z_]{3,}\]|\]~b\]|\[e~\[|\]~!b\["
)
ADDED_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
                "</tool_response>")  # fmt: skip


def make_template_format(
    template: str, stop_texts: Sequence[str], tokenizer: Tokenizer | None = None
) -> DialogueFormat:
    """A template with a byte-level tokenizer that is trained on it, or with the vocabulary of
    `tokenizer`, and that has the template's special tokens.
    """
    if tokenizer is None:
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=600,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator([template, *TEXTS] * 2, trainer)
    else:
        backend = tokenizers.Tokenizer.from_str(tokenizer.write_json())
    special_tokens = sorted({*SPECIAL_TOKENS.findall(template), *stop_texts, "<bos>"})
    for names, is_special in ((special_tokens, True), (ADDED_TOKENS, False)):
        backend.add_tokens(
            [
                tokenizers.AddedToken(name, special=is_special, normalized=False)
                for name in names
                if backend.token_to_id(name) is None
            ]
        )
    stop_ids = [backend.token_to_id(text) for text in stop_texts]
    names = {"eos_token": stop_texts[0], "bos_token": "<bos>"}
    made = Tokenizer(backend, stop_ids, stop_ids[0], template, names)
    day = {"strftime_now": "2026-01-01"} if "strftime_now" in template else {}
    return DialogueFormat(made, make_chat_format(made, None, day), tuple(stop_ids))
