"""The tokenizers of the workers' models, by digest. The cache holds those of known models only."""

from collections.abc import Collection

from lockstep_common.garbage import spare_loaded_objects

from lockstep_router.text.tokenizer import Tokenizer


class TokenizerCache:
    """Holds each tokenizer once, however many workers serve its model."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, Tokenizer] = {}

    def __contains__(self, digest: object) -> bool:
        return digest in self._tokenizers

    def add(self, tokenizer: Tokenizer) -> None:
        """Add a tokenizer."""
        self._tokenizers.setdefault(tokenizer.digest, tokenizer)
        spare_loaded_objects()

    def keep_only(self, digests: Collection[str]) -> None:
        """Remove the tokenizers with other digests."""
        self._tokenizers = {digest: self._tokenizers[digest] for digest in self._tokenizers if digest in digests}

    def get(self, digest: str) -> Tokenizer | None:
        """The tokenizer with that digest, if it has been fetched."""
        return self._tokenizers.get(digest)
