"""Images from a folder: <device>/<class>/*.png, a convolutional network, augmentation and CutMix.

    python examples/image_folder.py

`shoal run --data FOLDER --model lenet --augment "crop:1+rotate:20"` is the same on the command line. Pillow reads the
images: pip install 'shoal[data]'.
"""

import random
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image, ImageDraw

import shoal


def draw_images(folder: Path, devices: int = 6, count: int = 20) -> None:
    """Grey images of circles and crosses; every device has its own brightness, and more of one than of the other."""
    draw = random.Random(0)
    for device in range(devices):
        for kind, share in (("circle", device + 1), ("cross", devices - device)):
            (folder / f"device{device}" / kind).mkdir(parents=True)
            for number in range(count * share // devices + 2):
                image = Image.new("L", (12, 12))
                x, y, size = draw.randint(0, 3), draw.randint(0, 3), draw.randint(6, 8)
                pen, shade = ImageDraw.Draw(image), 100 + 25 * device
                if kind == "circle":
                    pen.ellipse((x, y, x + size, y + size), fill=shade)
                else:
                    pen.line((x, y, x + size, y + size), fill=shade, width=2)
                    pen.line((x, y + size, x + size, y), fill=shade, width=2)
                image.save(folder / f"device{device}" / kind / f"{number}.png")


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        draw_images(Path(folder))
        results = shoal.compare(
            ["fedavg", "cutmix(alpha=0.3)"],
            data=folder,
            split="owner",
            devices=0,
            sample=4,
            model="lenet",
            augment="crop:1+rotate:20",
            normalise=True,
            epochs=3,
            rounds=12,
            batch=8,
            lr=0.03,
            momentum=0.9,
        )
    for row in results.table():
        print(f"{row['method']:18} accuracy {row['accuracy']:.2f}")
