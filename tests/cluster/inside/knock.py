"""Runs in a pod with Python: many small requests of a tenant at several routers in turn, and what each is answered.

The argument is a JSON object: `routers` (host:port), `key`, `model`, and `requests` (that many at once) or `seconds`
(one after another for so long). Prints a list of [router, status, Retry-After].
"""

import http.client
import itertools
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

given = json.loads(sys.argv[1])
headers = {"content-type": "application/json", "authorization": f"Bearer {given['key']}"}


def knock(router):
    connection = http.client.HTTPConnection(router, timeout=60)
    try:
        connection.request("POST", "/tokenize", json.dumps({"model": given["model"], "prompt": "hi"}), headers)
        answer = connection.getresponse()
        return [router, answer.status, answer.getheader("retry-after")]
    except OSError as error:
        return [router, type(error).__name__, None]
    finally:
        connection.close()


routers = itertools.cycle(given["routers"])
if "requests" in given:
    with ThreadPoolExecutor(given["requests"]) as pool:
        answers = list(pool.map(knock, itertools.islice(routers, given["requests"])))
else:
    until_s, answers = time.monotonic() + given["seconds"], []
    while time.monotonic() < until_s:
        answers.append(knock(next(routers)))
print(json.dumps(answers))
