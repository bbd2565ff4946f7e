"""Where torch.compile keeps what it compiled: in the user's cache folder, where the next process finds it again.

Torch's own place for it is the system's folder for temporary files, which is emptied when a machine starts.
"""

import os

from shoal.storage.cache_folder import find_cache_folder


def keep_compiled_code() -> None:
    """Name the folder to torch, unless TORCHINDUCTOR_CACHE_DIR does already."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(find_cache_folder() / "compiled"))
