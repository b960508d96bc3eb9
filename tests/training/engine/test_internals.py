"""The internals of DeepSpeed and torch that we use exist and work as before: fails where a version changes them.

That all of it works together is tested with real engines, in tests/distributed.
"""

import inspect
import logging
import math
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.utils import cpp_extension

from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World
from dist_transformer.training.engine import gradient_sums, internals
from dist_transformer.training.engine.plain_adam import PlainAdam

ROOT = Path(__file__).resolve().parents[3]


def source(thing: object) -> str:
    return inspect.getsource(thing)  # type: ignore[arg-type]


@pytest.fixture
def quiet_parts(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """The modules that `prepare_deepspeed` changes; put back afterwards."""
    parts = import_module("deepspeed.comm.torch"), import_module("deepspeed.runtime.bf16_optimizer")
    backend, stage_1 = parts
    for part, name in (
        (backend, "build_shm_op"),
        (stage_1, "see_memory_usage"),
        (stage_1, "get_global_norm_of_tensors"),
        (stage_1, "clip_tensors_by_global_norm"),
        *((import_module(name), "is_invalid_grad_norm") for name in internals._WAITING_MODULES),
        *((import_module(name), "mask_nan_or_inf_with_val_inplace") for name in internals._WAITING_MODULES[1:]),
        (stage_1.BF16_Optimizer, "_update_hp_grad"),
        (stage_1.BF16_Optimizer, "update_hp_grads"),
        (stage_1.BF16_Optimizer, "clear_hp_grads"),
        (stage_1.BF16_Optimizer, "get_grads_for_reduction"),
        (dist.Work, "wait"),
    ):
        monkeypatch.setattr(part, name, getattr(part, name))
    monkeypatch.setattr(deepspeed.utils.logger, "level", deepspeed.utils.logger.level)
    return parts


def test_needless_set_up_is_called_by_the_names_that_we_replace(quiet_parts: tuple[ModuleType, ModuleType]) -> None:
    backend, bf16_optimizer = quiet_parts
    assert re.search(r"= build_shm_op\(\)", source(backend.TorchBackend))
    assert re.search(r"^ +see_memory_usage\(", source(bf16_optimizer.BF16_Optimizer), flags=re.MULTILINE)
    internals.prepare_deepspeed()
    assert backend.build_shm_op() is None
    assert bf16_optimizer.see_memory_usage("any text", force=True) is None
    assert deepspeed.utils.logger.level == logging.WARNING


def test_every_collective_ends_in_the_wait_that_is_timed(
    quiet_parts: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All collectives of DeepSpeed count, also where it does other work first; each wait takes 20 ms longer here."""
    usual = internals._wait

    def slowly(work: dist.Work) -> bool:
        time.sleep(0.02)
        return usual(work)

    monkeypatch.setattr(internals, "_wait", slowly)
    tensor, whole = torch.ones(4), torch.empty(4)
    with process_group(World(), single=True):
        internals.prepare_deepspeed()
        for collective in (
            lambda: dist.all_reduce(tensor),
            lambda: dist.all_reduce(tensor, async_op=True).wait(),
            lambda: dist.all_gather_into_tensor(whole, tensor),
            lambda: dist.reduce_scatter_tensor(whole, tensor),
            lambda: dist.broadcast(tensor, src=0),
        ):
            before = internals.waited_seconds()
            collective()
            assert internals.waited_seconds() - before >= 0.02
        before = internals.waited_seconds()
        thread = threading.Thread(target=dist.all_reduce, args=(tensor,))
        thread.start()
        thread.join()
        # What plans ahead waits in a thread of its own.
        assert internals.waited_seconds() == before


def test_stage_1_in_bf16_adds_and_measures_gradients_as_ours_do() -> None:
    """In the process of a test that has not replaced them yet; what else they do is for parallel experts."""
    code = """
import inspect
from deepspeed.runtime import bf16_optimizer, engine
from dist_transformer.training.engine import internals

stage_1 = bf16_optimizer.BF16_Optimizer
add, norm, step = (inspect.getsource(part) for part in (stage_1._update_hp_grad, stage_1, stage_1.step))
clear = inspect.getsource(stage_1.clear_hp_grads).split()
before = inspect.signature(stage_1._update_hp_grad), inspect.signature(bf16_optimizer.get_global_norm_of_tensors)
assert "hp_grad.data.add_(lp.grad.data.to(hp_grad.dtype).view(hp_grad.shape))" in add
assert "if is_invalid_grad_norm(all_groups_norm):\\n            self.overflow = True" in step
assert step.index("self._global_grad_norm = all_groups_norm") < step.index("clip_tensors_by_global_norm(input_tensors=")
assert step.index("clip_tensors_by_global_norm(") < step.index("self.optimizer.step()")
assert norm.count("get_global_norm_of_tensors(") == step.count("get_global_norm_of_tensors(input_tensors=") == 1
hook = inspect.getsource(stage_1.accumulate_hp_grads_and_remove_lp)
assert "self._update_hp_grad(lp_param, group_idx, param_idx, clear_lp_grads=False)" in hook
assert "self.update_hp_grads(clear_lp_grads=clear_lp_grads)" in inspect.getsource(stage_1.backward_epilogue)
assert "self.optimizer.backward_epilogue()" in inspect.getsource(engine.DeepSpeedEngine._backward_epilogue)
assert "flat_gradients.zero_()" in clear
assert "self.fp32_groups_has_gradients[i]" in clear
assert "return self.non_expert_gradients, {}" in inspect.getsource(stage_1.get_grads_for_reduction)
reduce = inspect.getsource(engine.DeepSpeedEngine.buffered_allreduce_fallback)
assert "self.optimizer.get_grads_for_reduction()" in reduce
internals.prepare_deepspeed()
after = inspect.signature(stage_1._update_hp_grad), inspect.signature(bf16_optimizer.get_global_norm_of_tensors)
assert [*before[0].parameters][1:] == [*after[0].parameters][1:]
assert {"input_tensors", "norm_type", "mpu"} <= {*before[1].parameters} & {*after[1].parameters}
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_sums_are_those_of_one_step() -> None:
    """Two steps of two groups. A sum without a gradient is zero, also if it had one in the step before."""
    flats = [torch.zeros(6), torch.zeros(2)]
    optimizer = SimpleNamespace(
        fp32_groups_gradients_flat=flats,
        fp32_groups_gradients=[[flats[0][:4].view(2, 2), flats[0][4:]], [flats[1]]],
        fp32_groups_has_gradients=[[False, False], [False]],
        non_expert_gradients=flats,
    )
    weight, vector = torch.zeros(2, 2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)
    for step in range(2):
        for value in (1.5, 2.0):
            weight.grad = torch.full_like(weight, value)
            gradient_sums._add_to_sum(optimizer, weight, 0, 0, False)
            if step == 0 and value == 2.0:
                vector.grad = torch.full_like(vector, float("nan"))
                gradient_sums._add_to_sum(optimizer, vector, 1, 0, False)
            # As after each backward pass; DeepSpeed drops the gradients before.
            weight.grad = vector.grad = None
            gradient_sums._finish_sums(optimizer)
        reduced, of_experts = gradient_sums._sums_to_reduce(optimizer)
        assert [sums.tolist() for sums in reduced[:1]] == [[3.5, 3.5, 3.5, 3.5, 0, 0]]
        assert reduced[1].isnan().all() if step == 0 else reduced[1].tolist() == [0, 0]
        assert of_experts == {}
        for _ in range(2):
            gradient_sums._forget_sums(optimizer)
            assert optimizer.fp32_groups_has_gradients == [[False, False], [False]]


@pytest.mark.parametrize("optimizer", [DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3])
def test_a_step_searches_the_gradients_by_check_overflow(optimizer: type) -> None:
    """The call has keyword arguments or none. The code after it looks at the norm, by a function that we replace, and
    keeps the norm under the name that we read, before it steps."""
    calls = re.findall(r"self\.check_overflow\((.*)\)", source(optimizer))
    assert calls
    assert all(re.fullmatch(r"(\w+=[\w.]+)?", arguments) for arguments in calls)
    skips = r"is_invalid_grad_norm\(\s*scaled_global_grad_norm\):\n +self\.overflow = True"
    assert re.search(skips, source(optimizer))
    kept = r"self\._global_grad_norm = scaled_global_grad_norm / (?:(?!\n    def ).)*self\._optimizer_step\("
    assert re.search(kept, source(optimizer), flags=re.DOTALL)


def test_stages_1_and_2_link_moments_at_their_first_step() -> None:
    link = DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state
    assert list(inspect.signature(link).parameters) == ["self"]
    assert "self._lazy_init_hp_params_optimizer_state()" in source(DeepSpeedZeroOptimizer)
    assert "lazy_init_hp_params_optimizer_state" in source(link).split("\n", 1)[1]


def test_stage_3_updates_its_flat_partitions() -> None:
    assert "self.fp32_partitioned_groups_flat = []" in source(DeepSpeedZeroOptimizer_Stage3)
    assert re.search(r"fp32_param = self\.fp32_partitioned_groups_flat\[", source(DeepSpeedZeroOptimizer_Stage3))


def test_stage_3_keeps_the_shape_of_a_parameter() -> None:
    partition = source(import_module("deepspeed.runtime.zero.partition_parameters"))
    assert re.search(r"param\.ds_shape = param\.shape", partition)
    whole = torch.nn.Parameter(torch.zeros(2, 3))
    assert internals.full_shape(whole) == (2, 3)
    whole.ds_shape = torch.Size((4, 3))  # type: ignore[attr-defined]
    assert internals.full_shape(whole) == (4, 3)


def test_deepspeed_reads_the_norm_of_the_optimizer_of_stage_0() -> None:
    """Under the name that `PlainAdam` gives it. Without an `overflow`, DeepSpeed takes each step as applied."""
    step = source(DeepSpeedEngine._take_model_step)
    assert "self._global_grad_norm = self.optimizer._global_grad_norm" in step
    assert 'overflow = False\n        if hasattr(self.optimizer, "overflow"):' in step
    optimizer = PlainAdam([{"params": [torch.nn.Parameter(torch.zeros(1))]}], max_grad_norm=0.0, lr=0.0)
    assert optimizer._global_grad_norm == 0.0
    assert not hasattr(optimizer, "overflow")


@pytest.mark.parametrize(("norm", "skips"), [(2.0, 0), (0.0, 0), (math.inf, 1), (math.nan, 1), (-1.0, 1)])
def test_adam_skips_by_the_norm_that_deepspeed_keeps(norm: float, skips: int) -> None:
    """-1 is DeepSpeed's norm of gradients that are not finite. A rate on the device is used as a number is."""
    weight = torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.AdamW([weight], fused=True, weight_decay=0.0)
    internals.skip_by_norm(SimpleNamespace(_global_grad_norm=torch.tensor(norm)), adam, on_host=False)
    adam.param_groups[0]["lr"] = torch.tensor(0.25, dtype=torch.float64)
    weight.grad = torch.tensor([3.0, math.nan if skips else 4.0])
    adam.step()
    assert adam.found_inf == skips  # type: ignore[attr-defined]
    assert weight.tolist() == ([1.0, 1.0] if skips else [0.75, 0.75])
    assert adam.state[weight]["step"] == 1 - skips


@pytest.mark.parametrize("module", internals._WAITING_MODULES[1:])
def test_a_norm_that_is_not_finite_becomes_minus_one(module: str) -> None:
    assert "mask_nan_or_inf_with_val_inplace(total_norm, device=" in source(import_module(module))
    norms = torch.tensor([math.inf, 2.0, math.nan])
    internals._mask(norms, device=norms.device)
    assert norms.tolist() == [-1.0, 2.0, -1.0]


def test_gradients_of_stage_1_are_clipped_without_a_wait() -> None:
    for norm, expected in ((8.0, [1.0, 2.0]), (2.0, [2.0, 4.0])):
        sums = [torch.tensor([2.0]), torch.tensor([4.0])]
        internals._clip(sums, max_norm=4.0, global_norm=torch.tensor(norm))
        assert torch.cat(sums).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("skips", [False, True])
def test_a_descent_by_hand(skips: bool) -> None:
    """Means of 4 and 8 move a quarter of the way to gradients of 8 and 0, and tensors of 1 and 2 by 2 · (mean)."""
    tensors, means = [torch.tensor([1.0]), torch.tensor([2.0])], [torch.tensor([4.0]), torch.tensor([8.0])]
    gradients = [torch.tensor([math.nan if skips else 8.0]), torch.tensor([0.0])]
    found_inf, before = torch.tensor(float(skips)), [1.0, 2.0, 4.0, 8.0]
    internals.descend_all(tensors, gradients, means=means, momentum=0.75, rate=2.0, found_inf=found_inf)
    assert torch.cat([*tensors, *means]).tolist() == (before if skips else [-9.0, -10.0, 5.0, 6.0])
    # In place of the gradient, and with decay: 5 - 0.5 · (0.25 · 5 + 1).
    one = [torch.tensor([3.0 if skips else 5.0])]
    rate = torch.tensor(0.5, dtype=torch.float64)
    internals.descend_all(one, [torch.tensor([1.0])], rate=rate, weight_decay=0.25, found_inf=found_inf)
    assert one[0].tolist() == [3.0 if skips else 3.875]


def test_gradients_of_bf16_parameters_add_up_in_fp32() -> None:
    """1 + 256 times 2^-8 is 2; in bf16, where 1 + 2^-8 is 1 again, it would stay 1."""
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    gradient_sums.accumulate_in_fp32(parameter)
    for part in (1.0, *[2**-8] * 256):
        (parameter * part).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.float32
    assert parameter.grad.item() == 2.0


def test_loops_over_many_tensors() -> None:
    first, second = [torch.tensor([1.0]), torch.tensor([2.0, 4.0])], [torch.tensor([3.0]), torch.tensor([4.0, 0.0])]
    internals.lerp_all(first, second, 0.5)
    assert [tensor.tolist() for tensor in first] == [[2.0], [3.0, 2.0]]
    internals.scale_all(first, 2.0)
    assert [tensor.tolist() for tensor in first] == [[4.0], [6.0, 4.0]]
    low = [tensor.to(torch.bfloat16) for tensor in second]
    internals.copy_all(low, first)
    assert [tensor.tolist() for tensor in low] == [[4.0], [6.0, 4.0]]


def test_builds_of_extensions_take_our_lock_where_they_would_leave_a_file() -> None:
    usual = getattr(cpp_extension, "FileBaton", None)
    if usual is None:
        # From 2.15 on, a lock of the kernel's.
        assert "flock" in source(cpp_extension) or "FileLock" in source(cpp_extension)
        return
    assert "FileBaton(" in source(cpp_extension)
    with internals.build_lock(dict):
        assert cpp_extension.FileBaton is dict
    assert cpp_extension.FileBaton is usual


def test_a_start_prepares_no_compiler_and_no_pandas(toy_data: DataFolder) -> None:
    """Each takes a part of a second to seconds at every start, for what is not used."""
    program = (
        "import os, sys; os.environ['DS_ACCELERATOR'] = 'cpu'\n"
        "from pathlib import Path\n"
        "import numpy as np, torch\n"
        "from dist_transformer.data.folder.reader import DataFolder\n"
        "from dist_transformer.training.engine.internals import prepare_deepspeed\n"
        "compiles = torch.compile\n"
        "prepare_deepspeed()\n"
        "assert torch.compile is compiles\n"
        "assert 'deepspeed.runtime.zero.muon.original_muon' in sys.modules\n"
        "DataFolder.open(Path(sys.argv[1])).train.tokens(np.arange(2))\n"
        "print([name for name in ('torch._inductor.compile_fx', 'pandas') if name in sys.modules])\n"
    )
    # In a new interpreter: forks of this one have both.
    command = [sys.executable, "-c", program, str(toy_data.path)]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()[-1] == "[]"


BUILD = """
import sys
from pathlib import Path
from torch.utils import cpp_extension
from dist_transformer.training.engine.internals import builds_survive_kills

folder = Path(sys.argv[1])
(folder / "one.cpp").write_text('extern "C" int one() { return 1; }')
(folder / "lock").touch()  # as a killed build leaves it
usual = getattr(cpp_extension, "FileBaton", None)  # newer versions of PyTorch have none
with builds_survive_kills():
    cpp_extension.load("one", [str(folder / "one.cpp")], build_directory=str(folder), is_python_module=False)
assert getattr(cpp_extension, "FileBaton", None) is usual
"""


@pytest.mark.system
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_lock_file_of_a_killed_build_stops_no_other(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)], timeout=300, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "one.so").exists()


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    """The kernel ends it with its process."""
    first = internals.KernelLock(str(tmp_path / "lock"))
    assert first.try_acquire()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(internals.KernelLock(str(tmp_path / "lock")).try_acquire)
        time.sleep(0.3)
        assert not waiting.done()
        first.release()
        assert waiting.result(60)


def test_a_pytorch_that_leaves_no_file_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.15 and later have no such file."""
    monkeypatch.delattr(cpp_extension, "FileBaton", raising=False)
    with internals.builds_survive_kills():
        assert not hasattr(cpp_extension, "FileBaton")
    assert not hasattr(cpp_extension, "FileBaton")
