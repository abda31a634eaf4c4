"""What a simulated engine says: the next token as a function of all tokens before it.

So an answer that came through several workers is right only if it is the answer of one. Tokens are words where the
model's tokenizer tells which ones are.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

_MAX_WORDS = 1024
_FALLBACK = tuple(range(100, 400))
_WORD_STARTS = ("Ġ", "▁")  # how byte-level BPE and SentencePiece write the space before a word
_MIX = 2654435761


def state_of(tokens: Sequence[int]) -> int:
    """What the next token depends on: a checksum of all tokens so far."""
    return zlib.crc32(np.asarray(tokens, dtype="<u4").tobytes())


def state_after(state: int, token: int) -> int:
    """The state when one more token was appended."""
    return zlib.crc32(token.to_bytes(4, "little"), state)


@dataclass(frozen=True)
class Vocabulary:
    """The only model here."""

    words: tuple[int, ...]
    """Token ids it chooses from."""
    eos_every: int
    """About one token in so many is the end of the answer; 0: never."""

    def next_token(self, state: int, eos_token_id: int | None) -> int:
        """The token that follows; `eos_token_id` None where the answer may not end."""
        mixed = (state * _MIX) & 0xFFFFFFFF
        if eos_token_id is not None and self.eos_every and (mixed >> 4) % self.eos_every == 0:
            return eos_token_id
        return self.words[(mixed >> 8) % len(self.words)]

    def continuation(self, tokens: Sequence[int], num_tokens: int, eos_token_id: int | None = None) -> list[int]:
        """The answer to `tokens`, up to its end or `num_tokens`."""
        state, answer = state_of(tokens), list[int]()
        while len(answer) < num_tokens and (not answer or answer[-1] != eos_token_id):
            answer.append(self.next_token(state, eos_token_id))
            state = state_after(state, answer[-1])
        return answer


@lru_cache(maxsize=4)
def word_tokens(model: Path) -> tuple[int, ...]:
    """Ids of common words in the tokenizer of a model directory; some plain ids where it has none that one can read."""
    try:
        vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
        entries = vocabulary.items() if isinstance(vocabulary, dict) else ((e[0], i) for i, e in enumerate(vocabulary))
        words = sorted(int(index) for text, index in entries if _is_word(str(text)))
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return _FALLBACK
    return tuple(words[:_MAX_WORDS]) or _FALLBACK


def _is_word(text: str) -> bool:
    return text.startswith(_WORD_STARTS) and 3 <= len(text) - 1 <= 9 and text[1:].isascii() and text[1:].islower()
