"""`openai_program.py URL KEY sampled|greedy|tools`: OpenAI's own client against a server of ours,
where its package is.

`tools`: the model behind the server calls add(a=1) for whatever it is asked.
"""

from __future__ import annotations

import json
import sys

import openai


def main(url: str, key: str, kind: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
    (model,) = client.models.list().data
    if kind == "tools":
        call_tools(client, model.id)
    else:
        talk(client, model.id, 1.0 if kind == "sampled" else 0.0)
    print(f"openai {openai.__version__} is content")


TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]


def call_tools(client: openai.OpenAI, model: str) -> None:
    """Whole and streamed; the call and its result go back."""
    asked = {"model": model, "tools": TOOLS, "max_tokens": 200}
    messages = [{"role": "user", "content": "1+1"}]
    (choice,) = client.chat.completions.create(messages=messages, **asked).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == "so"
    assert (
        call.type == "function"
        and call.function.name == "add"
        and json.loads(call.function.arguments) == {"a": 1}
    )
    names = []
    texts = ""
    reasons = []
    for chunk in client.chat.completions.create(messages=messages, stream=True, **asked):
        for streamed in chunk.choices:
            names += [part.function.name for part in streamed.delta.tool_calls or ()]
            texts += streamed.delta.content or ""
            reasons += [streamed.finish_reason] if streamed.finish_reason else []
    assert (names, texts.strip(), reasons) == (["add"], "so", ["tool_calls"])
    result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    messages += [choice.message.model_dump(exclude_none=True), result]
    assert (
        client.chat.completions.create(messages=messages, **asked).choices[0].finish_reason
        == "tool_calls"
    )


def talk(client: openai.OpenAI, model: str, temperature: float) -> None:
    body = {"model": model, "max_tokens": 12, "temperature": temperature, "seed": 3}
    whole = client.completions.create(prompt="12+34=", n=2, logprobs=0, **body)
    assert [choice.index for choice in whole.choices] == [
        0,
        1,
    ] and whole.usage.completion_tokens >= 2
    assert whole.choices[0].logprobs.token_logprobs[0] <= 0 and whole.policy_version == 0
    streams = ["", ""]
    for chunk in client.completions.create(prompt="12+34=", n=2, stream=True, **body):
        assert chunk.policy_version == 0 and chunk.system_fingerprint == "version-0"
        for choice in chunk.choices:
            streams[choice.index] += choice.text
    assert streams == [choice.text for choice in whole.choices]
    assert "4" not in client.completions.create(prompt="12+34=", stop=["4"], **body).choices[0].text
    messages = [{"role": "user", "content": "12+34"}]
    chat = client.chat.completions.create(messages=messages, logprobs=True, **body)
    assert chat.choices[0].message.content == whole.choices[0].text, (
        "the template adds nothing but ="
    )
    assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
    assert (
        client.chat.completions.create(messages=messages, tools=TOOLS, **body).usage.prompt_tokens
        == 8
    )
    streamed = ""
    usage = None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.chat.completions.create(messages=messages, **options, **body):
        usage = chunk.usage or usage
        streamed += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert streamed == chat.choices[0].message.content and usage == chat.usage
    wrong = {
        openai.BadRequestError: lambda: client.completions.create(
            prompt="1", presence_penalty=1, **body
        ),
        openai.NotFoundError: lambda: client.completions.create(prompt="1", model="another"),
        openai.AuthenticationError: lambda: client.with_options(api_key="wrong").models.list(),
    }
    for error, call in wrong.items():
        try:
            call()
        except error as found:
            assert found.body["message"], found
        else:
            raise AssertionError(f"{error} was not raised")


if __name__ == "__main__":
    main(*sys.argv[1:])
