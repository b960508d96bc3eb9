"""Check that a checkpoint holds what a resume needs, besides the hashes of its manifest.

An attacker who wrote a file may have written the manifest too, so matching hashes are not enough.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import LISTING_BYTES
from dist_transformer.config.plain import from_plain, read_json
from dist_transformer.config.settings import ModelConfig
from dist_transformer.run.checkpoint.tensors import checkpoint_shapes, parameter_shapes, tensors_problem
from dist_transformer.run.layout import STATE_FILE, step_of

_CHAIN = re.compile(r"[0-9a-f]{64}")
# The range of numpy's and torch's integers.
_LARGEST = 2**63 - 1

Rule = Callable[[Any], bool]


def content_problem(path: Path) -> str | None:
    """Describe what is wrong with a checkpoint without `checkpoint_problem`; None if nothing is.

    Types of the state and headers of the tensors are read.
    """
    try:
        state = read_json(path / STATE_FILE, most=LISTING_BYTES)
        due = {name: fits for name, fits in _STATE.items() if name in state or name not in _NEWER}
        if wrong := next((name for name, fits in due.items() if not fits(state.get(name))), None):
            return f"{path / STATE_FILE} states {wrong} {state.get(wrong)!r:.60}, which no run writes"
        if state["step"] != step_of(path.name):
            return f"{path / STATE_FILE} states step {state['step']}, which is not the step of its folder"
        model = from_plain(ModelConfig, state["model"], str(path / STATE_FILE), inside="model.")
    except UserError as error:
        return str(error)
    expected = checkpoint_shapes(parameter_shapes(model), averaged=state.get("ema_decay", 0) > 0)
    return tensors_problem(sorted(path.glob("part-*.safetensors")), expected)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= _LARGEST)


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _LARGEST


def _list_of(fits: Rule) -> Rule:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _pair_of(first: Rule, second: Rule) -> Rule:
    return lambda value: isinstance(value, list) and len(value) == 2 and first(value[0]) and second(value[1])


def _object(needed: Mapping[str, Rule], optional: Mapping[str, Rule] | None = None) -> Rule:
    known = {**needed, **(optional or {})}

    def fits(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and needed.keys() <= value.keys() <= known.keys()
            and all(known[name](inner) for name, inner in value.items())
        )

    return fits


def _is_position(value: Any) -> bool:
    return _MIXTURE(value) if isinstance(value, dict) and "corpora" in value else _PLACE(value)


_TOTALS = _object(dict.fromkeys(("packs", "pairs", "source_tokens", "target_tokens"), _is_count))
_PLACE = _object(
    {
        **dict.fromkeys(("epoch", "window", "packs_consumed"), _is_count),
        "carry_over": _list_of(_is_count),
        "left_out": _list_of(_pair_of(_is_count, _is_count)),
    },
    {"rule": _is_count, "totals": lambda value: value is None or _TOTALS(value)},
)
_MIXTURE = _object({"corpora": _list_of(_PLACE), "target_tokens": _list_of(_is_count)})
_LEFT_OUT = _object(dict.fromkeys(("step", "corpus", "shard", "epoch", "window", "packs"), _is_count))
# Checkpoints of the first versions lack these.
_NEWER = (
    *("validated_step", "ema_decay", "longest_source", "several_sentences", "longer_pairs"),
    *("computed_source_tokens", "computed_target_tokens"),
)
_STATE: dict[str, Rule] = {
    **dict.fromkeys(("step", "skipped_steps", "skipped_in_a_row", "validations_since_best"), _is_count),
    **dict.fromkeys(("source_tokens", "target_tokens", "updates"), _is_count),
    **dict.fromkeys(("computed_source_tokens", "computed_target_tokens"), _is_count),
    **dict.fromkeys(("validated_step", "ema_decay", "several_sentences"), _is_amount),
    **dict.fromkeys(("longest_source", "longer_pairs"), _is_count),
    "train_seconds": _is_amount,
    "ledger_chain": lambda value: isinstance(value, str) and _CHAIN.fullmatch(value) is not None,
    "best": _list_of(_pair_of(_is_count, _is_number)),
    "left_out": _list_of(_LEFT_OUT),
    "position": _is_position,
    "model": lambda value: isinstance(value, dict),
    "tokenizer_sha256": lambda value: isinstance(value, str),
}
