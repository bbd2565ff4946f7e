"""Fine-tuning a text classifier of Hugging Face: a folder with model and tokenizer, a table with texts.

    python examples/hugging_face_text.py

The folder is made on the spot: a BERT of two layers with random weights. One with pretrained weights takes its place,
`model="hf:FOLDER"`, and `shoal run --model hf:FOLDER --data reviews.csv` does the same in a terminal.
It needs pip install 'shoal[hf]'.
"""

import random
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

import shoal

GOOD, BAD = ("good", "fine", "great", "lovely"), ("bad", "dull", "awful", "poor")
OTHER = ("the", "film", "was", "and", "a", "story", "very", "music", "with", "cast")
WORDS = ("[PAD]", "[UNK]", *GOOD, *BAD, *OTHER)


def write_reviews(path: Path, count: int = 400) -> None:
    """Sentences of 4 to 10 words, two of which tell whether they praise, and the magazine that printed them."""
    draw, rows = random.Random(0), ["text,magazine,label"]
    for _ in range(count):
        praises = draw.randrange(2)
        words = [draw.choice(OTHER) for _ in range(draw.randint(4, 10))]
        for place in draw.sample(range(len(words)), 2):
            words[place] = draw.choice(GOOD if praises else BAD)
        rows.append(f"{' '.join(words)},magazine {draw.randrange(8)},{'praise' if praises else 'blame'}")
    path.write_text("\n".join(rows) + "\n")


def save_model(folder: Path) -> None:
    """Config, weights and tokenizer of a small BERT."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, hidden_dropout_prob=0.1, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder, "bert"))
        write_reviews(Path(folder, "reviews.csv"))
        result = shoal.run(
            "fedavg",
            model=f"hf:{folder}/bert",
            data=f"{folder}/reviews.csv",
            owner="magazine",
            sample=4,
            rounds=8,
            epochs=2,
            optimiser="adamw",
            lr=0.003,
            local_lr_warmup=5,
            lr_groups={"*classifier*": 3.0},
            engine="batched",
            width=4,
        )
    print(f"accuracy {result.headline:.2f} after {len(result.history)} rounds")
