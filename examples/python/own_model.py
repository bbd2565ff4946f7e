"""A model of your own: any module that gives a logit for each class."""

from torch import nn

import shoal

net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))
result = shoal.run("scaffold", model=net, rounds=5)
print(result)
print(result.module())  # the trained model, an ordinary module; `net` itself is as it was
