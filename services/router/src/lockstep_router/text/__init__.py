"""Text and token ids: tokenizers, chat templates, detokenization, stop strings. Pure functions of a model's files."""
