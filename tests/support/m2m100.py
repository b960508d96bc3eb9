"""Folders of `M2M100ForConditionalGeneration` with random weights, in the forms of M2M100 and NLLB."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, M2M100Config, M2M100ForConditionalGeneration
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

MODEL_FILE = "sentencepiece.bpe.model"
CODES = ("deu_Latn", "eng_Latn", "fra_Latn")
# Rows without an entry, as both families have them.
SURPLUS = 2


def write_folder(
    folder: Path, lines: Sequence[str], family: str, *, pieces: int = 300, **sizes: int
) -> M2M100ForConditionalGeneration:
    """Write a whole folder; its network has two layers a side unless `sizes` say otherwise."""
    folder.mkdir()
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=written, vocab_size=pieces, model_type="bpe", minloglevel=2
    )
    (folder / MODEL_FILE).write_bytes(written.getvalue())
    rows = {"m2m100": _m2m100, "nllb": _nllb}[family](folder) + SURPLUS
    shape: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "ffn": 48, "positions": 200} | sizes
    torch.manual_seed(4)
    model = M2M100ForConditionalGeneration(
        M2M100Config(
            vocab_size=rows,
            d_model=shape["width"],
            encoder_layers=shape["layers"],
            decoder_layers=shape["layers"],
            encoder_attention_heads=shape["heads"],
            decoder_attention_heads=shape["heads"],
            encoder_ffn_dim=shape["ffn"],
            decoder_ffn_dim=shape["ffn"],
            max_position_embeddings=shape["positions"],
        )
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "shared" not in name:
                # At these sizes, outputs do not repeat one token, and some end. Deeper networks enlarge rounding.
                size = 1.2 / shape["layers"] * (32 / shape["width"]) ** 0.5 if parameter.dim() == 2 else 0.05
                parameter.add_(torch.randn_like(parameter) * size)
        shared = model.model.shared.weight
        shared.mul_(8)
        shared[1] = 0
        model.model.decoder.layer_norm.bias.add_(shared[2] / shared[2].norm() * 2)
    model.save_pretrained(folder)
    return model


def _m2m100(folder: Path) -> int:
    """Write the files of a `M2M100Tokenizer`; return the number of its entries."""
    library = sentencepiece.SentencePieceProcessor(model_file=str(folder / MODEL_FILE))
    # As fairseq numbers them: its own four first, and not in the model's order.
    pieces = sorted(library.id_to_piece(i) for i in range(3, library.get_piece_size()))
    table = {piece: i for i, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
    (folder / "vocab.json").write_text(json.dumps(table))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "M2M100Tokenizer", "src_lang": "en", "tgt_lang": "de"})
    )
    codes = [f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES["m2m100"]]
    (folder / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": codes}))
    return len(table) + len(codes)


def _nllb(folder: Path) -> int:
    """Write the files of a `NllbTokenizer`; return the number of its entries."""
    config = {"tokenizer_class": "NllbTokenizer", "src_lang": "eng_Latn", "tgt_lang": "deu_Latn"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    state = json.loads(AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str())
    state["model"]["vocab"].pop("<mask>", None)
    first = len(state["model"]["vocab"])
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [*enumerate(("<s>", "<pad>", "</s>", "<unk>")), *enumerate((*CODES, "<mask>"), first)]
    state["added_tokens"] = [{"id": number, "content": name, **special} for number, name in added]
    state["post_processor"] = None
    Tokenizer.from_str(json.dumps(state)).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "additional_special_tokens": list(CODES)}))
    return first + len(CODES) + 1
