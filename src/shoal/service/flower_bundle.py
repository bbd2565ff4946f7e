"""The Flower app bundle (FAB) of shoal: the same bytes on every machine, so that a device can check it by its hash."""

import io
import zipfile
from hashlib import sha256
from pathlib import Path

from shoal.core.errors import ShoalError

SHIM = Path(__file__).with_name("shim")
EARLIEST_ZIP_DATE = (1980, 1, 1, 0, 0, 0)
"""The earliest date that a zip file can hold: the time of building must not change the bytes."""
ZIP_SYSTEM_UNIX = 3
"""The zip format's number for Unix, whatever system builds the file."""


def build_app_bundle() -> bytes:
    """The app in Flower's form: a zip file with a list of its contents, the same bytes wherever it is built.

    It is not compressed, as Flower's own builder would: other versions of zlib give other bytes.
    """
    files = [SHIM / "pyproject.toml", *sorted(SHIM.glob("shoal_shim/*.py"))]
    contents = {path.relative_to(SHIM).as_posix(): path.read_bytes() for path in files}
    content_list = [f"{name},{sha256(content).hexdigest()},{len(content) * 8}" for name, content in contents.items()]
    contents[".info/CONTENT"] = "\n".join(content_list).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in contents.items():
            entry = zipfile.ZipInfo(name, EARLIEST_ZIP_DATE)
            entry.create_system = ZIP_SYSTEM_UNIX
            archive.writestr(entry, content)
    return buffer.getvalue()


def check_app_bundle(content: bytes) -> None:
    """Refuse every app whose bytes are not those of the installed one."""
    if sha256(content).digest() != sha256(build_app_bundle()).digest():
        problem = f"An app with the hash {sha256(content).hexdigest()[:16]} was sent, and it is not shoal's own."
        raise ShoalError(
            "damaged", problem, "It was not run. Install one version of shoal on the server and all devices."
        )
