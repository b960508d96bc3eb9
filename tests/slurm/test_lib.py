"""Functions of slurm/lib.sh that need no cluster."""

import re
import subprocess

import pytest

from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("own", "given", "kept"),
    [
        ("--preset big --model.dropout 0.1", "--max-steps 3", "--preset big --model.dropout 0.1"),
        ("--preset big --model.dropout 0.1", "--preset tiny --max-steps 3", "--model.dropout 0.1"),
        ("--preset big --model.dropout 0.1", "--model.dropout=0.3", "--preset big"),
        ("--preset base", "--preset big", ""),
        ("--preset base", "", "--preset base"),
    ],
)
def test_flags_of_the_user_replace_those_of_a_script(own: str, given: str, kept: str) -> None:
    found = re.search(r"^unless_given\(\) \{.*?^\}", (ROOT / "slurm" / "lib.sh").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    done = subprocess.run(
        ["bash", "-euc", f'{found[0]}\nunless_given "$@"', "bash", *own.split(), "--", *given.split()],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == kept.split()
