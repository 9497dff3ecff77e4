"""How a command ends when it fails: one sentence, one exit code."""

FAILED = 1
"""The command was valid but failed; trying again may help."""

UNUSABLE = 2
"""Arguments, models, ports or servers that cannot be used as given."""


class CommandError(Exception):
    """Ends the command: `message` goes to stderr, `exit_code` to the shell."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code
