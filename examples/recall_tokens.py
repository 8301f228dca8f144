"""Token ids of recall-tiny: the bytes themselves, and those that mark turns."""

from __future__ import annotations

BOS, EOS, PAD, USER, ASSISTANT = 256, 257, 258, 259, 260  # ids 0 to 255 are the bytes
VOCAB_SIZE = 264  # a multiple of 8; the last ids are unused
SPECIAL_TOKENS = {
    "<|bos|>": BOS,
    "<|eos|>": EOS,
    "<|pad|>": PAD,
    "<|user|>": USER,
    "<|assistant|>": ASSISTANT,
}
