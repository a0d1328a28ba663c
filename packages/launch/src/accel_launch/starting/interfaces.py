"""Through which network interface of this machine another one is reached."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def variables_towards(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variable for gloo's interface with `address`, or towards it; empty if set, or if the system knows none.

    gloo takes the interface of this host's name, which is often the loopback. Sends nothing.
    """
    own = None if environ.get(GLOO_INTERFACE) else address_towards(address)
    name = None if own is None else _interfaces().get(own)
    return {} if name is None else {GLOO_INTERFACE: name}


def address_towards(address: str) -> str | None:
    """This machine's address on the way to `address`; None if there is no way. Sends nothing."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # of a datagram socket: chooses the route, and no more
            return _plain(probe.getsockname()[0])
    return None


def addresses_of(interface: str) -> list[str]:
    """The addresses of an interface, IPv4 first; none if there is no such interface."""
    found = [address for address, name in _interfaces().items() if name == interface]
    return sorted(found, key=lambda address: (":" in address, address))


def own_addresses() -> list[str]:
    """The addresses of this machine that others may reach, if the system tells; loopbacks last."""
    found = [address for address in _interfaces() if not ipaddress.ip_address(address).is_link_local]
    return sorted(found, key=lambda address: (ipaddress.ip_address(address).is_loopback, address))


def _interfaces() -> dict[str, str]:
    """The interface of each address of this machine. Empty where the system is not Linux."""
    found = _ipv6()
    try:
        import fcntl
    except ImportError:
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
                found[socket.inet_ntoa(answer[20:24])] = name
    return found


def _ipv6() -> dict[str, str]:
    if not _IPV6_ADDRESSES.exists():
        return {}
    rows = [line.split() for line in _IPV6_ADDRESSES.read_text().splitlines()]
    return {str(ipaddress.IPv6Address(bytes.fromhex(row[0]))): row[-1] for row in rows}


def _plain(address: str) -> str:
    """Without the zone of a link-local address."""
    return str(ipaddress.ip_address(address.partition("%")[0]))
