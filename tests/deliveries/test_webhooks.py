"""One attempt against receivers of every kind: what is sent, what counts as taken, and that nothing lasts for ever."""

from __future__ import annotations

import datetime as dt
import gzip
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from standardwebhooks import Webhook, WebhookVerificationError

from rehydrate import webhooks
from rehydrate.webhooks import Message, Outcome

from .receiver import Handler, Receiver, free_url, says

SECRET = webhooks.new_secret()
BODY = b'{"type":"run.ready"}'


def message(url: str, *secrets: str) -> Message:
    return Message(id="0190-m1", url=url, body=BODY, secrets=secrets or (SECRET,), sent_at=dt.datetime.now(dt.UTC))


def send(url: str, *secrets: str, total: float = 15.0) -> Outcome:
    return webhooks.send(message(url, *secrets), allow_private=True, total=total)


def test_what_is_sent_verifies_with_the_library(receiver: Receiver) -> None:
    outcome = send(receiver.url)
    assert (outcome.taken, outcome.status, outcome.error) == (True, 204, None)
    post = receiver.posts[0]
    assert post.verify(SECRET) == {"type": "run.ready"}
    assert post.id == "0190-m1"
    assert post.headers["content-type"] == "application/json"
    with pytest.raises(WebhookVerificationError):
        Webhook(webhooks.new_secret()).verify(post.raw, post.headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(post.raw + b" ", post.headers)


def test_the_seconds_are_those_of_the_world_whatever_zone_this_machine_is_in(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    east = dt.datetime.now(dt.UTC).astimezone(dt.timezone(dt.timedelta(hours=8)))
    odd = Message(id="m", url=receiver.url, body=BODY, secrets=(SECRET,), sent_at=east)
    webhooks.send(odd, allow_private=True)
    receiver.posts[0].verify(SECRET)


def test_two_secrets_sign_side_by_side(receiver: Receiver) -> None:
    old = webhooks.new_secret()
    send(receiver.url, SECRET, old)
    post = receiver.posts[0]
    assert len(post.headers["webhook-signature"].split(" ")) == 2
    post.verify(SECRET)
    post.verify(old)


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_any_2xx_is_a_yes(receiver: Receiver, status: int) -> None:
    receiver.answer = says(status)
    assert send(receiver.url).taken


@pytest.mark.parametrize("status", [300, 304, 400, 401, 404, 410, 429, 500, 503])
def test_anything_else_is_none(receiver: Receiver, status: int) -> None:
    receiver.answer = says(status, b"no" if status != 304 else b"")
    outcome = send(receiver.url)
    assert (outcome.taken, outcome.status, outcome.error) == (False, status, f"http_{status}")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(receiver: Receiver, status: int) -> None:
    with Receiver() as elsewhere:
        receiver.answer = says(status, location=elsewhere.url)
        assert send(receiver.url).error == f"http_{status}"
        assert elsewhere.posts == []


def test_nobody_there() -> None:
    outcome = send(free_url())
    assert (outcome.error, outcome.status) == ("connect_failed", None)


def test_one_that_never_answers_is_left_at_the_deadline(receiver: Receiver) -> None:
    let_go = threading.Event()
    receiver.answer = lambda handler: let_go.wait(60)
    outcome = send(receiver.url, total=0.5)
    let_go.set()
    assert outcome.error == "timeout"
    assert outcome.seconds < 5


@pytest.mark.parametrize("what", ["headers", "body"])
def test_one_that_drips_is_left_at_the_deadline(receiver: Receiver, what: str) -> None:
    """Every byte comes in time, and all of them never would."""
    let_go = threading.Event()

    def drip(handler: Handler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + (b"content-length: 9999\r\n\r\n" if what == "body" else b"x-a: "))
        while not let_go.wait(0.05):
            handler.wfile.write(b"a")
            handler.wfile.flush()

    receiver.answer = drip
    outcome = send(receiver.url, total=1.0)
    let_go.set()
    assert outcome.seconds < 5
    # Its status said that it took the message: the body is for people to read.
    assert (outcome.error, outcome.taken) == (("timeout", False) if what == "headers" else (None, True))


def test_a_huge_answer_is_cut(receiver: Receiver) -> None:
    sent: list[int] = []

    def endless(handler: Handler) -> None:
        handler.send_response(500)
        handler.end_headers()
        for _ in range(10_000):
            sent.append(handler.wfile.write(b"x" * 65536))

    receiver.answer = endless
    outcome = send(receiver.url)
    assert outcome.status == 500
    assert outcome.answer is not None
    assert len(outcome.answer) <= webhooks.KEPT_CHARACTERS
    assert sum(sent) < 100_000_000  # it hung up


def test_a_bomb_is_not_unpacked(receiver: Receiver) -> None:
    receiver.answer = says(500, gzip.compress(b"0" * 50_000_000), content_encoding="gzip")
    outcome = send(receiver.url)
    assert outcome.answer == "(gzip: not unpacked)"


def test_no_http_at_all(receiver: Receiver) -> None:
    receiver.answer = lambda handler: handler.wfile.write(b"SSH-2.0-OpenSSH_9\r\n\r\n")
    assert send(receiver.url).error == "broken_answer"


def test_headers_without_end(receiver: Receiver) -> None:
    def many(handler: Handler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: %s\r\n" % (n, b"y" * 1000) for n in range(2000)))

    receiver.answer = many
    assert send(receiver.url).error in ("broken_answer", "timeout")


def test_what_an_answer_says_is_kept_without_secrets_and_without_what_breaks_a_database_or_a_page(
    receiver: Receiver,
) -> None:
    echo = f"got \x00 {SECRET} and {SECRET.removeprefix('whsec_')} and Bearer abc.def \u202e\ud7ff \xff ok".encode()
    receiver.answer = says(400, echo + b"\xff\xfe")
    answer = send(receiver.url).answer
    assert answer is not None
    assert "\x00" not in answer
    assert "\u202e" not in answer
    assert SECRET.removeprefix("whsec_") not in answer
    assert "abc.def" not in answer
    assert "ok" in answer


def test_a_path_and_query_arrive_as_they_are(receiver: Receiver) -> None:
    send(f"http://127.0.0.1:{receiver.port}/a/b%20c?x=1&y=%2F")
    assert receiver.posts[0].path == "/a/b%20c?x=1&y=%2F"


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Of agent.example, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "agent.example")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("agent.example")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    (tmp_path / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    (tmp_path / "cert.pem").write_bytes(made.public_bytes(pem))
    return tmp_path / "key.pem", tmp_path / "cert.pem"


def test_tls_is_held_to_the_name_though_it_is_the_address_that_is_connected_to(
    receiver: Receiver, certificate: tuple[Path, Path]
) -> None:
    key, cert = certificate
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(cert, key)
    receiver.server.socket = served.wrap_socket(receiver.server.socket, server_side=True)
    trusted = ssl.create_default_context(cafile=str(cert))

    def to(host: str, tls: ssl.SSLContext | None) -> Outcome:
        url = f"https://{host}:{receiver.port}/hooks"
        return webhooks.send(message(url), allow_private=True, resolve=lambda name, port: ["127.0.0.1"], tls=tls)

    assert to("agent.example", trusted).taken
    assert to("other.example", trusted).error == "tls_failed"
    assert to("agent.example", None).error == "tls_failed"  # nobody vouches for it
    assert len(receiver.posts) == 1
