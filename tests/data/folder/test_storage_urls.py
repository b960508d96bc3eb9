import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.folder.storage import refuse_secrets, without_secrets

SECRETS = {
    "ftp://me:hunter2@host/data": "ftp://***@host/data",
    "ftp://me:hun/ter2@host/data": "ftp://***@host/data",
    "s3://key:hun/te/r2@bucket": "s3://***@bucket",
    "sftp://me:80hunter2@host": "sftp://***@host",
    "https://hunter2@host/data": "https://***@host/data",
    "HTTPS://hunter2@host/data": "HTTPS://***@host/data",
    "https://:hunter2@host/data": "https://***@host/data",
    "simplecache::https://hunter2@host/data": "simplecache::https://***@host/data",
    "https://host/data?token=hunter2": "https://host/data?token=***",
    "https://host/data?v=1&sig=hunter2&sv=2": "https://host/data?v=1&sig=***&sv=2",
    "https://host/data?X-Amz-Signature=hunter2&X-Amz-Date=hunter2": (
        "https://host/data?X-Amz-Signature=***&X-Amz-Date=***"
    ),
    "https://host/data?api_key=hunter2": "https://host/data?api_key=***",
    "https://host/data?Key-Pair-Id=a&Signature=hunter2": "https://host/data?Key-Pair-Id=a&Signature=***",
    "https://host/data?AWSAccessKeyId=hunter2": "https://host/data?AWSAccessKeyId=***",
    "https://host/data?%74oken=hunter2": "https://host/data?%74oken=***",
    "https://host/data?Password=hunter2;credential=hunter2": "https://host/data?Password=***;credential=***",
    "https://host/data#access_token=hunter2": "https://host/data#access_token=***",
    "gs://bucket/data?client_secret=hunter2": "gs://bucket/data?client_secret=***",
}
HARMLESS = (
    "https://host/data",
    "https://host:8080/data@v1",
    "hf://datasets/me/corpus@main/data",
    "abfs://container@account.dfs.core.windows.net/data",
    "sftp://me@host/data",
    "s3://bucket/data?versionId=3&author=me",
    "memory://data",
)


@pytest.mark.parametrize("url", SECRETS)
def test_a_secret_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UserError) as refused:
        DataFolder.open(url)
    assert str(refused.value).startswith(f"{SECRETS[url]} holds a password, which would be written to logs and to the")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("url", HARMLESS)
def test_other_urls_are_taken(url: str) -> None:
    refuse_secrets(url)
    assert without_secrets(url) == url


def test_what_a_store_says_is_shown_without() -> None:
    said = (
        "403, message='Forbidden', url=URL('https://cdn.host/a?X-Amz-Signature=hunter2&x=1') of ftp://me:hunter2@host"
    )
    shown = "403, message='Forbidden', url=URL('https://cdn.host/a?X-Amz-Signature=***&x=1') of ftp://***@host"
    assert without_secrets(said) == shown
