"""Chat templates that write calls of tools, typed again and cut to what the tests render: they
write answers with calls as the published ones do. Others are in `published_templates`.
"""

HERMES_CALLS = """{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' if m.reasoning_content }}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""

QWEN_XML = """{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '\\n\\n' if loop.first and m.content else '' if loop.first else '\\n' }}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for key, value in call.function.arguments | items %}
            {{- '<parameter=' + key + '>\\n' }}
            {{- value | tojson if value is mapping or (value is sequence and value is not string) \
else value | string }}
            {{- '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n<think>\\n' if add_generation_prompt }}"""

KIMI_K2 = """{%- for m in messages %}
    {{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' }}
    {{- '## Return of ' + m.tool_call_id + '\\n' if m.role == 'tool' }}
    {{- '<think>' + (m.reasoning_content or '') + '</think>' if m.role == 'assistant' }}
    {{- m.content or '' }}
    {%- if m.tool_calls %}
        {{- '<|tool_calls_section_begin|>' }}
        {%- for call in m.tool_calls %}
            {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
            {{- call.function.arguments | tojson }}{{- '<|tool_call_end|>' }}
        {%- endfor %}
        {{- '<|tool_calls_section_end|>' }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{{- '<|im_assistant|>assistant<|im_middle|>' if add_generation_prompt }}"""

MINIMAX_M2 = """{%- for m in messages %}
    {{- ']~b]' + ('ai' if m.role == 'assistant' else m.role) + '\\n' }}
    {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' if m.reasoning_content }}
    {{- m.content or '' }}
    {%- if m.tool_calls %}
        {{- '\\n<minimax:tool_call>\\n' }}
        {%- for call in m.tool_calls %}
            {{- '<invoke name="' + call.function.name + '">\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter name="' + key + '">' }}
                {{- value if value is string else value | tojson }}{{- '</parameter>\\n' }}
            {%- endfor %}
            {{- '</invoke>\\n' }}
        {%- endfor %}
        {{- '</minimax:tool_call>' }}
    {%- endif %}
    {{- '[e~[\\n' }}
{%- endfor %}
{{- ']~b]ai\\n<think>\\n' if add_generation_prompt }}"""

MUSE_GLIMMER = """{%- for m in messages %}
    {%- if m.role != 'assistant' %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|eot|>' }}
    {%- else %}
        {{- '<|start|>assistant to=self<|message|>' + m.reasoning_content + '<|eom|>' if \
m.reasoning_content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<|start|>assistant to=' + call.function.name + '<|message|>' }}
            {{- '<atem:function_calls>\\n<atem:invoke name="' + call.function.name + '">\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<atem:parameter name="' + key + '">' }}
                {{- value if value is string else value | tojson }}{{- '</atem:parameter>\\n' }}
            {%- endfor %}
            {{- '</atem:invoke>\\n</atem:function_calls>' }}{{- '<|eot|>' if loop.last else \
'<|eom|>' }}
        {%- else %}{{- '<|start|>assistant to=user<|message|>' + m.content + '<|eot|>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt }}"""

DEEPSEEK_V31 = """{%- for m in messages %}
    {{- '<｜User｜>' + m.content if m.role == 'user' }}
    {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' if m.role == 'tool' }}
    {%- if m.role == 'assistant' %}
        {{- '<｜Assistant｜></think>' + (m.content or '') }}
        {%- for call in m.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first }}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
            {{- call.function.arguments + '<｜tool▁call▁end｜>' }}
            {{- '<｜tool▁calls▁end｜>' if loop.last }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{{- '<｜Assistant｜></think>' if add_generation_prompt and messages[-1].role == 'user' }}"""

DEEPSEEK_BLOCKS = """{%- for m in messages %}
    {{- '<｜User｜>' + m.content if m.role == 'user' }}
    {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' if m.role == 'tool' }}
    {%- if m.role == 'assistant' %}
        {{- '<｜Assistant｜>' + (m.content or '') }}
        {%- for call in m.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
            {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
            {{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
            {{- '<｜tool▁calls▁end｜>' if loop.last }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{{- '<｜Assistant｜><think>\\n' if add_generation_prompt and messages[-1].role == 'user' }}"""

MISTRAL_ARGS = """{%- for m in messages %}
    {{- '[INST]' + m.content + '[/INST]' if m.role == 'user' }}
    {{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' if \
m.role == 'tool' }}
    {%- if m.role == 'assistant' %}
        {{- '[THINK]' + m.reasoning_content + '[/THINK]' if m.reasoning_content }}{{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- raise_exception('ids have nine letters') if call.id | length != 9 }}
            {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}
            {{- call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}"""

NEMOTRON_NANO_2 = """{%- for m in messages %}
    {{- '<SPECIAL_11>User\\n' + m.content + '\\n' if m.role == 'user' }}
    {{- '<TOOL_RESPONSE>[' + m.content + ']</TOOL_RESPONSE>' if m.role == 'tool' }}
    {%- if m.role == 'assistant' %}
        {{- '<SPECIAL_11>Assistant\\n' + m.content }}
        {%- if m.tool_calls %}
            {{- '<TOOLCALL>[' }}
            {%- for call in m.tool_calls %}
                {{- '{"name": "' + call.function.name + '", "arguments": ' }}
                {{- call.function.arguments | tojson }}{{- '}' + (', ' if not loop.last else '') }}
            {%- endfor %}
            {{- ']</TOOLCALL>' }}
        {%- endif %}
        {{- '\\n<SPECIAL_12>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<SPECIAL_11>Assistant\\n<think>\\n\\n' if add_generation_prompt }}"""

LLAMA_4_JSON = """{%- for m in messages %}
    {{- '<|header_start|>' + m.role + '<|header_end|>\\n\\n' }}
    {{- '<|python_start|>' + m.content + '<|python_end|>' if m.tool_calls else m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '{"name": "' + call.function.name + '", "parameters": ' }}
        {{- call.function.arguments | tojson }}{{- '}' }}
    {%- endfor %}
    {{- '<|eom|>' if m.tool_calls else '<|eot|>' }}
{%- endfor %}
{{- '<|header_start|>assistant<|header_end|>\\n\\n' if add_generation_prompt }}"""

# every value stands in quotes, and nothing is escaped
LLAMA_4_PYTHONIC = """{%- for m in messages %}
    {{- '<|header_start|>' + m.role + '<|header_end|>\\n\\n' + m.content }}
    {%- if m.tool_calls %}
        {{- '[' }}
        {%- for call in m.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for key in call.function.arguments %}
                {{- key + '="' + '%s' | format(call.function.arguments[key]) + '"' }}
                {{- ', ' if not loop.last }}
            {%- endfor %}
            {{- ')' + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- ']' }}
    {%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{{- '<|header_start|>assistant<|header_end|>\\n\\n' if add_generation_prompt }}"""

LFM2 = """{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {{- '<think>' + m.reasoning_content + '</think>' if m.reasoning_content }}{{- m.content }}
    {%- if m.tool_calls %}
        {{- '<|tool_call_start|>[' }}
        {%- for call in m.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for key, value in call.function.arguments | items %}
                {{- key + '=' }}{{- '%r' | format(value) if value is string or value is none else \
value | tojson }}{{- ', ' if not loop.last }}
            {%- endfor %}
            {{- ')' + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- ']<|tool_call_end|>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""

GEMMA_4 = """{%- macro write(value) -%}
    {%- if value is string -%}{{- '<|"|>' + value + '<|"|>' -}}
    {%- elif value is mapping -%}{{- '{' -}}
        {%- for key, item in value | dictsort -%}{{- key + ':' -}}{{- write(item) -}}
            {{- ',' if not loop.last -}}{%- endfor -%}{{- '}' -}}
    {%- elif value is sequence -%}{{- '[' -}}
        {%- for item in value -%}{{- write(item) -}}{{- ',' if not loop.last -}}{%- endfor -%}
        {{- ']' -}}
    {%- elif value is boolean -%}{{- 'true' if value else 'false' -}}
    {%- elif value is none -%}{{- 'null' -}}
    {%- else -%}{{- value -}}{%- endif -%}
{%- endmacro -%}
{%- for m in messages %}
    {{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
    {{- '<|channel>thought\\n' + m.reasoning_content + '\\n<channel|>' if m.reasoning_content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<|tool_call>call:' + call.function.name }}{{- write(call.function.arguments) }}
        {{- '<tool_call|>' }}
    {%- endfor %}
    {{- m.content + ('<|tool_response>' if m.tool_calls else '<turn|>\\n') }}
{%- endfor %}
{{- '<|turn>model\\n' if add_generation_prompt }}"""

# name -> (template, the format that is chosen for it, the token that ends answers)
TOOL_TEMPLATES = {
    "hermes_calls": (HERMES_CALLS, "hermes_json", "<|im_end|>"),
    "qwen_xml": (QWEN_XML, "qwen_xml", "<|im_end|>"),
    "kimi_k2": (KIMI_K2, "kimi_k2", "<|im_end|>"),
    "minimax_m2": (MINIMAX_M2, "minimax_m2", "[e~["),
    "muse_glimmer": (MUSE_GLIMMER, "muse_glimmer", "<|eot|>"),
    "deepseek_v31": (DEEPSEEK_V31, "deepseek", "<｜end▁of▁sentence｜>"),
    "deepseek_blocks": (DEEPSEEK_BLOCKS, "deepseek", "<｜end▁of▁sentence｜>"),
    "mistral_args": (MISTRAL_ARGS, "mistral", "<|eos|>"),
    "nemotron_nano_2": (NEMOTRON_NANO_2, "nemotron_nano_2", "<SPECIAL_12>"),
    "llama_4_json": (LLAMA_4_JSON, "llama_json", "<|eom|>"),
    "llama_4_pythonic": (LLAMA_4_PYTHONIC, "pythonic", "<|eot|>"),
    "lfm2": (LFM2, "lfm2", "<|im_end|>"),
    "gemma_4": (GEMMA_4, "gemma_4", "<turn|>"),
}
