"""Where deliveries may go: addresses on the open net only, unless the operator allows others (quality.md, "Security").

The name is looked up once for each connection, every address it has is checked, and it is one of those that is
connected to: nobody can answer the check with one address and the connection with another. No HTTP and no database.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable
from typing import Final

import httpx

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
#: (host, port) to the addresses that the name has, as text. Raises OSError.
Resolve = Callable[[str, int], list[str]]

MAX_URL: Final = 2000
_NUMBER: Final = re.compile(r"(0x[0-9a-f]*|[0-9]+)", re.IGNORECASE)
#: Names that never leave a machine or a house (RFC 6761, RFC 6762, RFC 8375) or lead to a cloud's metadata.
_INSIDE: Final = ("localhost", "local", "internal", "localdomain", "lan", "home.arpa")
#: What `ipaddress` takes for global and is not for us: 6to4's relay, benchmarks, and an Azure host's own services.
_MORE: Final = [
    ipaddress.ip_network(net) for net in ("192.88.99.0/24", "192.0.0.0/24", "198.18.0.0/15", "168.63.129.16/32")
]
#: IPv6 that carries an IPv4 address: to reach the one is to reach the other (NAT64, RFC 6052).
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


class TargetError(ValueError):
    """Nothing is sent there; the message is a sentence without the URL. `code` is stable."""

    def __init__(self, message: str, code: str = "target_refused") -> None:
        super().__init__(message)
        self.code = code


def parse(url: str, *, allow_private: bool) -> httpx.URL:
    """The URL as it will be called, or a TargetError that says what is wrong with it. Looks nothing up."""
    if len(url) > MAX_URL:
        raise TargetError(f"an address has at most {MAX_URL} characters")
    if not url.isprintable() or " " in url or "\\" in url:
        raise TargetError("an address has no spaces, backslashes or control characters")
    try:
        parsed = httpx.URL(url)
        port = parsed.port
    except (httpx.InvalidURL, ValueError):
        raise TargetError("this is no http address") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise TargetError("this is no http address")
    if parsed.scheme == "http" and not allow_private:
        raise TargetError("only https:// is delivered to, unless the operator allows private targets")
    if parsed.userinfo or "@" in parsed.netloc.decode():
        raise TargetError("an address carries no name and password: what it gets is signed instead")
    if parsed.fragment:
        raise TargetError("an address to deliver to has no #fragment")
    if port is not None and (not 0 < port < 65536 or (port < 1024 and port not in (80, 443) and not allow_private)):
        raise TargetError(f"nothing is delivered to port {port}")
    _check_host(parsed.raw_host.decode("ascii").lower().rstrip("."), allow_private=allow_private)
    return parsed


def _check_host(host: str, *, allow_private: bool) -> None:
    literal = _literal(host)
    if literal is None and _NUMBER.fullmatch(host.rpartition(".")[2]):
        # 2130706433, 0x7f.1, 127.1 and 0177.0.0.1 are addresses to some programs and names to others.
        raise TargetError("write an IP address as four decimal numbers")
    if allow_private:
        return
    if literal is not None:
        check_address(host)
    elif "." not in host or host.endswith(tuple(f".{name}" for name in _INSIDE)):
        raise TargetError("this name leads to a machine on an inside network, which the operator would have to allow")


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def check_address(text: str) -> None:
    """Raises a TargetError unless the address is one on the open net."""
    address = _literal(text)
    if address is None or not all(_open(each) for each in _meant(address)):
        raise TargetError("it leads to an address on an inside network, which the operator would have to allow")


def _meant(address: Address) -> list[Address]:
    """The address, and the IPv4 address that it carries."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    carried: list[Address] = [address.ipv4_mapped] if address.ipv4_mapped else [address]
    if address.sixtofour is not None:
        carried.append(address.sixtofour)
    if address.teredo is not None:
        carried += address.teredo
    if address in _NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    if int(address) >> 32 == 0:  # ::1.2.3.4, long out of use
        carried.append(ipaddress.IPv4Address(int(address)))
    return carried


def _open(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and address.is_site_local:
        return False
    shut = address.is_multicast or address.is_reserved or address.is_unspecified or address.is_loopback
    return address.is_global and not shut and not any(address in net for net in _MORE if net.version == address.version)


def look_up(host: str, port: int) -> list[str]:
    """The addresses of a name, by the machine's resolver."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


def addresses(host: str, port: int, *, allow_private: bool, resolve: Resolve = look_up) -> list[str]:
    """Where to connect to, every one of them checked. Raises TargetError: `unresolvable`, or one may not be reached."""
    try:
        found = resolve(host, port)
    except (OSError, UnicodeError):
        found = []
    if not found:
        raise TargetError("its name has no address", "unresolvable")
    if not allow_private:
        for address in found:
            check_address(address)
    return found
