"""FedJAX: its own federated averaging; XLA spreads the work over the cores as it sees fit.

python benchmarks/peers/by_fedjax.py JOB ROUNDS
"""
# pyright: reportMissingImports=false

from importlib.metadata import version
from time import perf_counter

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms.fed_avg import federated_averaging
from jobs import CLASSES, JOBS, Job, asked, load, report

jax.tree_map = jax.tree_util.tree_map  # FedJAX calls it by its former name


def pooled(x: jax.Array) -> jax.Array:
    """Max-pooling 2 x 2; on the CPU a maximum over a reshaped array is faster than a window."""
    count, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    return x.reshape(count, height // 2, 2, width // 2, 2, channels).max((2, 4))


def dense(*widths: int):
    return [hk.Flatten(), hk.nets.MLP([*widths, CLASSES])]


def conv(channels: int, size: int):
    return [hk.Conv2D(channels, size, padding="VALID"), jax.nn.relu]


def layers(name: str) -> list:
    if name == "lenet":
        return [*conv(6, 5), pooled, *conv(16, 5), pooled, *dense(120, 84)]
    if name == "cnn":
        return [*conv(32, 3), pooled, *conv(64, 3), pooled, *conv(64, 3), *dense(64)]
    return dense(128)


def model_of(job: Job, sample: dict[str, np.ndarray]):
    """The network as FedJAX wants it."""
    forward = hk.transform(lambda batch: hk.Sequential(layers(job.model))(batch["x"]))

    def losses(batch: dict, scores: jax.Array) -> jax.Array:
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), batch["y"][:, None], 1)[:, 0]

    return fedjax.create_model_from_haiku(forward, sample, losses)


def data_of(job: Job) -> list:
    """One data set per device; images with their channels last, as XLA likes them."""
    x, y = load(job)
    x = np.ascontiguousarray(np.moveaxis(x, 2, -1)) if len(job.shape) == 3 else np.array(x)
    return [fedjax.ClientDataset({"x": x[i], "y": y[i].astype(np.int32)}) for i in range(job.devices)]


def train(job: Job, rounds: int) -> list[float]:
    """The seconds of every round."""
    devices = data_of(job)
    model = model_of(job, devices[0][: job.batch].all_examples())
    batches = fedjax.ShuffleRepeatBatchHParams(batch_size=job.batch, num_epochs=job.epochs, drop_remainder=False)
    local, server = fedjax.optimizers.sgd(job.lr), fedjax.optimizers.sgd(1.0)
    algorithm = federated_averaging(fedjax.model_grad(model), local, server, batches)
    state, generator = algorithm.init(model.init(jax.random.PRNGKey(0))), np.random.default_rng(0)
    seconds = []
    for number in range(rounds):
        began = perf_counter()
        chosen = generator.choice(job.devices, job.per_round, replace=False).tolist()
        keys = jax.random.split(jax.random.PRNGKey(number), len(chosen))
        state, _ = algorithm.apply(state, [(i, devices[i], key) for i, key in zip(chosen, keys)])
        jax.block_until_ready(state.params)
        seconds.append(perf_counter() - began)
    return seconds


def main() -> None:
    given = asked()
    seconds = train(JOBS[given.job], given.rounds + 1)
    report(seconds, version=f"fedjax {version('fedjax')}, jax {jax.__version__}")


if __name__ == "__main__":
    main()
