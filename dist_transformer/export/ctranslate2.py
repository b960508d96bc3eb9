"""CTranslate2, an inference engine: its model specification filled from our weights, and the model loaded from it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import write_file
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, SPECIALS, UNK_ID, Vocabulary
from dist_transformer.export.libraries import BEAM_SIZE, LENGTH_PENALTY, SENTENCES, IdPair, longest_output
from dist_transformer.export.tokenizer_files import whole_tokenizer
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import TOKENIZER_FILE, ModelInfo

Pieces = tuple[Sequence[str], Sequence[str]]
"""Vocabularies of sources and of targets, by id."""

SUPPRESSED = [[SPECIALS[PAD_ID]], [SPECIALS[BOS_ID]]]
"""Tokens that are never part of an output; for `<unk>`, CTranslate2 has its own flag."""
PATIENCE = 2
"""Factor on the beam size. With 1, the search ends with the fourth finished hypothesis, though others may be better."""
_END = SPECIALS[EOS_ID]
# The file of a SentencePiece vocabulary; CTranslate2's own file of the vocabulary lists the pieces by id.
_FILES = {"tokenizers": TOKENIZER_FILE, "sentencepiece": "sentencepiece.model"}


def refuse_what_ctranslate2_lacks(config: ModelConfig) -> None:
    """Raise a UserError that names a setting that CTranslate2 does not support."""
    if config.heads * config.attention_head_width != config.width:
        raise UserError("CTranslate2 has no separate head width: model.head_width must be width ÷ heads")
    if config.attention != "softmax":
        raise UserError(f"model.attention is {config.attention}: CTranslate2 supports only softmax attention")


def tokenizer_files(tokenizer: Vocabulary) -> dict[str, str]:
    """Return the files of the tokenizer, of one for both sides or of sources and targets, and the library of each."""
    libraries = [tokenizer.source.library, tokenizer.target.library][: 1 + (tokenizer.sizes[1] > 0)]
    return {f"{side}{_FILES[library]}": library for side, library in zip(("", "target_"), libraries, strict=False)}


def write_ctranslate2(
    folder: Path, model: Transformer, tokenizer: Vocabulary, info: ModelInfo, *, quantization: str | None = None
) -> None:
    """Fill `folder` with the model and its tokenizer.

    Args:
        info: of one direction.

    Raises:
        UserError: CTranslate2 does not support the model.
    """
    save_for_ctranslate2(model, (tokenizer.source.pieces, tokenizer.target.pieces), folder, quantization=quantization)
    sides = ((tokenizer.source, info.direction.tags), (tokenizer.target, ()))
    for (name, library), (side, tags) in zip(tokenizer_files(tokenizer).items(), sides, strict=False):
        is_whole = library == "tokenizers"
        write_file(folder / name, whole_tokenizer(side, tags, knows_specials=False) if is_whole else side.library_file)


def save_for_ctranslate2(model: Transformer, pieces: Pieces, out: Path, *, quantization: str | None = None) -> None:
    """Fill the folder `out` with a CTranslate2 model. Its tokens are pieces; a source ends with `</s>`.

    Args:
        quantization: a `libraries.Quantization`; None: fp32.

    Raises:
        UserError: CTranslate2 does not support the configuration.
    """
    from ctranslate2.specs import TransformerSpec
    from ctranslate2.specs.common_spec import Activation

    config = model.config
    refuse_what_ctranslate2_lacks(config)
    pre_norm = config.norm == "pre"
    spec = TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.heads,
        pre_norm=pre_norm,
        activation={"relu": Activation.RELU, "gelu": Activation.GELU, "swish": Activation.SWISH}[config.activation],
    )
    # Copies, because the specification quantises its arrays in place.
    state = {name: tensor.detach().float().cpu().clone().numpy() for name, tensor in model.state_dict().items()}
    # Constant position vectors are not part of the state.
    positions = model.position_vectors(config.max_positions).detach().float().cpu().numpy()
    for name in ("encoder", "decoder"):
        side = getattr(spec, name)
        side.position_encodings.encodings = positions
        for i, layer in enumerate(side.layer):
            _fill_layer(layer, f"{name}.{i}", state)
        if pre_norm:
            side.layer_norm.gamma, side.layer_norm.beta = state[f"{name}_norm.weight"], state[f"{name}_norm.bias"]
    if config.begin_with_pad:
        name = "embedding" if config.tie_embeddings == "all" else "target_embedding"
        state[name][BOS_ID] = state[name][PAD_ID]
    spec.decoder.start_from_zero_embedding = config.begin_with_zeros
    source = state["embedding"]
    target = state.get("target_embedding", source)
    spec.encoder.embeddings[0].weight = source
    spec.decoder.embeddings.weight = target
    spec.decoder.projection.weight = state.get("output_projection", target)
    if "output_bias" in state:
        spec.decoder.projection.bias = state["output_bias"]
    spec.register_source_vocabulary(list(pieces[0]))
    spec.register_target_vocabulary(list(pieces[1]))
    # Its other defaults are ours: special tokens, scaled embeddings, a decoder that begins with <s>, no further </s>.
    spec.config.layer_norm_epsilon = config.norm_epsilon
    if config.begin_with_end:
        spec.config.decoder_start_token = _END
    spec.validate()
    # This also stores a tied matrix only once.
    spec.optimize(quantization=quantization)
    out.mkdir(parents=True, exist_ok=True)
    spec.save(str(out))


def _fill_layer(layer: Any, name: str, state: dict[str, np.ndarray]) -> None:
    """Fill a layer of the specification with the weights of ours of this name."""
    places = {
        "self_attention.qkv_": layer.self_attention.linear[0],
        "self_attention.output.": layer.self_attention.linear[1],
        "self_residual.norm.": layer.self_attention.layer_norm,
        "feed_forward.inner.": layer.ffn.linear_0,
        "feed_forward.outer.": layer.ffn.linear_1,
        "ffn_residual.norm.": layer.ffn.layer_norm,
    }
    if name.startswith("decoder"):
        # Queries are apart from keys and values.
        for kind in ("weight", "bias"):
            qkv = state[f"{name}.cross_attention.qkv_{kind}"]
            inner = len(qkv) // 3
            setattr(layer.attention.linear[0], kind, qkv[:inner])
            setattr(layer.attention.linear[1], kind, qkv[inner:])
        places["cross_attention.output."] = layer.attention.linear[2]
        places["cross_residual.norm."] = layer.attention.layer_norm
    for part, theirs in places.items():
        weight, bias = (state[f"{name}.{part}{kind}"] for kind in ("weight", "bias"))
        if "norm" in part:
            theirs.gamma, theirs.beta = weight, bias
        else:
            theirs.weight, theirs.bias = weight, bias


def translate_ids(
    translator: Any,
    pieces: Pieces,
    sources: Sequence[list[int]],
    *,
    longest: int,
    tags: Sequence[str] = (),
    begin: Sequence[str] = (),
    max_batch_tokens: int = 2048,
    **search: float,
) -> list[list[int]]:
    """Return the best hypothesis of each source as ids without special tokens.

    Args:
        longest: most tokens per output.
        tags: tags of the targets' vocabulary, which are never part of an output.
        begin: tags that every output begins with.
        max_batch_tokens: padded source tokens per batch.
        search: further settings of CTranslate2, such as `beam_size`.
    """
    found = translator.translate_batch(
        [[*(pieces[0][token] for token in source), _END] for source in sources],
        target_prefix=[list(begin)] * len(sources),
        max_input_length=0,
        max_decoding_length=longest,
        # An output may be empty, as in our search.
        min_decoding_length=0,
        max_batch_size=max_batch_tokens,
        batch_type="tokens",
        disable_unk=True,
        suppress_sequences=[*SUPPRESSED, *([tag] for tag in tags)],
        **search,
    )
    ids = {piece: token for token, piece in enumerate(pieces[1])}
    return [[ids[piece] for piece in result.hypotheses[0]] for result in found]


def _open(file: Path, library: str) -> Any:
    if library == "tokenizers":
        return tokenizers.Tokenizer.from_file(str(file))
    return sentencepiece.SentencePieceProcessor(model_file=str(file))


class CTranslate2Peer:
    """An exported folder, loaded with `ctranslate2` and the libraries of its tokenizer as by a user."""

    def __init__(self, folder: Path, device: torch.device, tokenizer: Vocabulary, info: ModelInfo) -> None:
        """Load the folder.

        Args:
            info: of one direction.
        """
        import ctranslate2

        self.longest = longest_output(info.model.max_positions)
        self.sides = (tokenizer.source, tokenizer.target)
        self.pieces = (tokenizer.source.pieces, tokenizer.target.pieces)
        fronts = zip(self.pieces, tokenizer.fronts(info.direction.tags), strict=True)
        self.front, self.begin = ([pieces[token] for token in front] for pieces, front in fronts)
        self.backends = [_open(folder / name, library) for name, library in tokenizer_files(tokenizer).items()]
        self.translator: Any = ctranslate2.Translator(
            str(folder), device=device.type, device_index=device.index or 0, intra_threads=torch.get_num_threads()
        )
        self.precision = str(self.translator.compute_type)

    def reads(self, text: str) -> bool:
        return self.sides[0].library == "tokenizers" or "\0" not in text

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        if self.sides[0].library == "tokenizers":
            return [row.ids for row in self.backends[0].encode_batch(list(lines))]
        ids = {piece: token for token, piece in enumerate(self.pieces[0])}
        rows = self.backends[0].encode(list(lines), out_type=str)
        return [[ids.get(piece, UNK_ID) for piece in (*self.front, *row, _END)] for row in rows]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        backend = self.backends[-1]
        if self.sides[1].library == "tokenizers":
            return [backend.decode(list(row)) for row in ids]
        return [backend.decode_pieces([self.pieces[1][token] for token in row]).strip(" ") for row in ids]

    def log_probabilities(self, pairs: Sequence[IdPair]) -> list[list[float]]:
        found = self.translator.score_batch(
            [[self.pieces[0][token] for token in (*source, EOS_ID)] for source, _ in pairs],
            [[self.pieces[1][token] for token in target] for _, target in pairs],
            max_batch_size=SENTENCES,
            max_input_length=0,
        )
        return [result.log_probs for result in found]

    def greedy(self, sources: Sequence[list[int]], longest: int) -> list[list[int]]:
        return self._search(sources, longest, beam_size=1, length_penalty=0.0)

    def translate(self, lines: Sequence[str]) -> list[str]:
        # Without </s>, which `translate_ids` adds.
        sources = [ids[:-1] for ids in self.encode(lines)]
        search = {"beam_size": BEAM_SIZE, "patience": PATIENCE, "length_penalty": LENGTH_PENALTY}
        return self.decode([row[len(self.begin) :] for row in self._search(sources, self.longest, **search)])

    def _search(self, sources: Sequence[list[int]], longest: int, **search: Any) -> list[list[int]]:
        how = {"longest": longest, "tags": self.sides[1].tags, "begin": self.begin, **search}
        return translate_ids(self.translator, self.pieces, sources, **how)
