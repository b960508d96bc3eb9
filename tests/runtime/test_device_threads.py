"""Threads of a rank: the rule by shape, what overrides it, and how threads wait."""

import os
import subprocess
import sys

import pytest

from dist_transformer.config.presets import PRESETS
from dist_transformer.runtime.device import kept_threads, load_caution, threads_for
from dist_transformer.runtime.interpreter import share_cores


@pytest.mark.parametrize(("preset", "threads"), [("tiny", 1), ("multi30k", 16), ("base", 16), ("big", 16)])
def test_only_small_shapes_get_one_thread(preset: str, threads: int) -> None:
    config = PRESETS[preset]
    tokens = config.batch.packs_on_a_cpu(1) * config.batch.max_target_tokens
    assert threads_for(width=config.model.width, tokens=tokens, cores=16) == threads


def test_a_resume_keeps_the_threads_that_the_cores_allow() -> None:
    assert kept_threads(4, chosen=4, cores=4) == (4, None)
    kept, note = kept_threads(2, chosen=16, cores=16)
    assert (kept, "OMP_NUM_THREADS" in str(note)) == (2, True)
    # On a smaller machine.
    assert kept_threads(16, chosen=4, cores=4) == (4, None)


def test_a_load_above_the_cores_is_reported_with_the_remedy() -> None:
    assert load_caution((2.0, 2), 2) is None
    assert load_caution(None, 2) is None
    assert "load average is 5.7 on 2 core(s)" in str(line := load_caution((5.7, 2), 2))
    assert "set OMP_NUM_THREADS below 2" in str(line)
    assert "OMP_NUM_THREADS" not in str(load_caution((5.7, 2), 1))


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        # Set first, so that what the function sets is undone too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_threads_sleep_while_they_wait_unless_the_user_decides(plain: pytest.MonkeyPatch) -> None:
    plain.setenv("GOMP_SPINCOUNT", "7")
    share_cores()
    assert "OMP_WAIT_POLICY" not in os.environ
    plain.delenv("GOMP_SPINCOUNT")
    plain.setenv("OMP_NUM_THREADS", " ")
    share_cores()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize("value", ["0", "abc", "1025", "2,"])
def test_a_number_of_threads_that_openmp_would_ignore_is_refused(plain: pytest.MonkeyPatch, value: str) -> None:
    plain.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(SystemExit, match=r"^error: OMP_NUM_THREADS is .*: set it to a number of threads"):
        share_cores()


def test_every_program_lets_its_threads_sleep_before_it_imports_torch() -> None:
    """OpenMP reads its variables once, when torch is imported."""
    program = (
        "import os, sys\n"
        "os.environ.pop('OMP_WAIT_POLICY', None)\n"
        "from dist_transformer.cli.command import main\n"
        "before = 'torch' in sys.modules\n"
        "sys.argv = ['dist-transformer', '--version']\n"
        "try:\n    main()\nfinally:\n    print(before, os.environ['OMP_WAIT_POLICY'])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "False PASSIVE"
