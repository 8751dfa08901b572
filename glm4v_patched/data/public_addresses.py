"""IP addresses of the public internet, by IANA's registries of special addresses.

``ipaddress.is_global`` is not used, because its results differ between Python 3.11.7, 3.12 and
3.13. The registries are https://www.iana.org/assignments/iana-ipv4-special-registry and
iana-ipv6-special-registry. These tables were written without access to them and have not been
compared with them line by line. Special ranges that can be reached (anycast of AS112, AMT, TURN,
PCP) count as not public, because they serve no images.
"""

import ipaddress

IPv4, IPv6 = ipaddress.IPv4Network, ipaddress.IPv6Network

NOT_PUBLIC_V4 = [
    IPv4("0.0.0.0/8"),  # this host
    IPv4("10.0.0.0/8"),  # private
    IPv4("100.64.0.0/10"),  # shared by a carrier's customers
    IPv4("127.0.0.0/8"),  # loopback
    IPv4("169.254.0.0/16"),  # link-local, metadata of most clouds
    IPv4("172.16.0.0/12"),  # private
    IPv4("192.0.0.0/24"),  # protocol assignments, metadata of Oracle's cloud
    IPv4("192.0.2.0/24"),  # documentation
    IPv4("192.31.196.0/24"),  # AS112
    IPv4("192.52.193.0/24"),  # AMT
    IPv4("192.88.99.0/24"),  # relays of 6to4
    IPv4("192.168.0.0/16"),  # private
    IPv4("192.175.48.0/24"),  # AS112
    IPv4("198.18.0.0/15"),  # benchmarks
    IPv4("198.51.100.0/24"),  # documentation
    IPv4("203.0.113.0/24"),  # documentation
    IPv4("224.0.0.0/4"),  # multicast
    IPv4("240.0.0.0/4"),  # reserved, broadcast
    # Not in the registries: cloud services at addresses that are public elsewhere.
    IPv4("168.63.129.16/32"),  # Azure's host
    IPv4("161.26.0.0/16"),  # IBM Cloud's services
    IPv4("166.8.0.0/14"),  # IBM Cloud's services
]
# IPv6 addresses outside of it are loopback, private, link-local, multicast, NAT64 or unassigned.
PUBLIC_V6 = IPv6("2000::/3")
NOT_PUBLIC_V6 = [
    IPv6("2001::/23"),  # protocol assignments: Teredo, ORCHID, benchmarks
    IPv6("2001:db8::/32"),  # documentation
    IPv6("2002::/16"),  # 6to4, which contains an IPv4 address
    IPv6("2620:4f:8000::/48"),  # AS112
    IPv6("3fff::/20"),  # documentation
]


def is_public(address: str) -> bool:
    """Return whether an IP address, with or without a zone, belongs to the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            return ip in PUBLIC_V6 and not any(ip in network for network in NOT_PUBLIC_V6)
        ip = ip.ipv4_mapped
    return not any(ip in network for network in NOT_PUBLIC_V4)
