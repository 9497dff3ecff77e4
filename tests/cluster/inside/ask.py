"""Runs in a pod with Python: one completion of a session.

The argument is a JSON object: `router` (host:port), `model`, `session` and `prompt`. Prints a JSON object: `text`,
`prompt_tokens` and `cached_tokens`.
"""

import http.client
import json
import sys

given = json.loads(sys.argv[1])
body = {"model": given["model"], "prompt": given["prompt"], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
connection = http.client.HTTPConnection(given["router"], timeout=120)
headers = {"content-type": "application/json", "x-session-id": given["session"]}
connection.request("POST", "/v1/completions", json.dumps(body), headers)
response = connection.getresponse()
answer = json.loads(response.read())
if response.status != 200:
    raise SystemExit(f"{response.status}: {answer}")
usage = answer["usage"]
found = {
    "text": answer["choices"][0]["text"],
    "prompt_tokens": usage["prompt_tokens"],
    "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
}
print(json.dumps(found))
