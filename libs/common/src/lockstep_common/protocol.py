"""Limits and values of the protocols between the services. Both sides use the same ones.

A side with a smaller limit would refuse what the other one has accepted.
"""

MAX_MESSAGE_BYTES = 64 << 20
"""Largest gRPC message."""

MAX_LOGPROBS = 20
"""Largest number of alternatives with log probabilities for each token."""

MAX_LOGIT_BIAS = 1024
"""Largest number of tokens with a logit bias in one request."""

MAX_STOP_IDS = 64
"""Largest number of stop token ids in one request."""

PRIORITIES = {"low": -1, "normal": 0, "high": 1}
"""Priority of each class of streams."""

MAX_GRAMMAR_BYTES = 64 << 10
"""Largest text of a grammar, as UTF-8."""

JSON_SCHEMA_OPTIONS = {"lenient": False, "whitespace_pattern": r"(\x20|\r?\n[\x20\t]{0,32})"}
"""What a JSON schema means in a grammar, as options of llguidance. A keyword that has no effect is an error. White
space is a space or a new line with its indentation: a model that may write more tends to write nothing else.
"""

NO_TOKENS = (1 << 32) - 1
"""As a position of `Journal.Read`, for all choices: a stream's record without its tokens, which costs little."""
