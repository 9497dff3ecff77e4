"""Tool calls of Llama 3.1 to 3.3: `{"name": …, "parameters": {…}}`, as the whole answer or after `<|python_tag|>`;
several are separated by semicolons.
"""

from lockstep_router.output.json_calls import JsonSyntax

LLAMA3 = JsonSyntax(opening="<|python_tag|>", is_bare=True, separators=";")
