"""A model whose tokenizer is like Llama 2's: spaces as U+2581, bytes as <0xNN>, the first space of a text dropped."""

from lockstep_api.v1 import worker_pb2
from lockstep_router.text.tokenizer import Tokenizer
from scripted_worker import model_card
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

WORDS = ("\u2581", "\u2581he", "llo", "\u2581world", "!")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
VOCAB = {"<unk>": 0, "</s>": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
for word in WORDS:
    VOCAB[word] = len(VOCAB)
VOCAB["<end>"] = len(VOCAB)
"""An added token that is not special: it has a text."""


def ids_of(*tokens):
    return [VOCAB[token] for token in tokens]


def bytes_of(text):
    return [VOCAB[f"<0x{byte:02X}>"] for byte in text.encode()]


def tokenizer_files(decoder=None):
    rust = RustTokenizer(
        models.BPE(
            vocab={token: number for token, number in VOCAB.items() if token != "<end>"},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoder or decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.add_special_tokens(["</s>"])
    rust.add_tokens([AddedToken("<end>", special=False, normalized=False)])
    return worker_pb2.TokenizerFiles(
        digest="tokenizer-1", tokenizer_json=rust.to_str().encode(), chat_template=TEMPLATE
    )


def tokenizer_of(decoder=None):
    return Tokenizer(tokenizer_files(decoder))


def model():
    """The worker's arguments for the model: its tokenizer's files and its card."""
    return {"files": tokenizer_files(), "card": model_card(vocab_size=len(VOCAB))}
