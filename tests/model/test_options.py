"""Options of the model: each changes the outcome, and all learn."""

import pytest
import torch
from torch.nn import functional

from dist_transformer.model.attention import MultiHeadAttention
from dist_transformer.model.packed import IGNORED
from tests.model.small_batches import BATCH, gradients, hidden_states, make_model


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "pre"},
        {"positions": "learned"},
        {"activation": "gelu"},
        {"activation": "swish"},
        {"dropout": 0.3},
        {"attention_dropout": 0.3},
        {"ffn_dropout": 0.3},
        {"tie_embeddings": "target"},
        {"tie_embeddings": "none"},
        {"head_width": 5},
        {"embedding_init": "xavier"},
    ],
    ids=lambda options: "-".join(map(str, next(iter(options.items())))),
)
def test_option_changes_the_outcome_and_trains(options: dict[str, object]) -> None:
    plain, model = make_model(), make_model(**options)
    before = model(BATCH, 0.1).loss
    if {"dropout", "attention_dropout", "ffn_dropout"} & options.keys():
        # In training each draw differs; in evaluation there is none.
        assert before != model(BATCH, 0.1).loss
        assert model.eval()(BATCH, 0.1).loss == plain(BATCH, 0.1).loss
    else:
        assert before.item() != pytest.approx(plain(BATCH, 0.1).loss.item(), abs=1e-3)
    found = gradients(model, before)
    for name, gradient in found.items():
        assert gradient.isfinite().all(), name
        assert gradient.any(), f"{name} does not learn"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.sub_(0.5 / before.item() * found[name])
    assert model.eval()(BATCH, 0.1).loss < before


def test_each_attention_knows_its_role() -> None:
    model = make_model()
    roles = [module.role for module in model.modules() if isinstance(module, MultiHeadAttention)]
    assert roles == ["encoder", "encoder", "decoder", "cross", "decoder", "cross"]


def test_attention_from_outside_trains(distant: str) -> None:
    model = make_model(attention=distant)
    found = gradients(model, model(BATCH, 0.1).loss)
    assert len([name for name in found if name.endswith("slopes_H")]) == 6
    for name, gradient in found.items():
        assert gradient.any(), f"{name} does not learn"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_output_bias_is_part_of_the_logits(smoothing: float) -> None:
    """Loss and gradients are those of torch's cross-entropy of the logits."""
    model = make_model(output_bias=True)
    assert model.output_bias is not None
    assert not model.output_bias.any()
    with torch.no_grad():
        model.output_bias.normal_()
    found = gradients(model, model(BATCH, smoothing).loss)
    hidden_TD = model.decode(BATCH.target, model.encode(BATCH.source), BATCH.source)
    logits_TV = hidden_TD @ model.embedding.t() + model.output_bias
    torch.testing.assert_close(model.logits(hidden_TD), logits_TV)
    loss = functional.cross_entropy(
        logits_TV, BATCH.labels_T, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum"
    )
    assert model(BATCH, smoothing).loss.item() == pytest.approx(loss.item(), rel=1e-5)
    for name, gradient in gradients(model, loss).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
    assert model.weights_of_pieces().keys() == {"embedding", "output_bias"}


def test_a_target_matrix_is_embedding_and_output() -> None:
    model = make_model(tie_embeddings="target", target_vocab_size=30)
    assert {name: weight.shape[0] for name, weight in model.embedding_weights().items()} == {
        "embedding": 40,
        "target_embedding": 30,
    }
    hidden_TD = torch.randn(3, 16)
    torch.testing.assert_close(model.logits(hidden_TD), hidden_TD @ model.target_embedding.t())
    tokens = torch.tensor([7, 29])
    vectors = functional.embedding(tokens, model.target_embedding)
    assert torch.equal(model._embed_target(tokens, tokens), model._placed(vectors, tokens))
    same = make_model(tie_embeddings="target")
    assert torch.equal(same.output_weight, same.target_embedding)


def test_untied_embeddings_have_one_use_each() -> None:
    model = make_model(tie_embeddings="none").eval()
    assert list(model.embedding_weights()) == ["embedding", "target_embedding", "output_projection"]
    assert list(make_model().embedding_weights()) == ["embedding"]

    def outcome() -> list[torch.Tensor]:
        with torch.no_grad():
            memory_SD = model.encode(BATCH.source)
            hidden_TD = model.decode(BATCH.target, memory_SD, BATCH.source)
            return [memory_SD, hidden_TD, model.logits(hidden_TD)]

    for name, changed in (
        ("embedding", [True, True, True]),
        ("target_embedding", [False, True, True]),
        ("output_projection", [False, False, True]),
    ):
        before = outcome()
        with torch.no_grad():
            getattr(model, name).mul_(2)
        assert [not torch.equal(one, other) for one, other in zip(before, outcome(), strict=True)] == changed


def test_logits_are_fp32_for_half_precision_weights() -> None:
    model = make_model().eval().bfloat16()
    # DeepSpeed casts parameters; the table of sinusoids is none.
    model.positions.table = model.positions.table.float()
    hidden_TD = hidden_states(model, BATCH)
    assert hidden_TD.dtype == torch.bfloat16
    assert model.logits(hidden_TD).dtype == torch.float32
    full = make_model().eval()
    loss, expected = model(BATCH, 0.1).loss, full(BATCH, 0.1).loss
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)
