"""Configuration: frozen data, checked on construction. The one source of defaults, help texts and command-line flags.

The bare defaults are the default preset, a small llama-shaped model; the other presets are TOML files in presets/.
Tested by: tests/test_config.py."""

from tapeless.config.blocks import DEFAULT_BLOCKS as DEFAULT_BLOCKS
from tapeless.config.fields import nearest as nearest
from tapeless.config.fields import require as require
from tapeless.config.fields import seconds as seconds
from tapeless.config.model import AnyModelConfig as AnyModelConfig
from tapeless.config.model import Lora as Lora
from tapeless.config.model import ModelConfig as ModelConfig
from tapeless.config.model import SimpleLMConfig as SimpleLMConfig
from tapeless.config.recipe import KINDS as KINDS
from tapeless.config.recipe import PRESETS as PRESETS
from tapeless.config.recipe import TABLES as TABLES
from tapeless.config.recipe import Recipe as Recipe
from tapeless.config.recipe import checked as checked
from tapeless.config.recipe import load_config as load_config
from tapeless.config.recipe import load_preset as load_preset
from tapeless.config.recipe import preset_names as preset_names
from tapeless.config.recipe import preset_recipe as preset_recipe
from tapeless.config.recipe import read_recipe as read_recipe
from tapeless.config.registry import OPTIMIZERS as OPTIMIZERS
from tapeless.config.registry import READERS as READERS
from tapeless.config.registry import REPORTERS as REPORTERS
from tapeless.config.registry import ROLES as ROLES
from tapeless.config.registry import training_names as training_names
from tapeless.config.sampling import MAX_TOKENS as MAX_TOKENS
from tapeless.config.sampling import Sampling as Sampling
from tapeless.config.train import FUNCTION as FUNCTION
from tapeless.config.train import TrainConfig as TrainConfig

TOKENIZERS = ("bytes", "char", "bpe", "bytes+chat", "char+chat")
TRAINED_TOKENIZERS = ("char", "bpe", "char+chat")  # on the data
WEIGHTS = ("raw", "ema")  # of a checkpoint: trained, or their moving average
