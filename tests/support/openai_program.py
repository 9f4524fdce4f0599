"""`openai_program.py URL KEY`: OpenAI's own client against a server of ours, in an environment that has the package."""

from __future__ import annotations

import sys

import openai


def main(url: str, key: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
    (model,) = client.models.list().data
    body = {"model": model.id, "max_tokens": 12, "temperature": 1.0, "seed": 3}
    whole = client.completions.create(prompt="12+34=", n=2, logprobs=0, **body)
    assert [choice.index for choice in whole.choices] == [0, 1] and whole.usage.completion_tokens >= 2
    assert whole.choices[0].logprobs.token_logprobs[0] <= 0 and whole.policy_version == 0
    streams = ["", ""]
    for chunk in client.completions.create(prompt="12+34=", n=2, stream=True, **body):
        assert chunk.policy_version == 0 and chunk.system_fingerprint == "version-0"
        for choice in chunk.choices:
            streams[choice.index] += choice.text
    assert streams == [choice.text for choice in whole.choices]
    assert "4" not in client.completions.create(prompt="12+34=", stop=["4"], **body).choices[0].text
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    messages = [{"role": "user", "content": "12+34"}]
    chat = client.chat.completions.create(messages=messages, logprobs=True, **body)
    assert chat.choices[0].message.content == whole.choices[0].text, "the template adds nothing but ="
    assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
    assert client.chat.completions.create(messages=messages, tools=tools, **body).usage.prompt_tokens == 8
    streamed, usage = "", None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.chat.completions.create(messages=messages, **options, **body):
        usage = chunk.usage or usage
        streamed += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert streamed == chat.choices[0].message.content and usage == chat.usage
    wrong = {
        openai.BadRequestError: lambda: client.completions.create(prompt="1", presence_penalty=1, **body),
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
    print(f"openai {openai.__version__} is content")


if __name__ == "__main__":
    main(*sys.argv[1:])
