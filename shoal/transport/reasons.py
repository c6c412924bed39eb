"""Why a connection to the broker could not be made, in plain words, with what to do about it.

Example: a certificate that is not valid yet is nearly always a wrong clock, since the small machines of a fleet often have none
of their own: ``why`` says so, with the time by this machine.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Final

from shoal.errors import text_of

if TYPE_CHECKING:
    from shoal.address import BrokerAddress

_EXPIRED: Final = 10
_NOT_YET_VALID: Final = 9
_UNKNOWN_CA: Final = (18, 19, 20, 21)
_OTHER_NAME: Final = (62, 64)
"""OpenSSL's codes for a certificate that is refused (X509_V_ERR_* in openssl/x509_vfy.h)."""

CLOCK_HINT: Final = "set this machine's clock (timedatectl set-ntp true)"
_STATUS_HINTS: Final = {
    " 403": "the proxy's rules do not allow this host or port; most allow port 443",
    " 404": "check the path of the broker's address",
    " 407": "give the proxy's user and password: proxy = 'http://user:password@host:port' in the configuration file",
    " 502": "the web server answers, and the broker behind it doesn't: start it",
    " 503": "the web server answers, and the broker behind it doesn't: start it",
    " 504": "the web server answers, and the broker behind it doesn't: start it",
}
"""What to do about the status by which a proxy or a web server refuses."""


def why(error: OSError, address: BrokerAddress) -> tuple[str, str]:
    """Return why there is no connection to ``address``, and a hint; the hint is empty where the words are all that is known."""
    certificate = _about_certificate(getattr(error, "verify_code", 0), address)
    if certificate:
        return certificate
    text, code = text_of(error), str(getattr(error, "reason", ""))
    if "CERTIFICATE_REQUIRED" in code:
        return "the broker asks for a client certificate", "name its files: the settings cert and key"
    if "_ALERT_" in code:
        return f"the broker refuses TLS with this client: {text}", "check the client certificate, its CA and its dates"
    if code in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_EOF_WHILE_READING"):
        return (
            f"no TLS is spoken at port {address.port}: {text}",
            "check the port and the beginning of the broker's address",
        )
    if isinstance(error, socket.gaierror):
        return f"the name {address.host} is not known: {text}", "check the broker's address, and this machine's DNS"
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens at port {address.port}: {text}", "start the broker, or check the port"
    if isinstance(error, TimeoutError):
        return f"no answer: {text}", "check the address; a firewall on the way may drop the connection"
    return text, next((hint for status, hint in _STATUS_HINTS.items() if status in text), "")


def _about_certificate(code: int, address: BrokerAddress) -> tuple[str, str] | None:
    now = f"by this machine's clock, {time.strftime('%Y-%m-%dT%H:%MZ', time.gmtime())}"
    if code == _EXPIRED:
        return (
            f"the broker's certificate has expired, {now}",
            f"issue another (shoal-fleet broker-config), or {CLOCK_HINT}",
        )
    if code == _NOT_YET_VALID:
        return f"the broker's certificate is not valid yet, {now}", CLOCK_HINT
    if code in _UNKNOWN_CA:
        return (
            "the broker's certificate is of a CA that is not known here",
            "name the file of its CA by the setting `ca`, or join again with a newer line or grant, which has it",
        )
    if code in _OTHER_NAME:
        return (
            f"the broker's certificate is not for the name {address.host}",
            "use the name in the certificate as the address, or issue one for this name",
        )
    return None
