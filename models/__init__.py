"""Flax NNX decoders of LLaMA, Qwen2 and Qwen3, and their weights from Hugging Face checkpoints."""

from tca_jax.models.aliases import ALIASES as ALIASES
from tca_jax.models.config import ModelConfig as ModelConfig
from tca_jax.models.config import read_config as read_config
from tca_jax.models.decoder import Decoder as Decoder
from tca_jax.models.fingerprint import fingerprint as fingerprint
from tca_jax.models.params import LoadedCheckpoint as LoadedCheckpoint
from tca_jax.models.params import load_checkpoint as load_checkpoint
from tca_jax.models.params import load_decoder as load_decoder
from tca_jax.models.params import save_decoder as save_decoder
from tca_jax.models.params import write_config as write_config
from tca_jax.models.rope import RopeConfig as RopeConfig
