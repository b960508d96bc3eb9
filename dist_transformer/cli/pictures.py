"""Draw the parts of the Transformer, and the attention of a trained model, on one page with PNG files.

dist-transformer pictures --model RUN/model --src-text "A dog runs." --out pictures

OUT/index.html needs no network and no other file. It shows masks, the weights of every layer and head for one sentence
pair, softmax with and without scaling, sinusoids and their rotations, learned positions, schedules, and the cost of
attention. Each picture is also a PNG file in OUT. Without --model, the pictures that need none are made.
"""

from dist_transformer.base.errors import say
from dist_transformer.base.files import refuse_content
from dist_transformer.config.command_line import Page, parse
from dist_transformer.model_folder import read_model_info
from dist_transformer.pictures.settings import PictureSettings
from dist_transformer.run.outputs import claim_folder


def main() -> None:
    settings = parse(PictureSettings, Page(text=__doc__))
    claim_folder(settings.out, "--out", (settings.model, settings.learned_model))
    refuse_content(settings.out)
    # Early, because the imports below take seconds.
    for model in filter(None, (settings.model, settings.learned_model)):
        read_model_info(model)

    from dist_transformer.pictures.collection import make_pictures, write_pictures

    say(write_pictures(settings.out, *make_pictures(settings)))
