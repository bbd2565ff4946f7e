"""The trained model as a file, and as a module to go on with."""

import torch

import shoal

result = shoal.run("fedavg", rounds=5, out="runs/exported")
print(shoal.export(result, "digits.safetensors"))
print(result.module()(torch.zeros(1, 1, 8, 8)).shape)
