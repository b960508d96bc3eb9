"""Paths that no file can have, and secrets in URLs."""

import time
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError, say
from dist_transformer.base.paths import usable_path
from dist_transformer.base.urls import without_secrets
from dist_transformer.config.flags import parse_training
from dist_transformer.data.text.pairs import expand


def test_a_pattern_that_finds_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "caf\udce9.de").write_text("x\n")
    with pytest.raises(UserError, match="is not UTF-8: rename the file"):
        expand([tmp_path / "*.de"], "--input")


SECRETS = {
    "ftp://me:hunter2@host/data": "ftp://***@host/data",
    "ftp://me:hun/ter2@host/data": "ftp://***@host/data",
    "ftp://me:hun@ter2@host/data": "ftp://***@host/data",
    "ftp://me:hun ter2@host/data": "ftp://***@host/data",
    "https://me:hun?t#er2@host/data": "https://***@host/data",
    "s3://key:hun/te/r2@bucket": "s3://***@bucket",
    "sftp://me:80hunter2@host": "sftp://***@host",
    "https://hunter2@host/data": "https://***@host/data",
    "HTTPS://hunter2@host/data": "HTTPS://***@host/data",
    "davs://hunter2@host/data": "davs://***@host/data",
    "https://:hunter2@host/data": "https://***@host/data",
    "simplecache::https://hunter2@host/data": "simplecache::https://***@host/data",
    "zip://a::https://me:hunter2@host/b::s3://k:hunter2@c": "zip://a::https://***@host/b::s3://***@c",
    "https://host/data?bearer=hunter2": "https://host/data?***",
    "https://host/data?v=1&jwt=hunter2": "https://host/data?***",
    "https://host/data?hunter2": "https://host/data?***",
    "https://host/data;sessionid=hunter2": "https://host/data;***",
    "https://host/data#hunter2": "https://host/data#***",
    "--data=gs://bucket/data?pass=hunter2": "--data=gs://bucket/data?***",
}
HARMLESS = (
    "https://host/data",
    "https://host:8080/data@v1",
    "http://[::1]:8080/data@v1",
    "hf://datasets/me/corpus@main/data",
    "zip://a.zip::hf://datasets/me/corpus@main/a.zip",
    "abfs://container@account.dfs.core.windows.net/data",
    "sftp://me@host/data",
    "s3://bucket/a:b@c",
    "memory://data",
    f"{'ü' * 127}/x y\n",
    "file:///home/me/a?b#c;d",
    "/home/me/a?b",
)


@pytest.mark.parametrize("url", SECRETS)
def test_a_secret_is_refused_and_not_shown(url: str) -> None:
    for parse in (usable_path, lambda word: parse_training(["--run-dir", "r", word])):
        with pytest.raises(UserError) as refused:
            parse(url)
        assert str(refused.value).startswith(f"{SECRETS[url]} holds a password, a query or a fragment, which may grant")
        assert "ter2" not in str(refused.value)


@pytest.mark.parametrize("url", HARMLESS)
def test_other_urls_are_taken(url: str) -> None:
    assert usable_path(url) == Path(url)
    assert without_secrets(url) == url


def test_messages_of_libraries_are_shown_without(capsys: pytest.CaptureFixture[str]) -> None:
    said = (
        "403, url=URL('https://cdn.host/a?X-Amz-Signature=hunter2&x=1') of ftp://me:hunter2@host; retries exceeded "
        "with url: /a/b?sig=hunter2 (try s3://a/b, or memory://c?)."
    )
    shown = (
        "403, url=URL('https://cdn.host/a?***') of ftp://***@host; retries exceeded "
        "with url: /a/b?*** (try s3://a/b, or memory://c?)."
    )
    assert str(UserError(said)) == shown
    say(said)
    assert capsys.readouterr().out == f"{shown}\n"


@pytest.mark.parametrize("part", ["a", "a://", "?", "/", "a:b@", "a://b?c ", "/a?b=", ")", "a.-+"])
def test_a_long_text_takes_no_long_time(part: str) -> None:
    """A pattern that looks at each part from each other one takes hours."""
    begin = time.process_time()
    without_secrets(f"/{part * (10**6 // len(part))}")
    assert time.process_time() - begin < 60
