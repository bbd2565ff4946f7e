"""One thread per test process, so that two of them share two cores without getting in each other's way."""

import os

import torch

os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
