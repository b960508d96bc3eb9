"""Check a run folder: every hash of every checkpoint, the pointer, the weights, the hash chain of the sample ledger
(the record of what each step trained on), and the trained models in the folder.

dist-transformer verify runs/mine
dist-transformer verify runs/mine --data data/mine

With --data, the planned sentences of each step are computed again from the data folder alone, without a model, and
compared with the ledger's record of the sentences that the processes computed. Shards that the run left out are left
out again, and named. Prints a table; the exit status is 1 if anything is wrong. No link is followed, and nothing is
written except the cache of shards behind URLs.
"""

from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from dist_transformer.base.checks import check_table, failed
from dist_transformer.base.errors import UserError, say
from dist_transformer.config.command_line import Page, parse
from dist_transformer.config.schema import setting
from dist_transformer.run.outputs import claim_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifySettings:
    """Folders of the check."""

    run_dir: Path = setting(position=True)
    """Run folder of a training."""
    data: tuple[str, ...] = ()
    """Data folders of the run in its order, or their URLs: also compare every step with them."""
    cache_dir: Path | None = None
    """Cache of shards behind URLs, on local disk; default: the run's."""


def main() -> None:
    settings = parse(VerifySettings, Page(text=__doc__))

    from dist_transformer.run.verify import verify_run

    claim_folder(settings.cache_dir, "--cache-dir", (settings.run_dir, *settings.data))
    # disable=None: a bar in a terminal, nothing in a file.
    with tqdm(unit=" steps", disable=None, leave=False) as bar:
        checks = verify_run(settings.run_dir, settings.data, cache_dir=settings.cache_dir, on_step=bar.update)
    say(check_table(checks))
    if names := failed(checks):
        count = f"{len(names)} of {len(checks)} checks failed"
        raise UserError(f"{count} for {settings.run_dir}: see FAIL in the table above")
