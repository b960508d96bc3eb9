"""All use of DeepSpeed in one class: forward, backward, step, and state as one fp32 tensor per parameter.

Stages 0 to 3 in bf16 and fp32 behave the same for the rest of the code: the gradient is divided by the step's tokens,
all ranks skip a step whose gradient is not finite, and state is read and written as full tensors.
"""

import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import TrainConfig
from dist_transformer.cost.memory import ZeroSettings, choose_compilation
from dist_transformer.model.freezing import frozen_names
from dist_transformer.model.loss import LossSums
from dist_transformer.model.packed import PackedBatch
from dist_transformer.model.transformer import Transformer
from dist_transformer.run.checkpoint.state import EMA, MOMENTS, ParameterState
from dist_transformer.runtime import distributed
from dist_transformer.runtime.device import PRECISIONS
from dist_transformer.training.engine import internals
from dist_transformer.training.engine.ds_config import complete_ds_config
from dist_transformer.training.engine.gradient_sums import GradientSums, without_communication
from dist_transformer.training.engine.graphs import MicroBatchGraph, make_graph, problem_of
from dist_transformer.training.engine.internals import builds_survive_kills
from dist_transformer.training.engine.muon import FlatMatrices, Muon
from dist_transformer.training.engine.plain_adam import PlainAdam
from dist_transformer.training.engine.schedule import scheduler_hook
from dist_transformer.training.engine.state_tensors import WEIGHT, make_state_tensors


class Engine:
    """A model under DeepSpeed."""

    def __init__(
        self, model: Transformer, config: TrainConfig, user_ds_config: dict[str, Any], *, world_size: int
    ) -> None:
        import deepspeed

        internals.prepare_deepspeed()
        self.config = config
        self.stage = int(user_ds_config["zero_optimization"].get("stage", 0))
        ds_config = complete_ds_config(user_ds_config, config, world_size)
        self.loss_factor = ds_config["gradient_accumulation_steps"]
        if ds_config["gradient_allreduce_op"] == "mean":
            self.loss_factor *= world_size
        # DeepSpeed rounds the model to bf16, and would make the fp32 weights from that. The first small updates of a
        # warm-up would then be lost: a weight halfway between two bf16 values does not change until they add up.
        weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
        frozen = frozen_names(weights, config.freeze)
        self._frozen = {name: weights.pop(name) for name in sorted(frozen)}
        """Weights in fp32 that stay as they are, on the host."""
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        offloads = ds_config["zero_optimization"].get("offload_optimizer", {}).get("device", "none") != "none"
        matrices = model.hidden_matrices() if config.optimizer.kind == "muon" else {}
        self._matrices = {name: p for name, p in matrices.items() if p.requires_grad}
        """Parameters that Muon updates, by name."""
        self.optimizer = _make_optimizer(model, config, self._matrices.values(), stage=self.stage, offloads=offloads)
        # Otherwise the flat weights of stage 1 remember that they were made of the parameters. That keeps nodes of the
        # autograd graph that belong to the default stream, and CUDA refuses to record a graph that waits for it.
        with torch.no_grad():
            self.ds, *_ = deepspeed.initialize(
                model=model,
                optimizer=self.optimizer,
                config=ds_config,
                lr_scheduler=scheduler_hook(config, next(model.parameters()).device),
                dist_init_required=False,
            )
        if isinstance(self.optimizer, PlainAdam) and config.arithmetic == "bf16":
            self.optimizer.keep_masters()
            for name in frozen:
                parameter = model.get_parameter(name)
                parameter.data = parameter.data.bfloat16()
        if self.stage > 0:
            internals.look_at_the_norm_alone(self.ds.optimizer)
            internals.skip_by_norm(self.ds.optimizer, self.optimizer, on_host=offloads)
        self.scheduler = self.ds.lr_scheduler
        self._graph: MicroBatchGraph | None = None
        self.graph_problem = problem_of(config, ZeroSettings.from_ds_config(ds_config), self.module)
        """Why micro-batches cannot be CUDA graphs, in a few words."""
        self._wants_graph = config.cuda_graphs == "yes" and self.graph_problem is None
        self._applied = torch.ones((), dtype=torch.bool, device=self.device)
        if isinstance(self.optimizer, Muon) and self._matrices and self.stage > 0:
            self.optimizer.flat = self._flat_matrices()
        self._create_moments()
        self._tensors = make_state_tensors(self.ds.optimizer, self.stage, self.device)
        self._set_weights(weights)
        self.last_forward: torch.cuda.Event | None = None
        """End of the last forward pass on a GPU; see `mark`."""
        self.compilation = self._choose_compilation()
        """Whether layers and loss are compiled, and why in a few words."""
        if self.compilation[0]:
            self.module.compile_layers()

    @property
    def module(self) -> Transformer:
        return self.ds.module

    @property
    def device(self) -> torch.device:
        return torch.device(self.ds.device)

    def _choose_compilation(self) -> tuple[bool, str]:
        # On a CPU, compiling gained nothing (`tiny` 0.81 times as fast, `multi30k` 1.01 times, AMD EPYC with AVX2,
        # 2026-11-23).
        if self.device.type != "cuda":
            return False, "no GPU"
        if not self.module.has_fixed_shapes:
            return False, "attention has no fixed shapes"
        if self.config.compile == "auto" and not self.module.has_triton_kernels:
            return False, "Triton's kernels are not in use"
        return choose_compilation(self.config, stage=self.stage)

    @property
    def has_graph(self) -> bool:
        """Whether micro-batches are started by a CUDA graph."""
        return self._graph is not None

    @property
    def ema_decay(self) -> float:
        return self.config.ema_decay

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model, also if this rank holds only a part."""
        return sum(internals.full_shape(parameter).numel() for parameter in self.module.parameters())

    @property
    def gradient_norm(self) -> float:
        """Norm of the last step's gradient, before clipping."""
        return float(self.ds.get_global_grad_norm() or 0.0)

    @property
    def learning_rate(self) -> float:
        """Rate of the last update; before the first update, the rate of the first."""
        return self.scheduler.rate(max(1, self.scheduler.updates))

    @property
    def waited_seconds(self) -> float:
        """Seconds that the calling thread has waited for collectives so far. On a GPU the host does not wait."""
        return internals.waited_seconds()

    def mark(self) -> torch.cuda.Event | None:
        """Mark this place in the work of a GPU, to time it without waiting; None on a CPU and while it is recorded."""
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def on_device(self, batch: PackedBatch) -> PackedBatch:
        """Copy a micro-batch to the device. The next one may overwrite it."""
        if self._wants_graph:
            # Later the shapes of training are known.
            self._wants_graph = False
            self._graph = self._make_graph(batch.to(self.device))
        filled = None if self._graph is None else self._graph.filled(batch)
        return batch.to(self.device) if filled is None else filled

    def forward_backward(self, batch: PackedBatch, *, step_tokens: int) -> LossSums:
        """Add a micro-batch's part to the gradient of (sum of token losses) ÷ `step_tokens`."""
        # DeepSpeed divides the loss by the accumulation steps, and stage 3 averages over ranks: undo both.
        factor = self.loss_factor / step_tokens
        if self._graph is not None and self._graph.holds(batch):
            sums = self._graph.run(factor)
            self.last_forward = self.mark()
            self.ds.allreduce_gradients()
            return sums
        return self._compute(batch, factor)

    def _compute(self, batch: PackedBatch, factor: float | torch.Tensor) -> LossSums:
        settings = self.config.optimizer
        sums = self.ds(batch, settings.label_smoothing, settings.rdrop_alpha, self.config.guided_attention)
        self.last_forward = self.mark()
        self.ds.backward(sums.loss * factor)
        return sums._replace(loss=sums.loss.detach())

    def _make_graph(self, batch: PackedBatch) -> MicroBatchGraph | None:
        def compute(batch: PackedBatch, factor: torch.Tensor) -> LossSums:
            with without_communication(self.ds):
                return self._compute(batch, factor)

        stage_1 = self.ds.optimizer if self.stage == 1 else None
        sums = GradientSums(dict(self._trained()), stage_1)
        vocabulary = min(map(len, self.module.embedding_weights().values()))
        return make_graph(MicroBatchGraph(compute, sums, batch, vocabulary=vocabulary))

    def evaluate(self, batch: PackedBatch) -> LossSums:
        """Return a micro-batch's sums without gradient, in one pass, so without R-Drop. A collective under ZeRO-3."""
        return self.ds(batch, self.config.optimizer.label_smoothing)

    def plain_model(self) -> Transformer:
        """Return the current model without DeepSpeed, for decoding. A collective under ZeRO-3, which gathers a copy."""
        if self.stage < 3:
            return self.module
        from deepspeed import zero

        model = Transformer(self.module.config).to(self.device)
        for part, whole in zip(self.module.parameters(), model.parameters(), strict=True):
            with zero.GatheredParameters([part]):
                whole.data = part.detach().to(self.device, copy=True)
        return model

    def end_micro_batch(self) -> torch.Tensor:
        """Update the weights if the micro-batch was the step's last.

        Returns:
            whether the last update was applied and not skipped, bool, shape (), on the device: the host does not wait.
        """
        is_last = self.ds.is_gradient_accumulation_boundary()
        self.ds.step()
        if is_last:
            self._applied = (self.optimizer.found_inf == 0).to(self.device)  # type: ignore[attr-defined]
            if self.ema_decay > 0:
                self._move_average()
        return self._applied

    def parameter_states(self) -> Iterator[ParameterState]:
        """Yield every parameter with its moments. Collective: all ranks must iterate together."""
        read = self._tensors.reader()
        for name, parameter in self.module.named_parameters():
            if name in self._frozen:
                yield self._state_of_frozen(name)
                continue
            shape = internals.full_shape(parameter)
            tensors = {key: read(parameter, key).detach().float().view(shape) for key in (WEIGHT, *self._kept(name))}
            yield ParameterState(name=name, weight=tensors.pop(WEIGHT), moments=tensors)

    def _state_of_frozen(self, name: str) -> ParameterState:
        weight = self._frozen[name]
        moments = {key: weight if key == EMA else torch.zeros_like(weight) for key in self._kept(name)}
        return ParameterState(name=name, weight=weight, moments=moments)

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter in fp32. Collective: all ranks must iterate together."""
        return ((state.name, state.weight) for state in self.parameter_states())

    def restore(self, load: Callable[[str], ParameterState], *, updates: int) -> None:
        """Set moments and counters, so that training continues exactly.

        The model that was passed to the constructor must hold the weights already. Moments that `load` does not give
        stay zero, and a moving average starts with the weights.
        """
        for name, parameter in self._trained():
            for key, value in load(name).moments.items():
                if key in self._kept(name):
                    self._tensors.set(parameter, key, value.to(self.device))
        self._set_adam_steps(updates)
        self.scheduler.load_state_dict({"updates": updates})

    def _kept(self, name: str) -> tuple[str, ...]:
        """Return the names of the state that is kept for a parameter."""
        moments = MOMENTS[:1] if name in self._matrices else MOMENTS
        return (*moments, EMA) if self.ema_decay > 0 else moments

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.module.named_parameters() if name not in self._frozen)

    @torch.no_grad()
    def _set_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Set the fp32 weights, and start the moving average with them; the low-precision copies do not change."""
        for name, parameter in self._trained():
            weight = weights[name].to(self.device)
            self._tensors.set(parameter, WEIGHT, weight)
            if self.ema_decay > 0:
                self._tensors.set(parameter, EMA, weight)

    @torch.no_grad()
    def _move_average(self) -> None:
        """Apply ema += share · (weight - ema) to the tensors that this rank updates; no communication."""
        averages = [state[EMA] for state in self.optimizer.state.values()]
        internals.lerp_all(averages, list(self.optimizer.state), self.scheduler.share.to(averages[0].device))

    def _create_moments(self) -> None:
        """Allocate the optimizer's state and set it to zero, whatever DeepSpeed's constructor did to it."""
        for weight in self._tensors_of_muon():
            self.optimizer.state[weight] = {MOMENTS[0]: torch.zeros_like(weight)}
        # Stage 3 allocates Adam's by a step on zero gradients, which advances its counter. The other stages allocate it
        # in the first step, which is too late for a restore.
        missing = [p for p in self._updated_tensors() if not self.optimizer.state[p]]
        if missing:
            self._step_on_zeros(missing)
        for weight, state in self.optimizer.state.items():
            for key in MOMENTS:
                if key in state:
                    state[key].zero_()
            if self.ema_decay > 0:
                state[EMA] = torch.zeros_like(weight)
        if self.stage in (1, 2):
            internals.link_moments(self.ds.optimizer)
        self._set_adam_steps(0)

    def _tensors_of_muon(self) -> list[torch.Tensor]:
        """Return the tensors that Muon updates: parameters, fp32 copies, or this rank's flat partitions."""
        if not isinstance(self.optimizer, Muon) or not self._matrices:
            return []
        return list(self.optimizer.flat or self.optimizer.param_groups[0]["params"])

    def _flat_matrices(self) -> dict[torch.Tensor, FlatMatrices]:
        """Find the matrices in the flat tensors of stages 1 to 3."""
        matrices = list(self._matrices.values())
        if self.stage < 3:
            places, part = internals.flat_tensors(self.ds.optimizer)[0]
            first, end = (len(part) * rank for rank in (distributed.rank(), distributed.rank() + 1))
            own = [(at, tuple(p.shape)) for p, at in places.items() if at < end and at + p.numel() > first]
            return {part: FlatMatrices(1, tuple(own))}
        found = {}
        of_parts = internals.parameters_of_partitions(self.ds.optimizer)
        for part, parameters in zip(internals.flat_partitions(self.ds.optimizer), of_parts, strict=True):
            if any(parameters[0] is matrix for matrix in matrices):
                sizes = itertools.accumulate(map(internals.part_size, parameters), initial=0)
                shapes = [tuple(internals.full_shape(p)) for p in parameters]
                found[part] = FlatMatrices(distributed.world_size(), tuple(zip(sizes, shapes, strict=False)))
        return found

    def _updated_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that Adam updates: parameters, fp32 copies, or this rank's flat partitions."""
        if self.stage == 3:
            return internals.flat_partitions(self.ds.optimizer)
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _step_on_zeros(self, tensors: list[torch.Tensor]) -> None:
        """Run a step that only allocates, with zero gradients and rate; then restore the optimizer's groups."""
        groups, gradients = self.optimizer.param_groups, [p.grad for p in tensors]
        for p in tensors:
            p.grad = torch.zeros_like(p)
        # The last group is Adam's.
        self.optimizer.param_groups = [{**groups[-1], "params": tensors, "lr": 0.0}]
        self.optimizer.step()
        self.optimizer.param_groups = groups
        for p, gradient in zip(tensors, gradients, strict=True):
            p.grad = gradient

    def _set_adam_steps(self, count: int) -> None:
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"].fill_(count)
            elif "step" in state:
                state["step"] = count


def _make_optimizer(
    model: Transformer, config: TrainConfig, matrices: Collection[nn.Parameter], *, stage: int, offloads: bool
) -> torch.optim.Optimizer:
    settings = config.optimizer
    groups = _parameter_groups(model, settings.weight_decay, without=matrices)
    if matrices:
        muon = {"momentum": settings.momentum, "weight_decay": settings.weight_decay}
        groups.insert(0, {"params": list(matrices), **muon})
    # The scheduler sets the rate. With rate zero, DeepSpeed's allocating step on zero gradients changes nothing.
    common: dict[str, Any] = {"lr": 0.0, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}
    if offloads:
        return _compiled_cpu_adam(groups, common)
    dtype = PRECISIONS[config.arithmetic]
    if stage == 0:
        return PlainAdam(groups, max_grad_norm=settings.max_grad_norm, dtype=dtype, fused=True, **common)
    if matrices:
        internals.admit_optimizer(Muon)
        return Muon(groups, dtype=dtype, fused=True, **common)
    return torch.optim.AdamW(groups, fused=True, **common)


def _compiled_cpu_adam(groups: list[dict[str, Any]], common: dict[str, Any]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    try:
        with builds_survive_kills():
            return DeepSpeedCPUAdam(groups, adamw_mode=True, **common)
    except (RuntimeError, OSError, ImportError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f"offload_optimizer needs DeepSpeed's CPU Adam, which could not be compiled ({reason:.200}): install a C++ "
            "compiler and Python's headers (Debian and Ubuntu: apt-get install g++ python3-dev) in a path without a "
            "space, or use a DeepSpeed config without offload_optimizer"
        ) from error


def _parameter_groups(
    model: Transformer, weight_decay: float, *, without: Collection[nn.Parameter] = ()
) -> list[dict[str, Any]]:
    others = {id(p) for p in without}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in others]
    if weight_decay == 0:
        groups = [{"params": trained, "weight_decay": 0.0}]
    else:
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
    # Where all of a kind are frozen, its group is empty.
    return [group for group in groups if group["params"]]
