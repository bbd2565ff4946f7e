"""Keys of a federation: a certificate authority, the server's certificate, and a key pair for every device."""

import os
import re
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from shoal.core.errors import ShoalError
from shoal.storage.files import explain_disk_errors

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    INSTALLED = False
else:
    INSTALLED = True

AUTHORITY, CERTIFICATE, SERVER_KEY = "ca.crt", "server.pem", "server.key"
YEARS = 2
MOST_DAYS = 100 * 365
"""How long certificates are good at most."""
HOST_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST_NAME = re.compile(rf"(?:\*\.)?{HOST_LABEL}(?:\.{HOST_LABEL})*\.?")
"""Labels of letters, digits and dashes with dots between them; a star before them stands for all names below."""


def make_keys(folder: Path, host: str, devices: int, days: int = 365 * YEARS) -> list[Path]:
    """Write the keys of a server and its devices; the new files. Existing ones are kept, so devices can be added.

    The authority's private key is never written: nobody can make another certificate that the devices would accept.
    """
    if not INSTALLED:
        problem = "Keys are made with the package cryptography, which is not installed."
        raise ShoalError("missing-extra", problem, 'Install it: pip install "shoal[flower]".')
    if not 0 < devices <= 10**5:
        raise ShoalError("bad-value", f"{devices} devices were asked for.", "Give a number from 1 to 100000.")
    if abs(days) > MOST_DAYS:
        raise ShoalError("bad-value", f"Certificates cannot be good for {days} days.", f"Give at most {MOST_DAYS}.")
    for name in split_hosts(host):
        refuse_host(name)
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        written = [] if (folder / CERTIFICATE).exists() else make_certificates(folder, host, days)
        for number in range(devices):
            if not (folder / device_key_name(number)).exists():
                written += make_device_keys(folder, number)
    return written


def device_key_name(number: int) -> str:
    return f"device-{number}.key"


def make_device_keys(folder: Path, number: int) -> list[Path]:
    """Write a device's private key, and the public key that the server needs."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path = folder / device_key_name(number)
    return [write_private_file(path.with_suffix(".pub"), public), write_private_file(path, private)]


def make_certificates(folder: Path, host: str, days: int) -> list[Path]:
    """Write the authority's certificate, and the server's key and certificate for its host names."""
    authority = ec.generate_private_key(ec.SECP384R1())
    server = ec.generate_private_key(ec.SECP384R1())
    issuer = build_x509_name("shoal authority")
    signing_usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    ca = (
        build_certificate(issuer, issuer, authority, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signing_usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    hosts = list(dict.fromkeys([*split_hosts(host), "localhost", "127.0.0.1"]))
    certificate = (
        build_certificate(build_x509_name(hosts[0]), issuer, server, days)
        .add_extension(x509.SubjectAlternativeName([build_general_name(name) for name in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    pem = serialization.Encoding.PEM
    private = server.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return [
        write_private_file(folder / AUTHORITY, ca.public_bytes(pem)),
        write_private_file(folder / SERVER_KEY, private),
        write_private_file(folder / CERTIFICATE, certificate.public_bytes(pem)),
    ]


def build_certificate(subject, issuer, key, days: int):
    """An unsigned certificate for this key, valid for so many days; with a negative number it has expired."""
    now = datetime.now(UTC)
    begin = now - timedelta(minutes=5) if days > 0 else now + timedelta(days=days - 1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(now + timedelta(days=days))
    )


def build_x509_name(name: str):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def split_hosts(text: str) -> list[str]:
    """The names and addresses in a text with commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]


def refuse_host(name: str) -> None:
    """Refuse what is neither an address nor a name that a certificate can hold."""
    try:
        ip_address(name)
    except ValueError:
        if not HOST_NAME.fullmatch(name) or len(name) > 253:
            problem = f"{name[:80]!r} is neither the name of a host nor an address."
            advice = "Write names as in fl.example.org, with letters of ASCII, and commas between several."
            raise ShoalError("bad-value", problem, advice) from None


def build_general_name(host: str):
    """A host in the form of certificates: an IP address or a DNS name."""
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def write_private_file(path: Path, content: bytes) -> Path:
    """Write a new file that only its owner can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    return path
