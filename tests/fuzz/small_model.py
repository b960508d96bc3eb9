"""A model folder of a few kilobytes."""

from pathlib import Path

from dist_transformer.base.files import sha256_of
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo, write_model_folder


def make_model(path: Path) -> Path:
    """A model folder of a few kilobytes."""
    tokenizer = learn_byte_bpe(["a sentence"], vocab_size=262)
    file = path.with_name("tokenizer.json")
    tokenizer.save(file)
    model = Transformer(
        ModelConfig(
            width=8,
            heads=2,
            ffn_width=8,
            encoder_layers=1,
            decoder_layers=1,
            max_positions=16,
            vocab_size=tokenizer.vocab_size,
        )
    )
    info = ModelInfo(
        model=model.config,
        tokenizer_sha256=sha256_of(file),
        source_language="en",
        target_language="de",
        corpus="fuzz",
        synthetic=True,
        steps=(1,),
    )
    write_model_folder(path, info=info, weights=dict(model.state_dict()), tokenizer_json=file.read_bytes())
    return path
