"""A function that is called after every round; here it stops the run when that is good enough."""

import shoal


def watch(recipe, row, history):
    print(f"round {row['round'] + 1}: {row['accuracy']:.3f}")
    if row["accuracy"] > 0.7:
        raise KeyboardInterrupt


try:
    shoal.run("fedavg", rounds=50, out="runs/watched", watch=watch)
except shoal.ShoalError as stopped:
    print(stopped.problem)
