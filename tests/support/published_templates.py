"""Chat templates of well-known models, typed again: they write what the published ones write for
the chats of the tests. `test_published_templates` compares them with the published ones where the
package trl has them.
"""

import json
from pathlib import Path

from chat_templates import write_chat_tokenizer

LLAMA3 = """{% for m in messages %}
    {{- bos_token if loop.first }}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | \
trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- \
endif %}"""

LLAMA31 = """{{- bos_token }}
{%- set has_system = messages[0].role == 'system' %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Environment: ipython\\n' if tools is not none }}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n' }}
{{- messages[0].content | trim if has_system }}
{{- '<|eot_id|>' }}
{%- set ns = namespace(rest=messages[1:] if has_system else messages) %}
{%- if tools is not none %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {{- 'Given the following functions, please respond with a JSON for a function call ' }}
    {{- 'with its proper arguments that best answers the given prompt.\\n\\n' }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name \
and its value}.' }}
    {{- 'Do not use variables.\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- ns.rest[0].content | trim + '<|eot_id|>' }}
    {%- set ns.rest = ns.rest[1:] %}
{%- endif %}
{%- for m in ns.rest %}
    {%- if m.tool_calls %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | \
tojson }}{{- '}<|eot_id|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- m.content | \
tojson }}{{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | \
trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- \
endif %}"""

TOOLS_OF_QWEN = """# Tools\\n\\nYou may call one or more functions to assist with the user \
query.\\n\\nYou are provided"""
TOOLS_OF_QWEN += """ with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and \
arguments within """
TOOLS_OF_QWEN += (
    """<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": """
)
TOOLS_OF_QWEN += """<args-json-object>}\\n</tool_call><|im_end|>\\n"""
RESULT_OF_QWEN = """
        {{- '<|im_start|>user' if loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}"""
CALL_OF_QWEN = """{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}"""
CALL_OF_QWEN3 = CALL_OF_QWEN.replace(
    "call.function.arguments | tojson",
    (
        "call.function.arguments if call.function.arguments is string else"
        " call.function.arguments | tojson"
    ),
)

QWEN25 = (
    """{%- set own = messages[0].content if messages[0].role == 'system' else
    'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}
{{- '<|im_start|>system\\n' + own }}
{%- if tools %}
    {{- '\\n\\n"""
    + TOOLS_OF_QWEN
    + """' }}
{%- else %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}"""
    + RESULT_OF_QWEN
    + """
    {%- elif m.tool_calls %}
        {{- '<|im_start|>assistant' }}{{- '\\n' + m.content if m.content }}
        {%- for call in m.tool_calls %}{{- '\\n' }}"""
    + CALL_OF_QWEN
    + """{%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)

QWEN3 = (
    """{%- set own = messages[0].content if messages[0].role == 'system' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}{{- own + '\\n\\n' if own }}
    {{- '"""
    + TOOLS_OF_QWEN
    + """' }}
{%- elif own %}{{- '<|im_start|>system\\n' + own + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- \
endfor %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}"""
    + RESULT_OF_QWEN
    + """
    {%- elif m.role == 'assistant' %}
        {%- set thoughts, content = m.reasoning_content or '', m.content %}
        {%- if not thoughts and '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n' if content or not loop.first }}"""
    + CALL_OF_QWEN3
    + """
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'user' or not loop.first %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)

HERMES = (
    """{{- bos_token }}{{- '<|im_start|>system\\nYou are a function calling AI model. You are \
provided with function """
    """signatures within <tools></tools> XML tags. Here are the available tools: <tools> ' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' if not loop.last }}{%- endfor %}
{{- ' </tools><|im_end|>\\n' }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>tool\\n' if loop.previtem.role != 'tool' }}
        {{- '<tool_response>\\n' + m.content + '\\n</tool_response>' }}{{- '\\n' if not loop.last }}
        {{- '<|im_end|>' if loop.last or loop.nextitem.role != 'tool' }}
    {%- elif m.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in m.tool_calls %}{{- '\\n' }}"""
    + CALL_OF_QWEN
    + """{%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)

MISTRAL = """{{- bos_token }}{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') \
}}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{- ', ' if not \
loop.last }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + \
'"}[/TOOL_RESULTS]' }}
    {%- else %}{{- ' ' + m.content | trim + eos_token }}{%- endif %}
{%- endfor %}"""

DEEPSEEK_V3 = """{%- set ns = namespace(after_tool=false, has_called=false, has_result=false) %}
{{- bos_token }}{{- messages[0].content if messages[0].role == 'system' }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{%- set ns.after_tool = false %}{{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' and 'tool_calls' in m %}
        {%- set ns.after_tool = false %}
        {%- for call in m.tool_calls %}
            {%- if ns.has_called %}{{- '\\n' }}
            {%- else %}{{- '<｜Assistant｜>' + m.content + '<｜tool▁calls▁begin｜>' }}{%- endif %}
            {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
            {{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
            {%- set ns.has_called = true %}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<｜tool▁outputs▁end｜>' + m.content if ns.after_tool
            else '<｜Assistant｜>' + m.content.split('</think>')[-1] }}{{- '<｜end▁of▁sentence｜>' \
}}
        {%- set ns.after_tool = false %}
    {%- elif m.role == 'tool' %}
        {%- set ns.after_tool = true %}
        {{- '<｜tool▁outputs▁begin｜>' if not ns.has_result }}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
        {%- set ns.has_result = true %}
    {%- endif %}
{%- endfor %}
{{- '<｜tool▁outputs▁end｜>' if ns.after_tool }}
{{- '<｜Assistant｜><think>\\n' if add_generation_prompt and not ns.after_tool }}"""

DEEPSEEK_R1 = """{%- set ns = namespace(after_tool=false, has_result=false) %}
{{- bos_token }}{{- messages[0].content if messages[0].role == 'system' }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{%- set ns.after_tool = false %}{{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' %}
        {{- '<｜tool▁outputs▁end｜>' + m.content if ns.after_tool
            else '<｜Assistant｜>' + m.content.split('</think>')[-1] }}{{- '<｜end▁of▁sentence｜>' \
}}
        {%- set ns.after_tool = false %}
    {%- elif m.role == 'tool' %}
        {%- set ns.after_tool = true %}
        {{- '\\n' if ns.has_result else '<｜tool▁outputs▁begin｜>' }}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
        {%- set ns.has_result = true %}
    {%- endif %}
{%- endfor %}
{{- '<｜tool▁outputs▁end｜>' if ns.after_tool }}
{{- '<｜Assistant｜><think>\\n' if add_generation_prompt and not ns.after_tool }}"""

GLM45 = """{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\\n# Tools\\n\\nYou may call one or more functions to assist with the user \
query.\\n\\nYou are ' }}
    {{- 'provided with function signatures within <tools></tools> XML tags:\\n<tools>\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- '</tools>\\n\\nFor each function call, output the function name and arguments within the \
following XML' }}
    {{- ' \
format:\\n<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>{arg-value-1}' }}
    {{- \
'</arg_value>\\n<arg_key>{arg-key-2}</arg_key>\\n<arg_value>{arg-value-2}</arg_value>\
\\n...\\n</tool_call>' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- \
endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set thoughts, content = m.reasoning_content or '', m.content.strip() %}
        {%- if not thoughts and '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].strip() %}
        {%- endif %}
        {{- '<|assistant|>\\n<think>' + (thoughts.strip() if loop.index0 > \
ns.last else '') + '</think>' }}
        {{- '\\n' + content if content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
                {{- value if value is string else value | tojson }}{{- '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {{- '<|observation|>' if loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{%- endif %}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt }}"""

GPT_OSS = """{{- '<|start|>system<|message|>You are ChatGPT, a large language model trained by \
OpenAI.\\n' }}
{{- 'Knowledge cutoff: 2024-06\\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\\n\\nReasoning: \
medium\\n\\n' }}
{{- '# Valid channels: analysis, commentary, final. Channel must be included for every \
message.<|end|>' }}
{%- if messages[0].role == 'system' %}
    {{- '<|start|>developer<|message|># Instructions\\n\\n' + messages[0].content + \
'\\n\\n<|end|>' }}
{%- endif %}
{%- set ns = namespace(name=none, final=-1) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and 'tool_calls' not in m %}{%- set ns.final = loop.index0 %}{%- \
endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson }}{{- '<|end|>' }}
    {%- elif m.role == 'assistant' %}
        {%- if m.thinking and (loop.index0 > ns.final if m.tool_calls else loop.last and not \
add_generation_prompt) %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {%- if m.tool_calls %}
            {%- set ns.name = m.tool_calls[0].function.name %}
            {{- '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary \
json<|message|>' }}
            {{- m.tool_calls[0].function.arguments | tojson }}{{- '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
            {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt }}"""

PHI3 = """{%- for m in messages %}
    {{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' if m.role in ('system', 'user', \
'assistant') }}
{%- endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}"""

# name -> (template, stop tokens of generation_config.json, the file that trl has of it)
PUBLISHED = {
    "llama3": (LLAMA3, ["<|eot_id|>"], "llama3"),
    "llama31": (LLAMA31, ["<|eot_id|>"], "llama3_1"),
    "qwen25": (QWEN25, ["<|im_end|>"], "qwen2_5"),
    "qwen3": (QWEN3, ["<|im_end|>"], "qwen3"),
    "hermes": (HERMES, ["<|im_end|>"], None),
    "mistral": (MISTRAL, ["<|eos|>"], None),
    "deepseek_v3": (DEEPSEEK_V3, ["<｜end▁of▁sentence｜>"], "deepseekv3"),
    "deepseek_r1": (DEEPSEEK_R1, ["<｜end▁of▁sentence｜>"], "deepseek_r1_distill"),
    "glm45": (GLM45, ["<|eos|>", "<|user|>", "<|observation|>"], "glm4moe"),
    "gpt_oss": (GPT_OSS, ["<|return|>", "<|call|>"], "gptoss"),
    "phi3": (PHI3, ["<|end|>", "<|eos|>"], "phi3"),
}
CONTROL = (
    *(
        "<|bos|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eos|>",
    ),
    *(
        "<|user|>",
        "<|observation|>",
        "<|assistant|>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
    ),
    *(
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "[INST]",
        "[/INST]",
    ),
)


def write_published(directory: Path, name: str, template: str | None = None) -> Path:
    """A small tokenizer with the template, or another one, and the stop tokens of a model."""
    own, stops, _ = PUBLISHED[name]
    write_chat_tokenizer(directory, CONTROL, chat_template=template or own, eos_token=stops[0])
    config = {"eos_token_id": [CONTROL.index(stop) for stop in stops]}
    (directory / "generation_config.json").write_text(json.dumps(config))
    return directory
