import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.folder.reader import DataFolder


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ftp://me:hunter2@host/data", "ftp://***@host/data"),
        ("https://host/data?bearer=hunter2", "https://host/data?***"),
    ],
)
def test_a_secret_is_refused_and_not_shown(url: str, shown: str) -> None:
    with pytest.raises(UserError) as refused:
        DataFolder.open(url)
    assert str(refused.value).startswith(f"{shown} holds a password, a query or a fragment, which may grant access")


def test_other_urls_are_taken_only_by_training() -> None:
    with pytest.raises(UserError, match=r"^memory://data is a URL, and only training reads those: copy the folder"):
        DataFolder.open("memory://data")
