"""How many packs a GPU computes at once, where that is not given."""

from dist_transformer.config.settings import TrainConfig
from dist_transformer.planning.memory import MicroBatch, ZeroSettings, predict_memory

# Target tokens at once beyond which a GPU gains nothing: one of 25k took 84 ms of an H100 for `big`, eight of 3k took
# 415 (2026-11-23), for the host needs about 45 for each.
_ENOUGH_TOKENS = 32_768
# Share of the memory that is planned with. The most that was measured is 5% above the plan.
_USABLE = 0.9


def packs_that_fit(
    config: TrainConfig, zero: ZeroSettings, *, world_size: int, source_budget: int, memory_bytes: int
) -> int:
    """A rank's whole share of a step, or the largest of its equal parts that fits the memory and is no larger than
    pays; 1 where none fits.

    Args:
        config: with its vocabulary's size.
        source_budget: source tokens of a pack.
        memory_bytes: of the smallest GPU.
    """
    batch = config.batch
    share = -(-batch.packs_per_step // world_size)
    for parts in range(1, share + 1):
        packs = -(-share // parts)
        memory = predict_memory(
            config.model,
            zero,
            world_size=world_size,
            precision=config.arithmetic,
            accumulation=parts,
            micro=MicroBatch(source_tokens=packs * source_budget, target_tokens=packs * batch.max_target_tokens),
            keeps_average=config.ema_decay > 0,
            compiled=config.compile,
        )
        if packs * batch.max_target_tokens <= _ENOUGH_TOKENS and memory.needed <= _USABLE * memory_bytes:
            return packs
    return 1
