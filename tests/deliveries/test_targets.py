"""Where nothing is delivered to: whatever way an inside address is written, and whatever a name turns out to mean."""

from __future__ import annotations

import datetime as dt

import pytest

from rehydrate import targets, webhooks
from rehydrate.targets import TargetError

from .receiver import Receiver

INSIDE = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1",  # noqa: S104
    "169.254.169.254", "169.254.170.2", "100.64.0.1", "100.100.100.200", "100.127.255.255", "192.0.0.192",
    "192.0.2.1", "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1", "239.255.255.250", "240.0.0.1",
    "255.255.255.255", "168.63.129.16", "192.88.99.1",
    "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1",
    "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:10.0.0.1", "::127.0.0.1", "::10.0.0.1",
    "64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::127.0.0.1", "2002:7f00:1::", "2002:a00:1::1",
    "2001:0:7f00:1::", "2001:0:808:808:0:0:80ff:fffe", "100::1", "not an address",
]  # fmt: skip
OPEN = ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"]


@pytest.mark.parametrize("address", INSIDE)
def test_an_inside_address_is_refused(address: str) -> None:
    with pytest.raises(TargetError, match="inside network"):
        targets.check_address(address)


@pytest.mark.parametrize("address", OPEN)
def test_an_open_one_is_not(address: str) -> None:
    targets.check_address(address)


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1/h", "https://127.0.0.1./h", "https://2130706433/h", "https://0x7f000001/h",
        "https://0x7f.0.0.1/h", "https://0x7f.1/h", "https://127.1/h", "https://127.0.1/h", "https://0177.0.0.1/h",
        "https://017700000001/h", "https://0/h", "https://3232235777/h", "https://１２７.0.0.1/h",
        "https://①②⑦.0.0.1/h", "https://127。0。0。1/h", "https://[::1]/h", "https://[::ffff:127.0.0.1]/h",
        "https://[::ffff:7f00:1]/h", "https://[0:0:0:0:0:0:0:1]/h", "https://[fe80::1%25lo]/h", "https://localhost/h",
        "https://LOCALHOST/h", "https://localhost./h", "https://x.localhost/h", "https://db/h", "https://db.internal/h",
        "https://metadata.google.internal/computeMetadata/v1/", "https://printer.local/h", "https://169.254.169.254/",
        "http://agent.example/h", "ftp://agent.example/h", "file:///etc/passwd", "gopher://x.example/", "//x.example/",
        "https://user:word@agent.example/h", "https://user@agent.example/h", "https://:@agent.example/h",
        "https://agent.example@127.0.0.1/h", "https://agent.example:22/h", "https://agent.example:25/h",
        "https://agent.example:0/h", "https://agent.example:65536/h", "https://agent.example:x/h", "https:///h",
        "https://", "", "https://agent.example/h#part", "https://agent.example/a b", "https://agent.example\\@127.0.0.1/",
        "https://agent.example/\nHost: x", "https://agent.example/" + "x" * 3000, "https://agent.example/\x00",
    ],
    ids=ascii,
)  # fmt: skip
def test_an_address_that_is_refused_as_it_is_written(url: str) -> None:
    with pytest.raises(TargetError):
        targets.parse(url, allow_private=False)


@pytest.mark.parametrize(
    "url",
    ["https://agent.example/hooks", "https://agent.example:8443/h?key=1", "https://8.8.8.8/h", "https://[2606:4700::1]/",
     "https://bücher.example/h", "https://agent.example"],
)  # fmt: skip
def test_one_on_the_open_net_is_fine(url: str) -> None:
    targets.parse(url, allow_private=False)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/h", "http://localhost/h", "https://db.internal/h", "http://[::1]/"]
)
def test_an_operator_may_allow_inside_targets(url: str) -> None:
    targets.parse(url, allow_private=True)


@pytest.mark.parametrize("url", ["https://user:word@x.example/", "ftp://x.example/", "https://2130706433/"])
def test_and_some_things_nobody_may(url: str) -> None:
    with pytest.raises(TargetError):
        targets.parse(url, allow_private=True)


# -- names


@pytest.mark.parametrize("address", INSIDE[:-1])
def test_a_name_that_leads_inside_is_refused(address: str) -> None:
    with pytest.raises(TargetError, match="inside network"):
        targets.addresses("agent.example", 443, allow_private=False, resolve=lambda host, port: [address])


def test_one_inside_address_among_many_is_enough() -> None:
    with pytest.raises(TargetError, match="inside network"):
        targets.addresses(
            "agent.example", 443, allow_private=False, resolve=lambda host, port: ["8.8.8.8", "10.0.0.1", "1.1.1.1"]
        )


def test_a_name_without_an_address() -> None:
    with pytest.raises(TargetError) as told:
        targets.addresses("agent.example", 443, allow_private=False, resolve=lambda host, port: [])
    assert told.value.code == "unresolvable"
    with pytest.raises(TargetError):
        targets.addresses("no-such-name.invalid", 443, allow_private=False)


def test_the_machines_own_resolver_reads_the_odd_forms_and_they_are_caught_behind_it() -> None:
    for host in ("2130706433", "0x7f000001", "127.1", "0177.0.0.1", "localhost"):
        with pytest.raises(TargetError, match="inside network"):
            targets.addresses(host, 443, allow_private=False)


# -- and when it is sent


def message(url: str) -> webhooks.Message:
    return webhooks.Message(
        id="m1", url=url, body=b"{}", secrets=(webhooks.new_secret(),), sent_at=dt.datetime.now(dt.UTC)
    )


def test_a_name_that_turned_inside_since_it_was_applied_gets_nothing(receiver: Receiver) -> None:
    url = f"https://agent.example:{receiver.port}/hooks"
    outcome = webhooks.send(message(url), allow_private=False, resolve=lambda host, port: ["127.0.0.1"])
    assert (outcome.error, outcome.status) == ("target_refused", None)
    assert receiver.posts == []


def test_a_name_is_asked_for_once_so_that_a_second_answer_cannot_lead_elsewhere(receiver: Receiver) -> None:
    asked: list[str] = []

    def rebinding(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["10.255.255.1"]

    outcome = webhooks.send(
        message(f"http://agent.example:{receiver.port}/hooks"), allow_private=True, resolve=rebinding
    )
    assert outcome.taken
    assert asked == ["agent.example"]
    assert receiver.posts[0].headers["host"] == f"agent.example:{receiver.port}"


def test_what_was_applied_while_inside_targets_were_allowed_gets_nothing_once_they_are_not(receiver: Receiver) -> None:
    outcome = webhooks.send(message(receiver.url), allow_private=False)
    assert outcome.error == "target_refused"
    assert receiver.posts == []
