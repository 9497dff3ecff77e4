"""Models that call tools, as the router sees them: small tokenizers and chat templates of the known formats."""

import json

from scripted_worker import REFERENCE_MODEL, VOCAB_SIZE, Script, model_card, tokenizer_files

HERMES_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- '' + message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}<|im_start|>assistant
"""
THINKING = (
    "{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)
SELF_THINKING = "{#- </think> #}"
"""The model itself begins its reasoning, if it wants to."""
LLAMA3_TEMPLATE = """\
{%- for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>
{% if tools and loop.first %}Respond in the format {"name": function name, "parameters": dictionary}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}{% endif %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call only') }}{% endif %}
{%- set call = message.tool_calls[0].function %}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}{{ message.content }}{% endif %}<|eot_id|>
{%- endfor %}<|start_header_id|>assistant<|end_header_id|>
"""
MISTRAL_TEMPLATE = """\
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif -%}
[TOOL_RESULTS]{"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif message.tool_calls %}[TOOL_CALLS][
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- call.function | tojson }}{% if not loop.last %}, {% endif %}
{%- endfor %}]</s>
{%- elif message.role == 'assistant' %}{{ message.content }}</s>
{%- else %}[INST]{{ message.content }}[/INST]{% endif %}
{%- endfor %}"""
DEEPSEEK_LIKE_TEMPLATE = """\
{%- for message in messages %}
{%- if message.content is none %}
{%- for call in message.tool_calls %}CALL {{ call.function.name + call.function.arguments }}
{% endfor %}
{%- else %}{{ message.role }}: {{ message.content }}
{% endif %}{% endfor %}{% for tool in tools or [] %}{"name": "{{ tool.function.name }}", "arguments": {}}{% endfor %}"""

CHATML = {"<|im_start|>": True, "<|im_end|>": True, "<tool_call>": False, "</tool_call>": False}
THINK = {"<think>": False, "</think>": False}
LLAMA3 = dict.fromkeys(["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"], True)
MISTRAL = dict.fromkeys(
    ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"], True
)
PLAIN_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant]"
MODELS = {
    "hermes": (HERMES_TEMPLATE, CHATML),
    "thinking": (HERMES_TEMPLATE + THINKING, CHATML | THINK),
    "special thinking": (HERMES_TEMPLATE + THINKING, dict.fromkeys([*CHATML, "<think>", "</think>"], True)),
    "plain thinking": (HERMES_TEMPLATE + THINKING, dict.fromkeys(["<|im_start|>", "<|im_end|>"], True)),
    "self thinking": (HERMES_TEMPLATE + SELF_THINKING, CHATML | THINK),
    "llama3": (LLAMA3_TEMPLATE, LLAMA3),
    "thinking llama3": (LLAMA3_TEMPLATE + THINKING, LLAMA3 | THINK),
    "plain thinking llama3": (LLAMA3_TEMPLATE + THINKING, LLAMA3),
    "self thinking llama3": (LLAMA3_TEMPLATE + SELF_THINKING, LLAMA3),
    "mistral": (MISTRAL_TEMPLATE, MISTRAL),
    "mistral arguments": (MISTRAL_TEMPLATE, MISTRAL | {"[ARGS]": True}),
    "deepseek": (DEEPSEEK_LIKE_TEMPLATE, {}),
    "plain": (PLAIN_TEMPLATE, {}),
    "thinking plain": (PLAIN_TEMPLATE + THINKING, THINK),
}


def model_of(name):
    """The worker's arguments for a model: its tokenizer's files and its card. The worker takes grammars."""
    template, added = MODELS[name]
    files = tokenizer_files(template)
    tokenizer = json.loads((REFERENCE_MODEL / "tokenizer.json").read_bytes())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {"id": VOCAB_SIZE + index, "content": text, "special": special} | flags
        for index, (text, special) in enumerate(added.items())
    ]
    files.tokenizer_json = json.dumps(tokenizer).encode()
    return {
        "files": files,
        "card": model_card(vocab_size=VOCAB_SIZE + len(added), context_length=2048, grammar_engine="test"),
    }


def ids_of(tokenizer, text):
    """The ids that a model would give for a text: special tokens where it has their names."""
    return tokenizer.encode(text, add_special_tokens=False, control_tokens=True)


def says(cluster, text, **script):
    """Make every worker answer with this text and the end of text; returns their ids."""
    ids = [*ids_of(cluster.tokenizer, text), cluster.tokenizer.added_id_of("</s>")]
    for worker in cluster.workers:
        worker.script = Script(token=lambda _prompt_ids, _seed, at: ids[at], stop_after=len(ids), **script)
    return ids


def prompt_of(cluster):
    """The text of the last prompt that a worker got, with its special tokens."""
    (submit, *_) = [worker.submits[-1] for worker in cluster.workers if worker.submits]
    return b"".join(map(cluster.tokenizer.token_bytes, submit.prompt_ids)).decode()
