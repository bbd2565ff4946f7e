"""Fine-tuning a language model of Hugging Face on texts without labels: the next token is what is learnt.

    python examples/hugging_face_decoder.py

It pretrains a small Llama-like model of characters first, by examples/pretrain_decoder.py, on one half of a text, and
fine-tunes it on devices that hold lines of the other half. It needs pip install 'shoal[hf]'.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import shoal

VERSE = """The owl looked up to the stars above and sang to a small guitar
The pig put a ring at the end of his nose and sailed away afar
They dined on mince and slices of quince which they ate with a silver spoon
And hand in hand on the edge of the sand they danced by the light of the moon
"""


def write_lines(path: Path, verses: list[str]) -> None:
    path.write_text("text,owner\n" + "".join(f"{line},reader {i % 4}\n" for i, line in enumerate(verses)))


if __name__ == "__main__":
    lines = VERSE.lower().splitlines()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "first.txt").write_text("\n".join(lines[:2] * 20))
        sizes = (
            "--layers 2 --hidden 32 --heads 2 --context 80 --steps 30 --batch 8 --lr 0.01 --evaluate-every 15".split()
        )
        script = Path(__file__).with_name("pretrain_decoder.py")
        subprocess.run([sys.executable, str(script), f"{folder}/first.txt", f"{folder}/decoder", *sizes], check=True)
        write_lines(Path(folder, "lines.csv"), lines[2:] * 16)
        result = shoal.run(
            "fedavg",
            model=f"hf:{folder}/decoder",
            data=f"{folder}/lines.csv",
            text_length=80,
            owner="owner",
            sample=4,
            rounds=6,
            epochs=2,
            batch=4,
            optimiser="adamw",
            lr=0.005,
            local_lr_warmup=2,
            metrics=("perplexity",),
        )
    first, *_, last = result.history["perplexity"]
    print(f"perplexity {first:.1f} after the first round, {last:.1f} after the last")
