"""The settings of training: frozen dataclasses that validate themselves.

A wrong value fails at construction; the error names field, value and remedy. The resolved config of a run is written to
its folder. The docstrings of the fields are the texts of --help.
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from dist_transformer.base.errors import UserError
from dist_transformer.config.measures import ValidationConfig
from dist_transformer.config.plain import OMIT_DEFAULT
from dist_transformer.config.registry import ATTENTIONS, POSITIONS, SCHEDULES, SINK_NAMES
from dist_transformer.config.schema import (
    FLAT,
    build,
    require,
    require_fraction,
    require_known,
    require_not_negative,
    require_positive,
    setting,
    settings_of,
)

EMBEDDED_CORPUS = ("embedded corpus",)
"""Placeholder for the synthetic corpus where --test-mode expects a data folder."""

# Target tokens per micro-batch whose activations fit the caches of a CPU.
_TOKENS_ON_A_CPU = 4096
_TIMEOUTS = ("timeout_minutes", "setup_timeout_minutes", "checkpoint_timeout_minutes", "evaluation_timeout_minutes")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The network of Vaswani et al. 2017, section 3; the defaults are `base`."""

    width: int = 512
    """d_model: width of the residual stream."""
    encoder_layers: int = 6
    """Layers of the encoder."""
    decoder_layers: int = 6
    """Layers of the decoder."""
    heads: int = 8
    """Heads of each attention."""
    head_width: int | None = None
    """d_k = d_v; default: width / heads."""
    ffn_width: int = 2048
    """d_ff: inner width of the feed-forward layers."""
    dropout: float = 0.1
    """P_drop: on every sublayer's output and on embeddings + positions."""
    attention_dropout: float = 0.0
    """Dropout on attention weights; the paper has none."""
    ffn_dropout: float = 0.0
    """Dropout inside the feed-forward layers; the paper has none."""
    activation: Literal["relu", "gelu", "swish"] = "relu"
    """Function inside the feed-forward layers; swish, x · sigmoid(x), is that of Marian's published models."""
    norm: Literal["post", "pre"] = "post"
    """post: LayerNorm(x + sublayer(x)), as in the paper; pre: x + sublayer(LayerNorm(x)), and a norm at the end."""
    norm_epsilon: float = setting(1e-5, **OMIT_DEFAULT)
    """Added to the variance in LayerNorm; Marian has 1e-6."""
    positions: Annotated[str, POSITIONS] = "sinusoidal"
    """sinusoidal: those of the paper; sinusoidal_t2t: those of tensor2tensor, fairseq and Marian; learned: a table."""
    first_position: int = setting(0, **OMIT_DEFAULT)
    """Position of the first token in the table of sinusoids; M2M100 and NLLB have 2."""
    attention: Annotated[str, ATTENTIONS] = setting("softmax", **OMIT_DEFAULT)
    """softmax: as in the paper; registered variants change its scores."""
    max_positions: int = 1024
    """Longest sentence in tokens."""
    tie_embeddings: Literal["all", "target", "none"] = setting("all", written={"all": True, "none": False})
    """Parts that share one matrix. all: source embedding, target embedding and output projection, which becomes target
    if the languages have a vocabulary each; target: the last two; none: each part has its own."""
    output_bias: bool = setting(False, **OMIT_DEFAULT)
    """Add a bias to the output projection, one number per entry of the vocabulary."""
    begin_with_pad: bool = setting(False, **OMIT_DEFAULT)
    """Begin the decoder with the vector of <pad> instead of that of <s>, as Marian's published models do."""
    begin_with_zeros: bool = setting(False, **OMIT_DEFAULT)
    """Begin the decoder with a vector of zeros, as Marian does, instead of that of <s>."""
    begin_with_end: bool = setting(False, **OMIT_DEFAULT)
    """Begin the decoder with the vector of </s> instead of that of <s>, as M2M100 and NLLB do."""
    embedding_init: Literal["xavier", "normal"] = "normal"
    """xavier: uniform by fan; normal: N(0, 1 / width)."""
    vocab_size: int = 0
    """Entries of the vocabulary, or of that of the source language; read from the data folder, 0 until then."""
    target_vocab_size: int = setting(0, **OMIT_DEFAULT)
    """Entries of the vocabulary of the target language; 0: both languages have the same one."""

    def __post_init__(self) -> None:
        sizes = ("width", "encoder_layers", "decoder_layers", "heads", "head_width", "ffn_width", "max_positions")
        require_positive(self, *sizes)
        require_fraction(self, "dropout", "attention_dropout", "ffn_dropout")
        remedy = "it must be above 0 and below 1, such as 1e-6"
        require(0.0 < self.norm_epsilon < 1.0, "norm_epsilon", self.norm_epsilon, remedy)
        if self.head_width is None:
            remedy = f"it must be a multiple of heads ({self.heads}), or set head_width"
            require(self.width % self.heads == 0, "width", self.width, remedy)
        require(self.width % 2 == 0, "width", self.width, "it must be even, because sine and cosine take half each")
        begins = [name for name in ("begin_with_pad", "begin_with_zeros", "begin_with_end") if getattr(self, name)]
        for name in begins[1:]:
            require(False, begins[0], True, f"{name} is set")
        require_not_negative(self, "vocab_size", "target_vocab_size", "first_position")
        remedy = "a learned table begins with the first token: leave first_position out"
        require(not self.first_position or self.positions != "learned", "positions", self.positions, remedy)
        if self.target_vocab_size:
            remedy = "two vocabularies cannot share all three matrices: use target or none"
            require(self.tie_embeddings != "all", "tie_embeddings", self.tie_embeddings, remedy)
        require_known(self, "positions", POSITIONS)
        require_known(self, "attention", ATTENTIONS)

    @property
    def attention_head_width(self) -> int:
        return self.head_width if self.head_width is not None else self.width // self.heads

    def for_vocabularies(self, vocab_size: int, target_vocab_size: int) -> "ModelConfig":
        """Return the network for vocabularies of these sizes. Two of them can share only the matrices of the target."""
        tied = "target" if target_vocab_size and self.tie_embeddings == "all" else self.tie_embeddings
        return replace(self, vocab_size=vocab_size, target_vocab_size=target_vocab_size, tie_embeddings=tied)

    @property
    def vocab_sizes(self) -> tuple[int, int]:
        """Entries of the vocabularies; a second size of 0: both languages have the same one."""
        return self.vocab_size, self.target_vocab_size

    @property
    def output_size(self) -> int:
        """Entries that the output projection scores: those of the target vocabulary."""
        return self.target_vocab_size or self.vocab_size


NOT_OF_WEIGHTS = frozenset({"dropout", "attention_dropout", "ffn_dropout", "embedding_init"})
"""Settings of the network on which loaded weights do not depend; a run that starts with some chooses them itself."""
OF_VOCABULARIES = frozenset({"vocab_size", "target_vocab_size"})
"""Settings of the network that the data's vocabularies decide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """Batch of one optimizer step: `packs_per_step` packs, on any number of ranks.

    A pack is a group of sentence pairs that fit fixed budgets of tokens.
    """

    max_target_tokens: int = 392
    """Most target tokens per pack; longer sentences are left out."""
    max_source_tokens: int | None = None
    """Most source tokens per pack; default: max_target_tokens times the data's ratio of source to target tokens."""
    max_sentences: int | None = None
    """Most sentence pairs per pack; default: an eighth of max_target_tokens."""
    packs_per_step: int = 64
    """Packs per optimizer step, on all ranks together."""
    target_tokens_per_step: int | None = setting(None, **OMIT_DEFAULT)
    """Most target tokens per optimizer step, on all ranks together: sets packs_per_step to the nearest number of packs,
    and is None after that."""
    packs_per_micro_batch: int | None = None
    """Packs that a rank computes at once; this changes dropout masks and nothing else. Default on a CPU: an eighth of a
    step. Default on a GPU: the rank's share of a step, or an equal part of it that fits memory."""
    window_shards: int = 8
    """Shards that are shuffled together. More shards mix better; a node holds up to three times as many in memory."""

    def __post_init__(self) -> None:
        require_positive(self, "max_target_tokens", "max_source_tokens", "max_sentences")
        require_positive(self, "packs_per_step", "packs_per_micro_batch", "window_shards")
        if (tokens := self.target_tokens_per_step) is not None:
            remedy = f"it cannot be below a pack ({self.max_target_tokens}): lower max_target_tokens too"
            require(self.max_target_tokens <= tokens, "target_tokens_per_step", tokens, remedy)
            object.__setattr__(self, "packs_per_step", round(tokens / self.max_target_tokens))
            # The tokens are not kept, so a run has one setting for the size of a step.
            object.__setattr__(self, "target_tokens_per_step", None)
        remedy = f"it cannot be above packs_per_step ({self.packs_per_step})"
        require(self.packs_at_once <= self.packs_per_step, "packs_per_micro_batch", self.packs_per_micro_batch, remedy)

    @property
    def packs_at_once(self) -> int:
        """`packs_per_micro_batch`, or 1 until it is chosen."""
        return self.packs_per_micro_batch or 1

    def packs_on_a_cpu(self, world_size: int, *, passes: int = 1) -> int:
        """Return the packs that a rank on a CPU computes at once, each `passes` times.

        It is the smallest of an eighth of a step, the rank's share of a step, and the packs that fit the caches.
        """
        # With an eighth, up to eight ranks compute the same number and draw the same dropout masks.
        share = -(-self.packs_per_step // world_size)
        return max(1, min(self.packs_per_step // 8, share, _TOKENS_ON_A_CPU // (passes * self.max_target_tokens)))

    def accumulation_steps(self, world_size: int) -> int:
        """Return the number of micro-batches that each rank computes for one optimizer step."""
        if world_size > self.packs_per_step:
            raise UserError(
                f"packs_per_step is {self.packs_per_step} but {world_size} processes were started: "
                "raise --batch.packs-per-step (and lower --batch.max-target-tokens to keep the batch), or start fewer"
            )
        return -(-self.packs_per_step // (world_size * self.packs_at_once))


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer and its learning rate (section 5.3)."""

    kind: Literal["adam", "muon"] = setting("adam", **OMIT_DEFAULT)
    """muon: orthogonalised updates for the matrices of encoder and decoder, Adam for the rest (docs/muon.md)."""
    momentum: float = setting(0.95, **OMIT_DEFAULT)
    """Decay of Muon's mean of gradients."""
    schedule: Annotated[str, SCHEDULES] = "noam"
    """noam: lr_scale · width^-0.5 · min(step^-0.5, step · warmup^-1.5). The others rise linearly to peak_lr, then:
    inverse_sqrt falls with step^-0.5, cosine falls along half a cosine to min_lr at max_steps, constant stays."""
    warmup_steps: int = 4000
    """Steps of the linear rise of the learning rate."""
    lr_scale: float = 1.0
    """Factor on the noam learning rate; refused with the other schedules."""
    peak_lr: float = 1e-3
    """Highest learning rate, reached at warmup_steps; refused with noam, which has a peak of its own."""
    min_lr: float = setting(0.0, **OMIT_DEFAULT)
    """Lowest learning rate after the warm-up, for every schedule."""
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.98
    """Decay of the mean of squared gradients."""
    epsilon: float = 1e-9
    """Added to the root of the mean of squared gradients."""
    weight_decay: float = 0.0
    """Decoupled weight decay (AdamW), on matrices only."""
    max_grad_norm: float = 0.0
    """Clip the gradient to this norm; 0: no clipping, as in the paper."""
    label_smoothing: float = 0.1
    """Share of the target probability that is spread over the vocabulary."""
    rdrop_alpha: float = setting(0.0, **OMIT_DEFAULT)
    """R-Drop (Liang et al. 2021, who use 5): compute each sentence twice, under two dropout masks, and add alpha / 2
    times the mean KL divergence of both outputs to the mean loss. It doubles the work of a step; 0: off."""

    def __post_init__(self) -> None:
        require_positive(self, "warmup_steps", "lr_scale", "peak_lr", "epsilon")
        require_fraction(self, "beta1", "beta2", "momentum", "label_smoothing")
        require_not_negative(self, "weight_decay", "max_grad_norm", "min_lr", "rdrop_alpha")
        require_known(self, "schedule", SCHEDULES)
        fits = self.schedule == "noam" or self.min_lr <= self.peak_lr
        require(fits, "min_lr", self.min_lr, f"it cannot be above peak_lr ({self.peak_lr})")

    @property
    def passes(self) -> int:
        """Passes of each micro-batch through the model: 2 with R-Drop."""
        return 2 if self.rdrop_alpha > 0 else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Training data: folders, their mix, and caches."""

    data: tuple[str, ...]
    """Data folders made by dist-transformer prepare, or their URLs (s3://, gs://, hf://, …); several are mixed."""
    data_weights: tuple[float, ...] = ()
    """Relative share of the target tokens for each data folder; default: by size and data_temperature."""
    data_temperature: float = 1.0
    """Shares are proportional to tokens^(1 / temperature). 1: by size; larger: more even. Arivazhagan et al. 2019."""
    cache_dir: Path | None = None
    """Folder on local disk that caches shards behind URLs; default: ~/.cache/dist_transformer."""
    cache_gib: float = 50.0
    """Largest size of cache_dir in GiB."""
    memory_gib: float = 1.0
    """GiB of shards that a node keeps in memory, so that the next epoch does not read them again."""
    on_bad_shard: Literal["stop", "skip"] = "stop"
    """If a shard is missing or damaged: stop ends the run; skip leaves it out of the epoch and reports it."""

    def __post_init__(self) -> None:
        require_positive(self, "data_temperature", "cache_gib")
        require_not_negative(self, "memory_gib")
        weights = self.data_weights
        fit = not weights or (len(weights) == len(self.data) and all(weight > 0 for weight in weights))
        require(fit, "data_weights", weights, "pass one weight above 0 for each folder of --data")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints: which are saved and kept, and where training starts."""

    save_every: int = 1000
    """Steps between checkpoints."""
    keep_checkpoints: int = 3
    """Newest checkpoints to keep (weights, optimizer moments and position, for resuming)."""
    keep_weights: int = 20
    """Newest weight files to keep (for averaging)."""
    keep_best: int = 5
    """Weight files of the best validations to keep in addition; every validation is followed by a save."""
    init_from: Path | None = None
    """Model folder whose architecture a run has, and whose weights a new run starts from, with a fresh optimizer."""
    init_vocabulary: Literal["same", "shared_pieces"] = "same"
    """same: init_from must have the vocabulary of the data; shared_pieces: copy the vectors of pieces in both."""
    resume: Literal["auto", "required", "never"] = "auto"
    """auto: resume if there is a checkpoint; required: fail without one; never: refuse a run folder that has one."""

    def __post_init__(self) -> None:
        require_positive(self, "save_every", "keep_checkpoints", "keep_weights")
        require_not_negative(self, "keep_best")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutConfig:
    """Timeouts: how long parts of a job may make no progress, and the job take."""

    timeout_minutes: float = 0.0
    """End the job without progress for so long; 0: 20 times its slowest recent step, at least 5 and at most 30."""
    setup_timeout_minutes: float = 30.0
    """The same for the time up to the first step; the message names the ranks that did not join."""
    checkpoint_timeout_minutes: float = 60.0
    """The same for one checkpoint."""
    evaluation_timeout_minutes: float = 120.0
    """The same for one validation."""
    walltime_minutes: float = 0.0
    """Time limit of the job, from its start; training saves and ends before it. 0: SLURM's limit, if there is one."""

    def __post_init__(self) -> None:
        require_positive(self, *_TIMEOUTS[1:])
        require_not_negative(self, "timeout_minutes", "walltime_minutes")

    @property
    def collective_timeout_minutes(self) -> float:
        """Timeout of one collective in minutes."""
        # Longer than every limit above, so that the watchdog ends the job first: it names the rank that is behind.
        return 1.5 * max(getattr(self, name) for name in _TIMEOUTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Settings of a training run.

    In flags and in config.json, settings of groups that are marked `FLAT` have no prefix. `TrainConfig.of`
    and `changed` take every setting by the name of its flag.
    """

    corpora: Annotated[DataConfig, FLAT]
    run_dir: Path
    """Run folder; training resumes from its newest checkpoint."""
    deepspeed_config: Path | None = None
    """JSON file with zero_optimization, communication, offload keys, or a shipped name (zero2); default: zero1."""
    max_steps: int = 100_000
    """Total optimizer steps, counted from the start of the run."""
    log_every: int = 50
    """Steps between log lines."""
    ema_decay: float = 0.0
    """Decay per step of a moving average of the weights, which is saved with them; 0: none; often 0.999 or 0.9999."""
    guided_attention: float = setting(0.0, **OMIT_DEFAULT)
    """Weight of the loss of alignments in a head of cross-attention (docs/alignments.md); 0: none; usual: 0.05."""
    freeze: tuple[str, ...] = setting((), **OMIT_DEFAULT)
    """Parts that stay as they are: embeddings, encoder, encoder.0-3, decoder, cross_attention, norms, biases, globs."""
    max_skipped_steps: int = 10
    """Abort after this many steps in a row with a loss or gradient that is not finite."""
    precision: Literal["bf16", "fp32"] | None = None
    """Arithmetic of the model; default: bf16 if the device supports it, otherwise fp32."""
    compile: Literal["auto", "on", "off"] = setting("auto", written={"on": True, "off": False})
    """Compile layers and loss on a GPU, in bf16 and at ZeRO stages 0 to 2; auto: from 6,000 target tokens at once."""
    cuda_graphs: Literal["auto", "yes", "no"] = setting("auto", **OMIT_DEFAULT)
    """Start the kernels of a micro-batch by one call, at ZeRO stages 0 and 1 on GPUs in bf16; auto: no, so far."""
    profile: str | None = setting(None, **OMIT_DEFAULT)
    """STEP:COUNT, such as 100:3: write a trace of COUNT steps from STEP on, of rank 0, into the run folder."""
    sinks: tuple[str, ...] = setting(("tensorboard",), commas=True, **OMIT_DEFAULT)
    """Places of the figures beside metrics.jsonl, separated by commas: tensorboard, wandb, mlflow."""
    seed: int = 1
    """Seed of the first weights, the dropout masks and the order of the data."""
    checkpoints: Annotated[CheckpointConfig, FLAT] = field(default_factory=CheckpointConfig)
    validation: Annotated[ValidationConfig, FLAT] = field(default_factory=ValidationConfig)
    timeouts: Annotated[TimeoutConfig, FLAT] = field(default_factory=TimeoutConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        require_positive(self, "max_steps", "log_every", "max_skipped_steps")
        require_fraction(self, "ema_decay")
        require_not_negative(self, "seed", "guided_attention")
        remedy = f"model.attention is {self.model.attention}, and only softmax can be guided: set this to 0"
        is_guided = self.guided_attention > 0
        require(self.model.attention == "softmax" or not is_guided, "guided_attention", self.guided_attention, remedy)
        require({*self.sinks} <= {*SINK_NAMES}, "sinks", self.sinks, f"choose among {', '.join(SINK_NAMES)}")
        if self.profile is not None:
            found = re.fullmatch("([1-9][0-9]{0,12}):([1-9][0-9]{0,12})", self.profile)
            fits = found is not None and int(found[1]) + int(found[2]) - 1 <= self.max_steps
            remedy = f"it must be STEP:COUNT, such as 100:3, and end by max_steps ({self.max_steps})"
            require(fits, "profile", self.profile, remedy)
        masks_differ = any((self.model.dropout, self.model.attention_dropout, self.model.ffn_dropout))
        remedy = "without dropout both passes are equal, so it has no effect: set model.dropout above 0, or this to 0"
        require(masks_differ or self.optimizer.passes == 1, "optimizer.rdrop_alpha", self.optimizer.rdrop_alpha, remedy)

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """First step and number of steps of `profile`."""
        if self.profile is None:
            return None
        first, count = map(int, self.profile.split(":"))
        return first, count

    @classmethod
    def of(cls, **settings: Any) -> "TrainConfig":
        """Build a config from settings by the names of their flags: `of(data=("data",), save_every=10, …)`."""
        return build(cls, _known(settings))

    @property
    def arithmetic(self) -> Literal["bf16", "fp32"]:
        """`precision`, or bf16 until it is chosen."""
        return self.precision or "bf16"

    def changed(self, **settings: Any) -> "TrainConfig":
        """Return a config with other values for some settings, which are given by the names of their flags."""
        return build(TrainConfig, _known(settings), default=self)


RUN_IDENTITY = ("data_sha256", "init_from_sha256", "deepspeed", "threads")
"""Entries of a run's config.json other than the settings."""


def _known(settings: dict[str, Any]) -> dict[str, Any]:
    names = {each.name for each in settings_of(TrainConfig)} | {"model", "batch", "optimizer"}
    if wrong := settings.keys() - names:
        raise TypeError(f"TrainConfig has no setting {', '.join(sorted(wrong))}")
    return settings
