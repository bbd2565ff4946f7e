"""The Flower app that every run is submitted as: the same bytes on every machine, so that a device can check it."""

import io
import zipfile
from hashlib import sha256
from pathlib import Path

from shoal.core.errors import ShoalError

SHIM = Path(__file__).with_name("shim")
EARLIEST_ZIP_DATE = (1980, 1, 1, 0, 0, 0)
"""The earliest date that a zip file can hold: when this one was built must not show."""
ZIP_SYSTEM_UNIX = 3
"""What a zip file calls the system that it was made on."""


def build_app_bundle() -> bytes:
    """The app in Flower's form, a zip file with a list of its contents; nothing in it depends on who builds it.

    Flower's own builder compresses, and other versions of zlib give other bytes.
    """
    files = [SHIM / "pyproject.toml", *sorted(SHIM.glob("shoal_shim/*.py"))]
    contents = {path.relative_to(SHIM).as_posix(): path.read_bytes() for path in files}
    lines = [f"{name},{sha256(content).hexdigest()},{len(content) * 8}" for name, content in contents.items()]
    contents[".info/CONTENT"] = "\n".join(lines).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as bundle:
        for name, content in contents.items():
            entry = zipfile.ZipInfo(name, EARLIEST_ZIP_DATE)
            entry.create_system = ZIP_SYSTEM_UNIX
            bundle.writestr(entry, content)
    return buffer.getvalue()


def check_app_bundle(content: bytes) -> None:
    """Refuse every app but the one that is installed here."""
    if sha256(content).digest() != sha256(build_app_bundle()).digest():
        problem = f"An app with the hash {sha256(content).hexdigest()[:16]} was sent, and it is not shoal's own."
        raise ShoalError(
            "damaged", problem, "It was not run. Install one version of shoal on the server and all devices."
        )
