"""A data set of Hugging Face that is made on the spot, with names of classes and a column of owners.

    python examples/hugging_face_data.py

`shoal run --data hf:FOLDER --label species --owner station` reads what `save_to_disk` wrote. It needs
pip install 'shoal[hf-data]'.
"""

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict

import shoal

SPECIES = ["finch", "robin", "wren"]


def make_birds(count: int, seed: int) -> Dataset:
    """Wing, weight and pitch of a bird that one of five stations has caught; each species has its means."""
    draw = np.random.default_rng(seed)
    species = draw.integers(3, size=count)
    means = np.array([[85.0, 24.0, 4.0], [72.0, 18.0, 3.0], [48.0, 9.0, 6.0]])
    measured = means[species] + draw.normal(size=(count, 3)) * [6.0, 2.0, 0.8]
    columns = {name: measured[:, number] for number, name in enumerate(("wing", "weight", "pitch"))}
    stations = [f"station{number}" for number in draw.integers(5, size=count)]
    birds = Dataset.from_dict(columns | {"station": stations, "species": species})
    return birds.cast_column("species", ClassLabel(names=SPECIES))


if __name__ == "__main__":
    result = shoal.run(
        "fedavg",
        data=DatasetDict(train=make_birds(300, 0), test=make_birds(100, 1)),
        label="species",
        owner="station",
        normalise=True,
        sample=3,
        rounds=15,
        lr=0.05,
        metrics=("per_class",),
    )
    print(f"accuracy {result.headline:.2f} on {len(SPECIES)} species of 5 stations")
