"""Tool calls of Hermes, Qwen 2.5, Qwen 3 and others: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from lockstep_router.output.json_calls import JsonSyntax

HERMES = JsonSyntax(opening="<tool_call>", closing="</tool_call>")
