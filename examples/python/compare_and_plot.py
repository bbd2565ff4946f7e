"""Three methods on the same data, devices and seeds: a table, and a curve over what was sent."""

import shoal
from shoal.parts import FedProx

comparison = shoal.compare(["fedavg", FedProx(0.1), "scaffold"], seeds=2, rounds=8, split="dirichlet:0.3")
print(comparison)
axes = comparison.plot(x="bytes")
axes.figure.savefig("comparison.png")
print(comparison.to_pandas()[["method", "accuracy", "bytes"]])
