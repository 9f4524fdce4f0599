"""Chat templates in the style of well-known families, whose ways with turns they have, and a small tokenizer that
has their control tokens."""

import json
from pathlib import Path
from typing import Any

import tokenizers

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and not message.content.startswith('<tool>') %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- generation %}{{- message.content.split('</think>')[-1].lstrip('\\n') }}{%- endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

HERMES_CALLS = """{%- for call in message.tool_calls or [] %}
    {{- '\\n<tool_call>\\n' }}
    {{- {"name": call.function.name, "arguments": call.function.arguments} | tojson }}{{- '\\n</tool_call>' }}
{%- endfor %}"""
HERMES_END = """{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
QWEN25 = (  # append-only; drops reasoning_content, and writes a newline behind its stop token
    """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}"""
    + HERMES_CALLS
    + """{{- '<|im_end|>\\n' }}{%- endfor %}"""
    + HERMES_END
)
QWEN3 = (  # keeps the thinking of the last turn only, and writes an empty one where it has none
    """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content }}"""
    + HERMES_CALLS
    + """{{- '<|im_end|>\\n' }}{%- endfor %}"""
    + HERMES_END
)
LLAMA3 = """{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = """{{- bos_token }}{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}
    {%- else %}{{- ' ' + message.content + eos_token }}{%- endif %}
{%- endfor %}"""
DEEPSEEK_R1 = """{{- bos_token }}{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|User|>' + message.content }}
    {%- else %}{{- '<|Assistant|>' + message.content.split('</think>')[-1] + eos_token }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}"""
GLM4 = """{%- for message in messages %}
    {%- if message.role == 'tool' %}{{- '<|observation|>\\n' + message.content }}
    {%- else %}{{- '<|' + message.role + '|>\\n' + message.content }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name }}
        {%- for key, value in call.function.arguments.items() %}{{- '\\n' + key + '=' + value | string }}{%- endfor %}
        {{- '</tool_call>' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""
GPT_OSS = """{%- for message in messages %}
    {{- '<|start|>' + message.role }}
    {%- if message.role == 'assistant' %}
        {%- if message.thinking and loop.last %}
            {{- '<|channel|>analysis<|message|>' + message.thinking + '<|end|><|start|>assistant' }}
        {%- endif %}
        {{- '<|channel|>final' }}
    {%- endif %}
    {{- '<|message|>' + message.content }}
    {{- '<|return|>' if loop.last and message.role == 'assistant' else '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
PHI3 = """{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}"""
FAMILIES = {  # template, stop tokens
    "qwen25": (QWEN25, ["<|im_end|>"]),
    "qwen3": (QWEN3, ["<|im_end|>"]),
    "llama3": (LLAMA3, ["<|eot_id|>"]),
    "mistral": (MISTRAL, ["<|eos|>"]),
    "deepseek_r1": (DEEPSEEK_R1, ["<|eos|>"]),
    "glm4": (GLM4, ["<|eos|>", "<|user|>", "<|observation|>"]),
    "gpt_oss": (GPT_OSS, ["<|return|>"]),
    "phi3": (PHI3, ["<|end|>", "<|eos|>"]),
}
OF_FAMILIES = (
    *("<|eos|>", "<|user|>", "<|observation|>", "<|assistant|>", "<|User|>", "<|Assistant|>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
)

SPECIALS = ("<|bos|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def write_chat_tokenizer(directory: Path, specials: tuple[str, ...] = SPECIALS, **settings: Any) -> Path:
    """A byte-level tokenizer with the control tokens of both families, that puts <|bos|> in front when asked to."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(specials),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["system user assistant You are a helpful assistant. What is the answer?"], trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    written = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|bos|>",
        **settings,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(written))
    return directory


def write_family(directory: Path, name: str) -> Path:
    """The same with the template and the stop tokens of a family."""
    template, stops = FAMILIES[name]
    specials = (*SPECIALS, *OF_FAMILIES)
    write_chat_tokenizer(directory, specials, chat_template=template, eos_token=stops[0])
    config = {"eos_token_id": [specials.index(stop) for stop in stops]}
    (directory / "generation_config.json").write_text(json.dumps(config))
    return directory
