"""Default of the number of packs that a GPU computes at once."""

from dist_transformer.config.settings import TrainConfig
from dist_transformer.cost.memory import MicroBatch, ZeroSettings, predict_memory

# Target tokens per micro-batch beyond which a GPU gains no speed. For `big` on an H100, one micro-batch of 25k took 84
# ms and eight of 3k took 415 ms (2026-11-23), because the host needs about 45 ms for each.
_ENOUGH_TOKENS = 32_768
# Share of the memory that the plan may use. The largest measured excess over the plan is 5%.
_USABLE = 0.9


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
            compiled=config.compile,
            freeze=config.freeze,
        )
        if passes * packs * batch.max_target_tokens <= _ENOUGH_TOKENS and memory.needed <= _USABLE * memory_bytes:
            return packs
    return 1
