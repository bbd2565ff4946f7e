"""A pandas frame whose rows belong to shops: one device for each, a number to predict, rates by parameter names.

    python examples/frame_with_owner.py

`shoal run --data sales.csv --label sold --owner shop --normalise` is the same on the command line. Frames need
pip install 'shoal[frames]'.
"""

import numpy as np
import pandas as pd

import shoal


def make_sales(shops: int = 8, days: int = 60) -> pd.DataFrame:
    """Sales of a day by weekday, temperature and price, with a level of each shop; some temperatures are missing."""
    draw = np.random.default_rng(0)
    count = shops * days
    frame = pd.DataFrame(
        {
            "shop": np.repeat([f"shop{i}" for i in range(shops)], days),
            "weekday": draw.choice(["working day", "saturday", "sunday"], count, p=[5 / 7, 1 / 7, 1 / 7]),
            "temperature": draw.normal(15, 8, count),
            "price": draw.uniform(1, 3, count),
        }
    )
    level = frame["weekday"].map({"working day": 0.0, "saturday": 1.5, "sunday": -1.0})
    shop = np.repeat(draw.normal(0, 0.3, shops), days)
    frame["sold"] = 5 + level + 0.05 * frame["temperature"] - frame["price"] + shop + draw.normal(0, 0.1, count)
    frame.loc[::25, "temperature"] = None
    return frame


if __name__ == "__main__":
    results = shoal.compare(
        ["fedavg", "fedprox(mu=0.1)"],
        data=make_sales(),
        label="sold",
        owner="shop",
        missing="mean",
        normalise=True,
        sample=4,
        rounds=30,
        lr=0.02,
        lr_groups={"fc2.*": 0.5},
        metrics=("r2",),
    )
    for row in results.table():
        print(f"{row['method']:16} {results.headline} {row['accuracy']:.2f}, R2 {row['r2']:.2f}")
