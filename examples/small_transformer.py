"""Text classification with a small transformer: sentences of unequal length, AdamW, a faster head.

    python examples/small_transformer.py

Any model of transformers for sentences takes its place, with weights from a folder: `from_pretrained(FOLDER)`.
It needs pip install 'shoal[hf]'.
"""

import random

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import shoal

GOOD, BAD = ("good", "fine", "great", "lovely"), ("bad", "dull", "awful", "poor")
OTHER = ("the", "film", "was", "and", "a", "story", "very", "music", "with", "cast")
WORDS = {word: number for number, word in enumerate(("[PAD]", *GOOD, *BAD, *OTHER))}


def make_reviews(count: int = 400) -> tuple[dict[str, Tensor], Tensor]:
    """Sentences of 4 to 10 words as numbers with their mask, and whether they praise, which two words of each tell."""
    draw = random.Random(0)
    tokens, labels = torch.zeros(count, 10, dtype=torch.long), torch.zeros(count, dtype=torch.long)
    for row in range(count):
        labels[row] = praises = draw.randrange(2)
        words = [draw.choice(OTHER) for _ in range(draw.randint(4, 10))]
        for place in draw.sample(range(len(words)), 2):
            words[place] = draw.choice(GOOD if praises else BAD)
        tokens[row, : len(words)] = torch.tensor([WORDS[word] for word in words])
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long()}, labels


def make_model() -> BertForSequenceClassification:
    """A BERT of one layer with random weights."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.1,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


if __name__ == "__main__":
    result = shoal.run(
        "fedavg",
        data=make_reviews(),
        model=make_model(),
        devices=8,
        sample=4,
        split="dirichlet:1",
        rounds=8,
        epochs=2,
        optimiser="adamw",
        lr=0.003,
        lr_groups={"*classifier*": 3.0},
        label_smoothing=0.05,
        engine="batched",
        width=4,
    )
    print(f"accuracy {result.headline:.2f} after {len(result.history)} rounds")
