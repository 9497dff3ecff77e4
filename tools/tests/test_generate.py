"""The whole engine behind the command, on the reference model."""

import pytest

PROMPT = "It was a dark night, and"


def test_text_goes_to_stdout_and_speed_to_stderr(lockstep, model: str) -> None:
    flags = ("--max-tokens", "24", "--temperature", "0", "--threads", "1")
    given = lockstep("generate", model, "-", *flags, stdin=PROMPT, timeout_s=120)
    assert given.returncode == 0, given.stderr
    assert len(given.stdout.split()) > 8
    assert "24 tokens, " in given.stderr
    assert "\x1b" not in given.stdout + given.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("",), "the PROMPT is empty"),
        ((PROMPT, "--max-tokens", "5000"), "5000"),
    ],
)
def test_what_cannot_be_generated_is_refused(lockstep, model: str, arguments: tuple[str, ...], words: str) -> None:
    result = lockstep("generate", model, *arguments, timeout_s=120)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
