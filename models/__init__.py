"""Flax NNX decoders of LLaMA, Qwen2 and Qwen3, and their weights from Hugging Face checkpoints."""

import lazy_loader as _lazy_loader

__getattr__, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)
