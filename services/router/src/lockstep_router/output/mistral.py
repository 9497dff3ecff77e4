"""Tool calls of Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and in later versions
`[TOOL_CALLS]name[ARGS]{…}` or `[TOOL_CALLS]name{…}` for each call.
"""

from lockstep_router.output.json_calls import JsonSyntax

MISTRAL = JsonSyntax(opening="[TOOL_CALLS]", has_names_outside=True, inner=("[CALL_ID]", "[ARGS]"))
