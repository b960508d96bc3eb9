"""The settings of all commands: their help, and numbers that commands pass on to others."""

import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.cli.command import COMMANDS, run
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.schema import Setting, values_of


@pytest.mark.parametrize("name", COMMANDS)
def test_no_default_is_written_but_in_its_dataclass(
    name: str,
    known_settings: Callable[[str], Sequence[Setting]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = known_settings(name)
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as ended:
        run([name, "--help-all"])
    assert not ended.value.code
    entries = [" ".join(entry.split()) for entry in re.split(r"\n  (?=--)", capsys.readouterr().out)]
    texts = {entry.partition(" ")[0].rstrip(","): entry for entry in entries}
    preset = values_of(PRESETS["base"]) if name in ("train", "plan") else {}
    # Presets have none of their own.
    preset = {setting: value for setting, value in preset.items() if setting not in ("data", "run_dir")}
    for each in known:
        default, text = preset.get(each.name, each.default), texts[each.flag]
        assert each.text or preset, text
        if default in (None, MISSING, False, "", ()):
            assert "(default: " not in text
            continue
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
        assert text.count("default:") == 1, text
        assert re.search(rf"\((required; )?default: {re.escape(shown)}[;)]", text), text


@pytest.mark.parametrize("count", ["0", "-1"])
def test_a_number_that_other_commands_get_is_refused_before_they_start(count: str) -> None:
    for flag in ("--processes", "--average", "--train-pairs"):
        with pytest.raises(UserError, match=f"^{flag} is {count}: it must be above 0"):
            run(["demo", flag, count])
