"""Names of the parameters that parts of the model stand for."""

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.model.freezing import PARTS, frozen_names
from tests.model.small_batches import make_model

NAMES = [name for name, _ in make_model(norm="pre", output_bias=True, tie_embeddings="none").named_parameters()]


def test_parts_by_hand() -> None:
    assert frozen_names(NAMES, ["embeddings"]) == {"embedding", "target_embedding", "output_projection"}
    attention = {"qkv_weight", "qkv_bias", "output.weight", "output.bias"}
    assert frozen_names(NAMES, ["cross_attention"]) == {
        f"decoder.{layer}.cross_attention.{name}" for layer in (0, 1) for name in attention
    }
    # Attention and feed-forward layer have four tensors each, and their norms two.
    assert len(frozen_names(NAMES, ["encoder.1"])) == 12
    assert frozen_names(NAMES, ["encoder"]) == frozen_names(NAMES, ["encoder.0-1", "encoder_norm.*"])
    assert {name.split(".")[-1] for name in frozen_names(NAMES, ["norms"])} == {"weight", "bias"}
    assert len(frozen_names(NAMES, ["norms"])) == 2 * (2 * 2 + 2 * 3 + 2)
    assert "output_bias" in frozen_names(NAMES, ["biases"])
    assert frozen_names(NAMES, []) == set()
    for part in PARTS:
        assert 0 < len(frozen_names(NAMES, [part])) < len(NAMES)


@pytest.mark.parametrize("part", ["encoder.2", "encoder.1-0", "encoders", "*.nothing"])
def test_a_part_without_parameters_is_refused(part: str) -> None:
    with pytest.raises(UserError, match=r"--freeze .* matches no part of the model: use some of embeddings, encoder"):
        frozen_names(NAMES, ["decoder", part])


def test_something_must_be_trained() -> None:
    with pytest.raises(UserError, match=r"--freeze encoder decoder embeddings output_bias leaves nothing to train"):
        frozen_names(NAMES, ["encoder", "decoder", "embeddings", "output_bias"])
