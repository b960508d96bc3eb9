"""Folders as transformers writes them, of random weights and small vocabularies, and their import."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import sentencepiece
import torch
from tqdm import tqdm
from transformers import MarianConfig, MarianMTModel

from dist_transformer.base.checks import Check
from dist_transformer.importing.checked_import import import_model
from dist_transformer.importing.settings import ImportSettings

CPU = torch.device("cpu")
SILENT = tqdm(disable=True)
Lines = tuple[list[str], list[str]]
ROWS = ["token ids", "decoding", "log-probabilities", "greedy search"]


def write_folder(
    folder: Path,
    lines: Lines,
    *,
    width: int = 32,
    layers: tuple[int, int] = (2, 2),
    heads: int = 4,
    ffn: int = 48,
    activation: str = "swish",
    languages: tuple[str, ...] = (),
    positions: int = 512,
    model_type: str = "unigram",
    two: bool = False,
    tied: bool = True,
) -> MarianMTModel:
    """Write a folder with random weights, large biases too, and `.spm` files that SentencePiece learned."""
    folder.mkdir()
    pieces: list[set[str]] = []
    for side, text in zip(("source", "target"), lines, strict=True):
        written = io.BytesIO()
        settings = {"vocab_size": 150, "model_type": model_type, "hard_vocab_limit": False, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(text), model_writer=written, **settings)
        (folder / f"{side}.spm").write_bytes(written.getvalue())
        library = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
        pieces.append({library.id_to_piece(i) for i in range(3, library.get_piece_size())})
    # <pad> has another id in each table.
    tables = [
        ["</s>", "<unk>", *languages, *sorted(one), "<pad>"] for one in (pieces if two else [pieces[0] | pieces[1]])
    ]
    for file, table in zip(("vocab.json", "target_vocab.json"), tables, strict=False):
        (folder / file).write_text(json.dumps({piece: i for i, piece in enumerate(table)}, ensure_ascii=False))
    names: dict[str, object] = {"source_lang": "en", "target_lang": "de", "tokenizer_class": "MarianTokenizer"}
    # As transformers up to 4.40 wrote it.
    names["clean_up_tokenization_spaces"] = True
    (folder / "tokenizer_config.json").write_text(json.dumps(names | ({"separate_vocabs": True} if two else {})))
    torch.manual_seed(0)
    pads = [len(table) - 1 for table in tables]
    pad = pads[-1]
    model = MarianMTModel(
        MarianConfig(
            vocab_size=len(tables[0]),
            decoder_vocab_size=len(tables[-1]),
            share_encoder_decoder_embeddings=not two,
            tie_word_embeddings=tied,
            d_model=width,
            encoder_layers=layers[0],
            decoder_layers=layers[1],
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_ffn_dim=ffn,
            decoder_ffn_dim=ffn,
            activation_function=activation,
            max_position_embeddings=positions,
            scale_embedding=True,
            pad_token_id=min(pads),
            eos_token_id=0,
            forced_eos_token_id=0,
            decoder_start_token_id=pad,
            bad_words_ids=[[pad]],
        )
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "shared" not in name and "embed" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        embeddings = [model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight]
        for weight, zeros in zip(embeddings if two else embeddings[:1], pads, strict=True):
            weight.mul_(8)
            weight[zeros] = 0
        model.final_logits_bias.normal_(std=2)
    model.save_pretrained(folder)
    return model


def run(folder: Path, out: Path, **more: Any) -> list[Check]:
    checks: list[Check] = []
    import_model(ImportSettings(folder=folder, out=out, **more), CPU, progress=SILENT, show=checks.extend)
    return checks


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        change(weights)
        safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return write
