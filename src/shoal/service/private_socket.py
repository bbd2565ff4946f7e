"""Where Flower's processes on one machine meet: a socket in a folder that only its owner can enter."""

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

    Whoever wants to connect to a socket must be able to enter its folder. Its path must be short (about 100 bytes),
    so it is not beside the run, which may be deep down.
    """

    path: Path

    @classmethod
    def create(cls) -> "PrivateFolder":
        """A new one, which is removed when this process ends."""
        with explain_disk_errors(Path(tempfile.gettempdir())):
            made = cls(Path(tempfile.mkdtemp(prefix="shoal-")))  # with mode 0700
            atexit.register(shutil.rmtree, made.path, ignore_errors=True)
            descriptor = os.open(made.secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(token_bytes(32))
        return made

    @property
    def socket(self) -> Path:
        return self.path / "flower.sock"

    @property
    def secret(self) -> Path:
        return self.path / "superexec.secret"
