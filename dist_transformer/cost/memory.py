"""Memory of a rank by ZeRO stage, and the micro-batches that fit a GPU.

The memory is that of the allocations of DeepSpeed 0.19 for this engine, term by term.

P parameters, N ranks, b bytes per element of the training precision (bf16: 2, fp32: 4). Terms that DeepSpeed partitions
are P / N; its padding is left out. Gradients are summed in fp32 in both precisions.

| | weights | fp32 copy | moments | gradients | in addition, during the update |
|---|---|---|---|---|---|
| 0 | bP | 4P (fp32: none) | 8P | 4P | 4P that is sent, on one rank too |
| 1, bf16 | 2P | 4P/N | 8P/N | 4P, always | none |
| 1, fp32 | 4P | 4P/N | 8P/N | 4P/N, and 4P while micro-batches accumulate | 4P/N |
| 2 | bP | 4P/N | 8P/N | 4P/N | none (fp32: 4P/N) |
| 3 | bP/N | 4P/N | 8P/N | 4P/N, always | 4P/N |

A moving average of the weights (`ema_decay`) is partitioned like the moments: 4P or 4P/N more. Muon has one moment of
the M parameters in matrices: 4M or 4M/N less. Its update takes (8 + b)M more, and at stage 3 another bM.

A save at stages 1 and 2 gathers the fp32 weights, the moments and the average on every rank of several, in pieces: 12P,
or 16P, and at most 0.75 GiB, or 1 GiB.

Sources: stage 0: `training/engine/plain_adam.py`. In DeepSpeed, stage 1 in bf16: `runtime/bf16_optimizer.py`; stages 1
and 2: `runtime/zero/stage_1_and_2.py`; stage 3: `runtime/zero/stage3.py`. `tests/distributed/test_memory.py` compares
the table with the tensors of real engines.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dist_transformer.config.settings import ModelConfig, TrainConfig
from dist_transformer.model.freezing import frozen_names
from dist_transformer.model.loss import logit_rows
from dist_transformer.model.transformer import shapes_only

BYTES = {"bf16": 2, "fp32": 4}
SENTENCE_TOKENS = 30.0
"""Mean length of a sentence of news, used without data."""
# Elements that DeepSpeed reduces at once without ZeRO, and at stage 1 in bf16 (`runtime/engine.py`).
STAGE_0_BUCKET = 500_000_000
SAVED_AT_ONCE = 2**26
"""Elements of each flat tensor of stages 1 and 2 that a save gathers at once: 256 MiB."""
# CUDA context and libraries; communication buffers of NCCL. A round figure, not measured.
_CONTEXT_BYTES = int(1.5 * 2**30)
# Libraries of a process on a CPU. The first step of 88 and 353 million parameters took 0.41 and 0.51 GiB more than the
# peak of ZeRO-1 in bf16 (2026-11-29).
_CPU_LIBRARIES_BYTES = int(0.4 * 2**30)
# Share that the allocator loses. A round figure, not measured.
_FRAGMENTATION = 0.05
# Target tokens per micro-batch beyond which a GPU gains no speed. For `big` on an H100, one micro-batch of 25k took 84
# ms and eight of 3k took 415 ms (2026-11-23), because the host needs about 45 ms for each.
_ENOUGH_TOKENS = 32_768
# Target tokens per micro-batch from which compiled layers are faster. On an H100 a step of `big` became 1.20 times
# as fast at 25k, 1.07 times at 6k and 0.87 times at 3k, where the host is the limit.
_TOKENS_TO_COMPILE = 6_000
# Share of the memory that the plan may use. The largest measured excess over the plan is 5%.
_USABLE = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroSettings:
    """The keys of `zero_optimization` that decide memory and communication, with DeepSpeed's defaults."""

    stage: int
    reduce_bucket_size: int = 500_000_000
    overlap_comm: bool = False
    stage3_param_persistence_threshold: int = 100_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    offload_optimizer: bool = False
    offload_param: bool = False

    @classmethod
    def from_ds_config(cls, ds_config: dict[str, Any]) -> "ZeroSettings":
        zero = ds_config["zero_optimization"]
        values = {field.name: zero[field.name] for field in dataclasses.fields(cls) if field.name in zero}
        for name in ("offload_optimizer", "offload_param"):
            values[name] = (zero.get(name) or {}).get("device", "none") != "none"
        stage = int(zero.get("stage", 0))
        # DeepSpeed's default is to overlap in stage 3 only.
        return cls(**{"overlap_comm": stage == 3, **values, "stage": stage})

    @property
    def name(self) -> str:
        return f"ZeRO-{self.stage}{' offload' if self.offload_optimizer else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """Elements of a model."""

    parameters: int
    trained: int
    """Parameters that are not frozen."""
    matrices: int
    """Trained elements in the matrices of encoder and decoder."""
    muon_flops: int
    """Operations of Muon's products in an update: five iterations of 4 m² n + 2 m³ for a matrix of m · n, m ≤ n."""
    persistent: int
    """Parameters in tensors that are small enough for ZeRO-3 to keep on every rank."""
    persistent_tensors: int
    """Number of these tensors."""
    constants: int
    """Bytes of tables that are not trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on one rank's device, and on its host."""

    weights: int
    masters: int
    moments: int
    gradients: int
    """Peak of the gradients."""
    buffers: int
    """Communication buffers; ZeRO-3: also the gathered parameters."""
    activations: int
    """Tensors that are kept for the backward pass."""
    loss: int
    """Peak of the loss, which occurs while all activations are kept."""
    update: int
    """Copies of the gradients during the update."""
    resident: int
    """Bytes that stay between steps: weights, their fp32 copy, moments and constants; the gradients in stage 3, and in
    stage 1 in bf16; a bucket in stage 3."""
    saving: int
    """Peak of a save: what stays between steps, and what stages 1 and 2 gather on every rank."""
    host: int = 0
    """States that offload keeps on the host."""
    libraries: int = _CONTEXT_BYTES
    """CUDA and libraries; on a CPU, libraries alone."""

    @property
    def peak(self) -> int:
        """Peak of the tensors: at the loss, with all activations, during the update, or at a save."""
        passing = self.weights + self.masters + self.moments + self.gradients
        return max(passing + max(self.buffers + self.activations + self.loss, self.update), self.saving)

    @property
    def needed(self) -> int:
        """Memory that a GPU must have, or a process on a CPU until its first save."""
        return int(self.peak * (1 + _FRAGMENTATION)) + self.libraries


def model_sizes(config: ModelConfig, zero: ZeroSettings, freeze: Sequence[str] = ()) -> ModelSizes:
    sizes, shapes, constants = _tensors(config)
    counts, frozen = [*sizes.values()], frozen_names(sizes, freeze)
    matrices = [sides for name, sides in shapes.items() if name not in frozen]
    persistent = [count for count in counts if count <= zero.stage3_param_persistence_threshold]
    return ModelSizes(
        parameters=sum(counts),
        trained=sum(size for name, size in sizes.items() if name not in frozen),
        matrices=sum(m * n for m, n in matrices),
        muon_flops=5 * sum(4 * m**2 * n + 2 * m**3 for m, n in matrices),
        persistent=sum(persistent),
        persistent_tensors=len(persistent),
        constants=constants,
    )


@functools.cache
def _tensors(config: ModelConfig) -> tuple[dict[str, int], dict[str, tuple[int, int]], int]:
    """Count the elements of each parameter, the sides of the matrices, the shorter first, and the bytes of tables."""
    model = shapes_only(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    sides = {name: (min(matrix.shape), max(matrix.shape)) for name, matrix in model.hidden_matrices().items()}
    return sizes, sides, sum(table.numel() * table.element_size() for table in model.buffers())


def choose_compilation(config: TrainConfig, *, stage: int) -> tuple[bool, str]:
    """Choose whether a GPU compiles layers and loss, if its kernels let it.

    Args:
        stage: ZeRO stage.

    Returns:
        the choice, and its reason in a few words.
    """
    # Stage 3 gathers parameters in hooks, which break graphs. In fp32 attention has no fixed shapes.
    if stage == 3 or config.arithmetic == "fp32":
        return False, "ZeRO-3" if stage == 3 else "fp32"
    if config.compile != "auto":
        return config.compile == "on", f"--compile {config.compile}"
    tokens = config.optimizer.passes * config.batch.packs_at_once * config.batch.max_target_tokens
    few = tokens < _TOKENS_TO_COMPILE
    return not few, f"{tokens:,} target tokens at once, {'below' if few else 'at least'} {_TOKENS_TO_COMPILE:,}"


def predict_memory(
    config: TrainConfig,
    zero: ZeroSettings,
    *,
    world_size: int,
    source_budget: int,
    sentence_tokens: float = SENTENCE_TOKENS,
    on_cpu: bool = False,
) -> Memory:
    """Predict the memory of one rank.

    Args:
        config: settings that include the vocabulary size and the packs that a GPU computes at once.
        source_budget: source tokens per pack.
        sentence_tokens: mean length, weighted by tokens; only attention without the fused kernel depends on it.
    """
    sizes, precision = model_sizes(config.model, zero, config.freeze), config.arithmetic
    # Buffers are computed whole, full or not, and all passes of R-Drop at once.
    packs = config.optimizer.passes * config.batch.packs_at_once
    source_tokens, target_tokens = packs * source_budget, packs * config.batch.max_target_tokens
    element, ranks = BYTES[precision], world_size if zero.stage else 1
    share = -(-sizes.trained // ranks)
    weights = element * (-(-sizes.parameters // ranks) if zero.stage == 3 else sizes.parameters)
    masters = 0 if zero.stage == 0 and precision == "fp32" else 4 * share
    gradients = 4 * share
    update = 0 if precision == "bf16" and zero.stage < 3 else 4 * share
    if zero.stage == 0:
        update = 4 * min(sizes.trained, STAGE_0_BUCKET)
    if zero.stage == 1 and precision == "bf16":
        gradients = 4 * sizes.trained
    elif zero.stage == 1 and config.batch.accumulation_steps(world_size) > 1:
        gradients += 4 * sizes.trained
    moments = (12 if config.ema_decay > 0 else 8) * share
    if config.optimizer.kind == "muon":
        moments -= 4 * sizes.matrices // ranks
        update += (8 + element * (2 if zero.stage == 3 else 1)) * sizes.matrices
    resident, buffers = weights + masters + moments + sizes.constants, 0
    if zero.stage == 3 or (zero.stage == 1 and precision == "bf16"):
        resident += gradients
    if zero.stage == 2 or (zero.stage == 1 and precision == "fp32"):
        buffers = element * zero.reduce_bucket_size * (2 if zero.overlap_comm else 1)
    if zero.stage == 2 and precision == "bf16":
        # The bucket that is being sent is in fp32.
        buffers += 4 * zero.reduce_bucket_size
    if zero.stage == 3:
        resident += 4 * zero.reduce_bucket_size
        buffers = 4 * zero.reduce_bucket_size + element * min(sizes.parameters, zero.stage3_max_live_parameters)
    saving = weights + sizes.constants if zero.offload_optimizer else resident
    if zero.stage in (1, 2) and ranks > 1:
        saving += int(ranks * (4 * share + moments) * min(1.0, SAVED_AT_ONCE / sizes.trained))
    host = 0
    if zero.offload_optimizer:
        host = masters + moments + gradients + update
        masters = moments = gradients = update = 0
    if zero.offload_param:
        host += weights
        weights = 0
    return Memory(
        weights=weights + sizes.constants,
        masters=masters,
        moments=moments,
        gradients=gradients,
        buffers=buffers,
        activations=activation_bytes(config.model, precision, source_tokens, target_tokens, sentence_tokens),
        loss=_loss_bytes(config, target_tokens, compiled=choose_compilation(config, stage=zero.stage)[0]),
        update=update,
        resident=resident,
        saving=saving,
        host=host,
        libraries=_CPU_LIBRARIES_BYTES if on_cpu else _CONTEXT_BYTES,
    )


def activation_bytes(
    config: ModelConfig, precision: str, source_tokens: int, target_tokens: int, sentence_tokens: float
) -> int:
    """Count the bytes that autograd keeps of one micro-batch.

    D is the width, I = heads · head width, F the feed-forward width, b the bytes per element. For each token of its
    queries, a sublayer keeps its input (bD), the dropout mask (D, one byte each) and the sum before the norm (bD).
    Attention also keeps queries, keys, values and its output (4 · bI) and the log-sum-exp of the softmax (4 bytes per
    head); without the fused kernel, it keeps the weights instead (per head and key: 4 bytes in fp32, and a copy in
    bf16). Feed-forward also keeps its inner values (bF; with gelu or swish, which need their input too, 2bF).
    """
    element, width, heads = BYTES[precision], config.width, config.heads
    inner = heads * config.attention_head_width
    around = width * (2 * element + (1 if config.dropout else 0))
    if precision == "bf16" and config.attention_dropout == 0:
        scores = 4 * heads
    else:
        scores = int(heads * sentence_tokens * (4 if precision == "fp32" else 4 + element))
    kept = 1 if config.activation == "relu" else 2
    feed_forward = around + config.ffn_width * kept * element
    if config.ffn_dropout:
        feed_forward += config.ffn_width * (1 + element)
    self_attention = around + 4 * element * inner + scores
    cross_queries, cross_keys = around + 2 * element * inner + scores, 2 * element * inner
    encoder = config.encoder_layers * (self_attention + feed_forward)
    decoder = config.decoder_layers * (self_attention + cross_queries + feed_forward)
    embedding = width if config.dropout else 0
    per_source = encoder + config.decoder_layers * cross_keys + embedding + element * width
    return per_source * source_tokens + (decoder + embedding) * target_tokens


def _loss_bytes(config: TrainConfig, rows: int, *, compiled: bool) -> int:
    """Count the bytes of the loss of `rows` target tokens; compiled, it has no copy of logits in fp32."""
    # Hidden states and their gradient: 2bTD. The projection's gradient in fp32 and a cast copy: VD · (4 + b). One block
    # of logits in the training precision, and, unless compiled, two fp32 copies of a part of it. R-Drop also copies the
    # hidden states of both passes, and its divergence needs four more fp32 tensors of half a part.
    element, passes = BYTES[config.arithmetic], config.optimizer.passes
    size, width = config.model.output_size, config.model.width
    block, part = logit_rows(rows, size, width, "cuda", compiled=compiled, multiple=passes)
    logits = size * (block * element + (0 if compiled else part * 8 * passes))
    return (1 + passes) * element * rows * width + size * width * (4 + element) + logits


def packs_that_fit(
    config: TrainConfig, zero: ZeroSettings, *, world_size: int, source_budget: int, memory_bytes: int
) -> int:
    """Return the largest equal part of a rank's share of a step that fits the memory and `_ENOUGH_TOKENS`, or 1.

    Args:
        config: settings that include the vocabulary size.
        source_budget: source tokens per pack.
        memory_bytes: memory of the smallest GPU.
    """
    batch = config.batch
    share = -(-batch.packs_per_step // world_size)
    for parts in range(1, share + 1):
        packs = -(-share // parts)
        part = dataclasses.replace(config, batch=dataclasses.replace(batch, packs_per_micro_batch=packs))
        memory = predict_memory(part, zero, world_size=world_size, source_budget=source_budget)
        tokens = config.optimizer.passes * packs * batch.max_target_tokens
        if tokens <= _ENOUGH_TOKENS and memory.needed <= _USABLE * memory_bytes:
            return packs
    return 1
