"""`RunConfig` and its sections: every key with its type, default and checks.

One file for each section; run.py has the checks of one section against another. Nothing here imports torch.
"""

from moetune.config.schema.adapt import AdaptConfig, ChoiceConfig, ExpertsConfig, LoraConfig
from moetune.config.schema.data import DataConfig, data_sets, path_and_split
from moetune.config.schema.model import (
    BASE_PARTS,
    BaseConfig,
    BasePart,
    Into,
    ModelConfig,
    QuantizedDtype,
    Storage,
    storage_in,
)
from moetune.config.schema.optimizer import PARTS, OptimizerConfig, OptimizerName, Part, PartOptimizers
from moetune.config.schema.parallel import HardwareConfig, ParallelConfig
from moetune.config.schema.run import RunConfig
from moetune.config.schema.train import EarlyStoppingConfig, KeptConfig, TrainConfig
