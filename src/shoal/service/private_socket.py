"""A folder that only its owner can enter, with the Unix socket by which Flower's processes on one machine connect."""

import atexit
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from secrets import token_bytes

from shoal.storage.files import explain_disk_errors


@dataclass(frozen=True)
class PrivateFolder:
    """A folder with the socket of a SuperLink or SuperNode, and the secret of the SuperExec that works for it.

    To connect to a socket, a process must be able to enter its folder. The path of a socket must be short (about 100
    bytes), so the folder is a temporary one and not inside that of the run.
    """

    path: Path

    @classmethod
    def create(cls) -> "PrivateFolder":
        """A new folder with a new secret; it is removed when this process ends."""
        with explain_disk_errors(Path(tempfile.gettempdir())):
            folder = cls(Path(tempfile.mkdtemp(prefix="shoal-")))  # with mode 0700
            atexit.register(shutil.rmtree, folder.path, ignore_errors=True)
            descriptor = os.open(folder.secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(token_bytes(32))
        return folder

    @property
    def socket(self) -> Path:
        return self.path / "flower.sock"

    @property
    def secret(self) -> Path:
        return self.path / "superexec.secret"
