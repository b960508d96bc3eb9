"""Defaults of a GPU: how many packs it computes at once, and whether layers and loss are compiled for that."""

from dist_transformer.config.settings import TrainConfig
from dist_transformer.cost.memory import MicroBatch, ZeroSettings, predict_memory

# Target tokens per micro-batch beyond which a GPU gains no speed. For `big` on an H100, one micro-batch of 25k took 84
# ms and eight of 3k took 415 ms (2026-11-23), because the host needs about 45 ms for each.
_ENOUGH_TOKENS = 32_768
# Target tokens per micro-batch from which compiled layers are faster. On an H100 a step of `big` became 1.20 times
# as fast at 25k, 1.07 times at 6k and 0.87 times at 3k, where the host is the limit.
_TOKENS_TO_COMPILE = 6_000
# Share of the memory that the plan may use. The largest measured excess over the plan is 5%.
_USABLE = 0.9


def choose_compilation(config: TrainConfig, *, stage: int, packs: int | None = None) -> tuple[bool, str]:
    """Choose whether a GPU compiles layers and loss, if its kernels let it.

    Args:
        stage: ZeRO stage.
        packs: packs per micro-batch; default: those of the settings.

    Returns:
        the choice, and its reason in a few words.
    """
    tokens = config.optimizer.passes * (packs or config.batch.packs_at_once) * config.batch.max_target_tokens
    # Stage 3 gathers parameters in hooks, which break graphs. In fp32 attention has no fixed shapes.
    if stage == 3 or config.arithmetic == "fp32":
        return False, "ZeRO-3" if stage == 3 else "fp32"
    if config.compile != "auto":
        return config.compile == "on", f"--compile {config.compile}"
    few = tokens < _TOKENS_TO_COMPILE
    return not few, f"{tokens:,} target tokens at once, {'below' if few else 'at least'} {_TOKENS_TO_COMPILE:,}"


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
    share, passes = -(-batch.packs_per_step // world_size), config.optimizer.passes
    for parts in range(1, share + 1):
        packs = -(-share // parts)
        memory = predict_memory(
            config.model,
            zero,
            world_size=world_size,
            precision=config.arithmetic,
            accumulation=parts,
            micro=MicroBatch(
                source_tokens=packs * source_budget, target_tokens=packs * batch.max_target_tokens, passes=passes
            ),
            keeps_average=config.ema_decay > 0,
            compiled=choose_compilation(config, stage=zero.stage, packs=packs)[0],
            freeze=config.freeze,
        )
        if passes * packs * batch.max_target_tokens <= _ENOUGH_TOKENS and memory.needed <= _USABLE * memory_bytes:
            return packs
    return 1
