"""Qwen2, Qwen2.5, Qwen3 and Llama decoders that keep their K and V in jaxkv's paged cache."""

from models.qwen.config import QwenConfig
from models.qwen.dense import dense_attend, dense_forward
from models.qwen.init import abstract_model, random_model
from models.qwen.load import LoadedModel, config_from_folder, load
from models.qwen.modeling import DecoderLayer, Qwen
from models.qwen.rope import RopeConfig
from models.qwen.sharding import shard
from models.qwen.tokenizer import TextStream, Tokenizer

__all__ = [
    "DecoderLayer",
    "LoadedModel",
    "Qwen",
    "QwenConfig",
    "RopeConfig",
    "TextStream",
    "Tokenizer",
    "abstract_model",
    "config_from_folder",
    "dense_attend",
    "dense_forward",
    "load",
    "random_model",
    "shard",
]
