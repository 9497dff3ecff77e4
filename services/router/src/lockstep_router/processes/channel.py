"""What the parent and one of its processes say to each other: settings down, then questions down and answers up.

The process answers in a thread of its own, so that health does not depend on its event loop's load. Messages are bytes
and JSON.
"""

import json
import logging
import time
from multiprocessing.connection import Connection
from threading import Lock, Thread

from lockstep_common.answers import Answer, as_json
from lockstep_common.management import Answers
from lockstep_common.tracebacks import sentence

logger = logging.getLogger("lockstep.management")

TIMEOUT_S = 2.0
"""For an answer: longer than a process waits for its event loop, shorter than probes wait."""


class NoAnswerError(Exception):
    """The process does not answer in time, or has ended."""


class Asker:
    """The parent's end of the connection. Threads may share it: they take turns."""

    def __init__(self, connection: "Connection[bytes, bytes]") -> None:
        self._connection = connection
        self._lock = Lock()
        self._asked = 0

    def ask(self, path: str, operation: str = "", accept: str = "") -> Answer:
        """The process's answer to a GET that accepts these types or, if there is an `operation`, to an operator's
        request by this method.

        Raises:
            NoAnswerError: there is none.
        """
        deadline_s = time.monotonic() + TIMEOUT_S
        if not self._lock.acquire(timeout=TIMEOUT_S):
            raise NoAnswerError
        try:
            self._asked += 1
            self._connection.send_bytes(_question(self._asked, path, operation, accept))
            while self._connection.poll(max(0.0, deadline_s - time.monotonic())):
                head, body = json.loads(self._connection.recv_bytes()), self._connection.recv_bytes()
                if head["number"] == self._asked:  # else it is one that no call waits for any more
                    return Answer(head["status"], head["content_type"], body)
        except (OSError, EOFError) as error:
            raise NoAnswerError from error
        finally:
            self._lock.release()
        raise NoAnswerError


def _question(number: int, path: str, operation: str, accept: str) -> bytes:
    return json.dumps({"number": number, "path": path, "operation": operation, "accept": accept}).encode()


def answer_parent(connection: "Connection[bytes, bytes]", answers: Answers) -> None:
    """Answer the parent's questions in a thread, for as long as the process lives."""

    def run() -> None:
        try:
            while True:
                question = json.loads(connection.recv_bytes())
                answer = _made(answers, question["path"], question["operation"], question["accept"])
                head = {"number": question["number"], "status": answer.status, "content_type": answer.content_type}
                connection.send_bytes(json.dumps(head).encode())
                connection.send_bytes(answer.body)
        except (OSError, EOFError):
            return  # the parent has ended, and so will this process

    Thread(target=run, name="parent", daemon=True).start()


def _made(answers: Answers, path: str, operation: str, accept: str) -> Answer:
    """The answer, or one that says that it cannot be made: the thread, and with it the process's health, lives on."""
    try:
        if operation:
            return answers.to_operator(operation, path)
        return answers.of(path, is_stranger=False, accept=accept)
    except Exception as error:
        logger.exception("an answer to the parent cannot be made")
        return as_json(500, {"status": "failed", "error": f"the answer cannot be made: {sentence(error)}"})
