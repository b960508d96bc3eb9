"""The preflight: every rank gathers facts, all facts are judged, rank 0 broadcasts the outcome."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dist_transformer.base.checks import Check
from dist_transformer.base.messages import as_kind
from dist_transformer.preflight import probes
from dist_transformer.preflight.checks import judge
from dist_transformer.preflight.facts import Facts, gather
from dist_transformer.preflight.settings import PreflightSettings
from dist_transformer.preflight.watch import Watch, joined
from dist_transformer.runtime import distributed
from dist_transformer.runtime.world import World


def preflight(
    world: World, settings: PreflightSettings, *, progress: Callable[[str], None] = lambda _: None
) -> list[Check]:
    """Run the checks and return them on every rank. Collective: every rank must call it.

    Raises:
        UserError: the ranks did not find each other.
    """
    with joined(world, seconds=settings.timeout_seconds) as watch:
        facts = _gather(world, settings, watch, progress)
        checks = judge(facts, run_gib=settings.run_gib, verified=settings.verify_data)
        with watch.stage("outcome"):
            return as_kind(list[Check], distributed.broadcast_object(checks))


def _gather(
    world: World, settings: PreflightSettings, watch: Watch, progress: Callable[[str], None]
) -> Sequence[Facts]:
    with watch.stage("node"):
        own = gather(world, run_dir=settings.run_dir, cache_dir=settings.cache_dir)
    with watch.stage("data folder"):
        opens = world.local_rank == 0
        own = replace(own, data=tuple(probes.look_at_data(place, opens=opens) for place in settings.data))
    with watch.stage("facts of all ranks"):
        facts = _of_all_ranks(own)
    if settings.verify_data:
        own = replace(own, data=probes.verify_data(own, facts, watch, progress=progress))
    if world.size > 1:
        own = _measure(world, settings, watch, own, facts)
    with watch.stage("facts of all ranks"):
        return _of_all_ranks(own)


def _of_all_ranks(own: Facts) -> list[Facts]:
    return as_kind(list[Facts], distributed.gather_objects(own))


def _measure(world: World, settings: PreflightSettings, watch: Watch, own: Facts, facts: Sequence[Facts]) -> Facts:
    """Measure the facts that need several ranks."""
    with watch.stage("clocks"):
        offsets = probes.clock_offsets(world, probes.first_ranks(facts))
        own = replace(own, clock_offset=dict(distributed.broadcast_object(list(offsets.items()))).get(world.rank))
    if settings.run_dir is not None:
        with watch.stage("run folder"):
            shared, seen = probes.try_shared_folder(world, settings.run_dir)
            own = replace(own, shared=replace(shared, seen_by_rank_0=distributed.broadcast_object(seen)[world.rank]))
    with watch.stage("all-reduce"):
        uuids = {fact.gpu.uuid for fact in facts if fact.gpu is not None and fact.gpu.problem is None}
        has_gpus = len(uuids) == world.size
        device = torch.device("cuda", world.local_rank) if has_gpus else torch.device("cpu")
        return replace(own, reductions=probes.time_reductions(world, device))
