"""`dist_transformer.train` on the null GPU: values that the host reads from the device let a run continue."""

from typing import Any

import numpy as np
import torch

from dist_transformer.base.errors import exit_on_user_error


def stand_in() -> None:
    """Replace the values that the host reads: norms, sums over ranks, what ranks compare, the end of a search."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from dist_transformer.data.vocabulary.tokenizer import Tokenizer
    from dist_transformer.inference import beam
    from dist_transformer.runtime import distributed
    from dist_transformer.training import logbook
    from dist_transformer.training.engine import graphs, internals

    def one(*_: Any, **__: Any) -> torch.Tensor:
        return torch.tensor(1.0)

    leave_out_looks()
    reduce = distributed.all_reduce_sum

    def reduced_to_ones(sums: torch.Tensor) -> torch.Tensor:
        summed = reduce(sums)
        return torch.ones(summed.shape, dtype=summed.dtype) if summed.is_cuda else summed

    DeepSpeedZeroOptimizer.scaled_global_norm = one
    DeepSpeedZeroOptimizer_Stage3.scaled_global_norm = one
    internals._norm_of_all = one
    graphs.MicroBatchGraph._difference = lambda _: None
    torch.nn.utils.get_total_norm = one
    distributed.all_reduce_sum = reduced_to_ones
    logbook.read = lambda *tensors: [torch.ones(tensor.shape, dtype=tensor.dtype) for tensor in tensors]

    def run_two_steps(search: Any) -> Any:
        """Search as `_Search.run` does, but each sentence has ended after two steps, with two tokens."""
        step = beam._recorded(search._step, search.device) if search.refills else search._step
        search._begin(np.arange(len(search.sentence_of_slot)))
        while (busy := search.sentence_of_slot != beam._IDLE).any():
            for _ in range(2):
                step()
            sentences = search.sentence_of_slot[busy].copy()
            search._collect(np.flatnonzero(busy))
            for sentence in sentences:
                search.results[sentence] = [beam.Hypothesis(tokens=[5, 6], score=-1.0, log_probability=-1.0)]
            if search.refills:
                search._begin(np.flatnonzero(busy))
            else:
                order, order_N = search.keep_slots(~busy)
                search.sentence_of_slot = search.sentence_of_slot[order]
                search.beams.keep(order_N)
        return search.results

    beam._Search.run = run_two_steps
    Tokenizer.decode = lambda *_: "a b"


def leave_out_looks() -> None:
    """Leave out what DeepSpeed does at stage 3 to describe parameters, and to compare numbers between ranks."""
    from deepspeed.runtime.zero import partitioned_param_coordinator

    # torch would search the numbers of a tensor for finite ones.
    torch.Tensor.__repr__ = lambda _: "a tensor"  # type: ignore[method-assign, assignment]
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda *_: None


def main() -> None:
    from dist_transformer.train import main as train

    stand_in()
    train()


if __name__ == "__main__":
    exit_on_user_error(main)
