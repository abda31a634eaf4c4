import pytest

from kvtransfer.links.negotiation import choose_link


@pytest.mark.parametrize(
    ("importer_links", "exporter_links", "same_host", "link", "why"),
    [
        (["host", "zmq"], ["host", "zmq"], True, "host", "both ranks are on one machine"),
        (["host", "zmq"], ["zmq", "host"], True, "host", "both ranks are on one machine"),
        (["zmq", "host"], ["host", "zmq"], True, "zmq", "the best link that both ranks can use"),
        (["host", "zmq"], ["host", "zmq"], False, "zmq", "host needs both ranks on one machine"),
        (["host", "zmq"], ["zmq"], True, "zmq", "host is not enabled at the exporter"),
        (["host"], ["host", "zmq"], False, "", "Enable `zmq` on both sides"),
        (["host"], ["zmq"], True, "", "no link in common"),
        ([], ["zmq"], True, "", "the importer has none left"),
        (["from the future", "zmq"], ["zmq"], True, "zmq", "from the future is not enabled"),
    ],
)
def test_the_best_usable_link_is_chosen_and_explained(
    importer_links: list[str], exporter_links: list[str], same_host: bool, link: str, why: str
) -> None:
    choice = choose_link(importer_links, exporter_links, "here", "here" if same_host else "there")
    assert choice.link == link
    assert why in choice.why
