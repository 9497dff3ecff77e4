"""The tokenizers of the models that workers have shown, by digest."""

from collections.abc import Collection

from lockstep_router.tokenizer import Tokenizer


class TokenizerCache:
    """Each tokenizer is fetched and built once, whoever serves its model."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, Tokenizer] = {}

    def __contains__(self, digest: object) -> bool:
        return digest in self._tokenizers

    def add(self, tokenizer: Tokenizer) -> None:
        """Keep a tokenizer."""
        self._tokenizers.setdefault(tokenizer.digest, tokenizer)

    def keep_only(self, digests: Collection[str]) -> None:
        """Forget the tokenizers that no known model names."""
        self._tokenizers = {digest: self._tokenizers[digest] for digest in self._tokenizers if digest in digests}

    def get(self, digest: str) -> Tokenizer | None:
        """The tokenizer of that digest, if a worker has handed it out."""
        return self._tokenizers.get(digest)
