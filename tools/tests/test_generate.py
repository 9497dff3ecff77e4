"""The whole engine behind the command, on the reference model."""

PROMPT = "It was a dark night, and"


def test_text_goes_to_stdout_and_speed_to_stderr(lockstep, model: str) -> None:
    flags = ("--max-tokens", "24", "--temperature", "0", "--threads", "1")
    given = lockstep("generate", model, "-", *flags, stdin=PROMPT, timeout_s=120)
    assert given.returncode == 0, given.stderr
    assert len(given.stdout.split()) > 8
    assert "24 tokens, " in given.stderr
    assert "\x1b" not in given.stdout + given.stderr


def test_an_empty_prompt_is_refused(lockstep, model: str) -> None:
    result = lockstep("generate", model, "")
    assert (result.returncode, result.stdout) == (2, "")
    assert "the PROMPT is empty" in result.stderr
