"""Open a prepared data folder: on this machine, or behind a URL with a cache on local disk."""

from collections.abc import Collection, Iterator
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import make_folder, move, sha256_of
from dist_transformer.base.locks import exclusive
from dist_transformer.base.paths import refuse_secrets
from dist_transformer.base.urls import is_url
from dist_transformer.base.verified import Held, read_verified
from dist_transformer.config.plain import from_plain, parse_json
from dist_transformer.data.folder.format import (
    FORMAT_VERSION,
    INDEX_FILE,
    REMEDY,
    TOKENIZER_FILE,
    VALID_FOLDER,
    VALID_SOURCE_FILE,
    VALID_TARGET_FILE,
    DataIndex,
    index_states,
)
from dist_transformer.data.folder.split import Split
from dist_transformer.data.folder.storage import CachedFiles, CacheSettings, LocalFiles, fetch
from dist_transformer.data.vocabulary.kinds import load_vocabulary
from dist_transformer.data.vocabulary.tokenizer import Vocabulary


class DataFolder:
    """A prepared data folder, opened for reading. `path` is on local disk; for a URL it is in the cache.

    Args:
        files: storage of the training shards; None: the folder.
        lengths: content of the file of lengths, if another process of this node has opened the folder and provides its
            training shards.
    """

    def __init__(
        self, path: Path, index: DataIndex, files: LocalFiles | None = None, *, lengths: Held | None = None
    ) -> None:
        self.path = path
        self.index = index
        self.train = Split(path, index.train, files, lengths=lengths)
        self.valid = Split(path / VALID_FOLDER, index.valid)

    @classmethod
    def open(
        cls, place: Path | str, cache: CacheSettings | None = None, *, shards_may_be_bad: bool = False
    ) -> "DataFolder":
        """Open and check a folder. Each shard is verified at its first use; `verify` checks all.

        Args:
            place: a folder, or a URL for `fsspec`.
            cache: settings of the cache, for a URL.
            shards_may_be_bad: check existence and size of training shards only at their first use.

        Raises:
            UserError: not a data folder, a newer format, a file that is missing, damaged or of another size, or a URL
                with a secret.
        """
        if is_url(str(place)):
            refuse_secrets(str(place))
            if cache is None:
                raise UserError(f"{place} is a URL, and only training reads those: copy the folder to this machine")
            return cls._open_url(str(place).rstrip("/"), cache)
        path = Path(place)
        index = read_index(path)
        sizes: dict[Path, int | None] = {path / name: None for name, _ in _small_files(index)}
        sizes |= {path / VALID_FOLDER / shard.file: shard.bytes for shard in index.valid.shards}
        if not shards_may_be_bad:
            sizes |= {path / shard.file: shard.bytes for shard in index.train.shards}
        for file, size in sizes.items():
            try:
                found = file.stat().st_size
            except OSError as error:
                raise UserError(f"{file} is missing or unreadable ({error.strerror}): {REMEDY}") from None
            if size not in (None, found):
                raise UserError(f"{file} has {found:,} bytes, but the index states {size:,}: {REMEDY}")
        return cls(path, index)

    @classmethod
    def _open_url(cls, url: str, cache: CacheSettings) -> "DataFolder":
        """Copy everything but the training shards to the cache; the processes of a node take turns."""
        try:
            make_folder(cache.folder)
            with exclusive(cache.folder / "lock"):
                fetch(f"{url}/{INDEX_FILE}", cache.folder / INDEX_FILE)
                index = read_index(cache.folder)
                _require_plain_names(index)
                path = cache.folder / sha256_of(cache.folder / INDEX_FILE)[:16]
                make_folder(path / VALID_FOLDER)
                for name, sha256 in _small_files(index):
                    if not (path / name).is_file() or sha256_of(path / name) != sha256:
                        fetch(f"{url}/{name}", path / name, sha256=sha256)
                move(cache.folder / INDEX_FILE, path / INDEX_FILE)
        except OSError as error:
            raise UserError(
                f"the cache {cache.folder} cannot be written ({error.strerror or error}): choose a folder with free "
                "space with --cache-dir"
            ) from None
        return cls(path, index, CachedFiles(url, path, cache.limit_bytes))

    def tokenizer(self) -> Vocabulary:
        """Load the tokenizer of the folder.

        Raises:
            UserError: it is no longer the one that the index states, or the index states other sizes.
        """
        tokenizer = load_vocabulary(self.path / TOKENIZER_FILE, sha256=self.index.tokenizer_sha256)
        if tokenizer.sizes != self.index.vocab_sizes:
            raise UserError(f"{self.path / INDEX_FILE} is damaged (it states other sizes of the vocabulary): {REMEDY}")
        return tokenizer

    def valid_text(self) -> tuple[list[str], list[str]]:
        """Read source and target lines of the validation text, as the user gave them.

        Raises:
            UserError: the texts are missing, changed, not UTF-8, or have another number of lines than the index states.
        """
        folder, info = self.path / VALID_FOLDER, self.index.valid_text
        stated = ((VALID_SOURCE_FILE, info.source_sha256), (VALID_TARGET_FILE, info.target_sha256))
        try:
            source, target = (
                read_verified(folder / name, index_states(sha256)).decode("utf-8").split("\n")[:-1]
                for name, sha256 in stated
            )
        except UnicodeDecodeError as error:
            raise UserError(f"the texts in {folder} cannot be read ({error}): {REMEDY}") from None
        if not len(source) == len(target) == self.index.valid_text.pairs:
            raise UserError(f"the texts in {folder} do not have {self.index.valid_text.pairs:,} lines each: {REMEDY}")
        return source, target

    def verify(self, *, without: Collection[int] = ()) -> None:
        """Check every file against the index, also shards behind a URL, except the training shards `without`.

        Raises:
            UserError: a file is not what the index states; the error names the first one.
        """
        for name, sha256 in _small_files(self.index):
            index_states(sha256).check(self.path / name)
        for shard in range(len(self.valid.info.shards)):
            self.valid.read(shard)
        for shard in range(len(self.train.info.shards)):
            if shard not in without:
                self.train.read(shard)

    def close(self) -> None:
        self.train.close()
        self.valid.close()


def _small_files(index: DataIndex) -> Iterator[tuple[str, str]]:
    """List names and SHA-256 of all files but the training shards."""
    yield TOKENIZER_FILE, index.tokenizer_sha256
    yield index.train.lengths_file, index.train.lengths_sha256
    yield f"{VALID_FOLDER}/{VALID_SOURCE_FILE}", index.valid_text.source_sha256
    yield f"{VALID_FOLDER}/{VALID_TARGET_FILE}", index.valid_text.target_sha256
    yield f"{VALID_FOLDER}/{index.valid.lengths_file}", index.valid.lengths_sha256
    for shard in index.valid.shards:
        yield f"{VALID_FOLDER}/{shard.file}", shard.sha256


def _require_plain_names(index: DataIndex) -> None:
    """Refuse an index from the network whose names lead out of the cache."""
    for split in (index.train, index.valid):
        for name in (split.lengths_file, *(shard.file for shard in split.shards)):
            if Path(name).name != name:
                raise UserError(f'"{name}" in {INDEX_FILE} is not a plain file name: {REMEDY}')


def read_index(folder: Path) -> DataIndex:
    """Read index.json of a data folder on this machine.

    Raises:
        UserError: it is missing, damaged, or of another format.
    """
    path = folder / INDEX_FILE
    try:
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{folder} is not a data folder, because {path} cannot be read ({error.strerror}): "
            "use a folder made by dist-transformer prepare"
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): {REMEDY}") from None
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {version!r:.60}, but this program reads {FORMAT_VERSION}: "
            "upgrade dist_transformer, or prepare the data again"
        )
    if version != FORMAT_VERSION:
        raise UserError(f"format_version in {path} must be {FORMAT_VERSION}, not {version!r:.60}: {REMEDY}")
    return from_plain(DataIndex, content, str(path), remedy=REMEDY)
