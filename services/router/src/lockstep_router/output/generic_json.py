"""Tool calls without any markers: the whole answer is `{"name": …, "arguments": {…}}`, or a list of these."""

from lockstep_router.output.json_calls import JsonSyntax

GENERIC_JSON = JsonSyntax(is_bare=True, separators=";")
