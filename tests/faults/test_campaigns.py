"""One case of each campaign, as `make faults` does hundreds: nothing it must hold fails."""

from collections.abc import Iterator

import pytest

from dist_transformer.data.folder.reader import DataFolder
from tests.faults.__main__ import CAMPAIGNS
from tests.faults.campaign import Campaign, Case, Lab, UnavailableError

KINDS = {
    "kills": "zero1",
    "slow_saves": "zero2",
    "damage": "started by two ranks",
    "disks": "full",
    "not_finite": "zero3 bf16",
    "lost_ranks": "raises",
    "ranks_apart": "other code",
    "elastic": "precision",
    "hostile": "names and pickles",
    "power_loss": "run",
    "power_loss_disks": "ext4",
    "histories": "file",
    "formats": "state.json",
    "tools": "translate",
    "translation_parts": "parts",
}


@pytest.fixture(scope="module")
def lab(toy_data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("faults"), toy_data)
    yield lab
    lab.clear()


@pytest.mark.slice(name="campaigns")
@pytest.mark.parametrize("campaign", CAMPAIGNS, ids=lambda campaign: campaign.name)
def test_a_case(campaign: Campaign, lab: Lab) -> None:
    lab.clear()
    try:
        found = campaign.run(Case(campaign=campaign.name, kind=KINDS[campaign.name], number=0), lab)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    assert found.problems == ()
    assert found.faults >= 1
