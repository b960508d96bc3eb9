"""Records of a run in Weights & Biases by `--import dist_transformer.reporting.wandb_sink`, as before `--sinks`."""

from dist_transformer.reporting.sinks import SINKS
from dist_transformer.reporting.trackers import WandbSink

SINKS.register("wandb")(WandbSink)
