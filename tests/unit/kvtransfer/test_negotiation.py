import pytest

from kvtransfer.links.negotiation import LINKS, LinkSide, choose_link, unusable_links

HOST = ["host", "zmq"]


@pytest.mark.parametrize(
    ("importer_links", "exporter_links", "same_host", "link", "why"),
    [
        (HOST, HOST, True, "host", "both ranks are on one machine"),
        (HOST, ["zmq", "host"], True, "host", "both ranks are on one machine"),
        (["zmq", "host"], HOST, True, "zmq", "the best link that both ranks can use"),
        (HOST, HOST, False, "zmq", "host: needs both ranks on one machine"),
        (HOST, ["zmq"], True, "zmq", "host: not enabled at the exporter"),
        (["host"], HOST, False, "", "Enable `zmq` on both sides"),
        (["host"], ["zmq"], True, "", "no link in common"),
        ([], ["zmq"], True, "", "the importer has none left"),
        (["from the future", "zmq"], ["zmq"], True, "zmq", "from the future: not enabled"),
    ],
)
def test_the_best_usable_link_is_chosen_and_explained(
    importer_links: list[str], exporter_links: list[str], same_host: bool, link: str, why: str
) -> None:
    exporter = LinkSide(exporter_links, "here" if same_host else "there", pid=2)
    choice = choose_link(LinkSide(importer_links, "here", pid=1), exporter)
    assert choice.link == link
    assert why in choice.why


def gpu_side(pid: int, host_id: str = "boot/pidns", device: str = "0000:3B:00.0", nccl_version: int = 1) -> LinkSide:
    return LinkSide(["cuda_ipc", "nccl", "zmq"], host_id, pid, device, nccl_version)


@pytest.mark.parametrize(
    ("exporter", "link", "why"),
    [
        (gpu_side(2), "cuda_ipc", "both ranks are on one machine, with CUDA IPC"),
        (gpu_side(1, device="0000:86:00.0"), "nccl", "cuda_ipc: both ranks are one process"),
        (gpu_side(1), "zmq", "nccl: both ranks use the same GPU"),
        (gpu_side(2, host_id="boot/other"), "zmq", "nccl: both ranks use the same GPU"),
        (gpu_side(2, host_id="elsewhere/pidns"), "nccl", "cuda_ipc: needs both ranks on one machine"),
        (gpu_side(2, host_id="elsewhere/pidns", nccl_version=2), "zmq", "NCCL is 1 at the importer and 2"),
        (LinkSide(["zmq"], "boot/pidns", 2, unusable={"nccl": "its KV cache is in CPU memory"}), "zmq", "(exporter)"),
        (LinkSide(list(LINKS), "boot/pidns", 2), "zmq", "one of the KV caches is in CPU memory"),
    ],
)
def test_gpu_links_are_chosen_where_cuda_and_nccl_allow_them(exporter: LinkSide, link: str, why: str) -> None:
    choice = choose_link(gpu_side(1), exporter)
    assert choice.link == link
    assert why in choice.why


def test_every_better_link_that_was_passed_over_has_its_reason() -> None:
    importer = LinkSide(["nccl", "host", "zmq"], "boot/a", 1, "gpu", 1, unusable={"cuda_ipc": "no handles"})
    why = choose_link(importer, LinkSide(["zmq"], "boot/b", 2, "gpu", unusable={"nccl": "no library"})).why
    assert why.split("; ") == [
        "the best link that both ranks can use",
        "cuda_ipc: no handles (importer)",
        "nccl: no library (exporter)",
        "host: not enabled at the exporter",
    ]


def test_a_cache_in_cpu_memory_never_offers_a_gpu_link_nor_one_on_a_gpu_the_link_host() -> None:
    assert set(unusable_links(LINKS, "cpu")) == {"cuda_ipc", "nccl"}
    assert set(unusable_links(LINKS, "0000:3B:00.0")) == {"host"}
