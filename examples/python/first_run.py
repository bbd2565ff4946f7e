"""Train one model on 20 devices whose labels are uneven, and look at the result."""

import shoal

result = shoal.run("fedavg", data="digits", split="dirichlet:0.3", devices=20, sample=5, rounds=10)
print(result)
print(result.history.to_dict()["accuracy"])
