"""One thread per test process, so that two of them share two cores without getting in each other's way.

Property tests have no deadline, since cores may be shared. On CI they draw the same examples every time, so that what
is submitted is not refused for a fault of long ago; elsewhere they look for new ones.
"""

import os
import signal

import torch
from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
settings.register_profile("shoal", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("shoal")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
