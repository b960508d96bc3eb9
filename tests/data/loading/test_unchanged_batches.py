"""Nothing that happens to the files of a data folder after it was opened changes a batch."""

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dist_transformer import verified
from dist_transformer.config.presets import preset
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.collate import MicroBatch
from dist_transformer.data.loading.loader import TrainingData, open_training_data
from dist_transformer.data.loading.plan import epoch_steps
