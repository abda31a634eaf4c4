"""Prompts of an exact number of tokens, made of plain sentences."""

import json
import urllib.request
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from lab.load.plan import Turn
from lab.load.text import prompt_of

Encode = Callable[[str], Sequence[int]]
_TOKENIZE_TIMEOUT_S = 30.0


class NoTokenizer(Exception):
    """Nobody can say what the tokens of a text are; a sentence."""


def local_tokenizer(path: Path) -> Encode:
    """Of a `tokenizer.json` or the directory with one. Raises `NoTokenizer`."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise NoTokenizer(f"{file} does not exist; --tokenizer wants a tokenizer.json or a directory with one")
    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


class Prompts:
    """What sessions say, as token ids. Made before the load starts, because tokenizing takes time."""

    def __init__(self, encode: Encode) -> None:
        self._of = lru_cache(maxsize=None)(lambda piece: tuple(prompt_of(encode, piece.seed, piece.num_tokens)))

    def of(self, turn: Turn) -> list[int]:
        """What the client adds in a turn."""
        return [token for piece in turn.pieces for token in self._of(piece)]


def server_tokenizer(url: str, model: str, api_key: str) -> Encode:
    """What `/tokenize` of vLLM and SGLang says. The result raises `NoTokenizer` when the server cannot."""

    def encode(text: str) -> list[int]:
        body = json.dumps({"model": model, "prompt": text, "add_special_tokens": False}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
        request = urllib.request.Request(f"{url}/tokenize", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=_TOKENIZE_TIMEOUT_S) as answer:
                return list(json.load(answer)["tokens"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise NoTokenizer(f"{url}/tokenize cannot be used ({error}); name a tokenizer with --tokenizer") from error

    return encode
