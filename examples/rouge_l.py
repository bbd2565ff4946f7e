"""ROUGE-L of a language model as a metric of one's own: how much of the right order of tokens it predicts.

    shoal run --model hf:FOLDER --data texts.csv --metrics examples/rouge_l.py:RougeL

ROUGE-L (Lin 2004, "ROUGE: a package for automatic evaluation of summaries") is the F-measure of the longest common
subsequence of a prediction and its reference. What is compared here are the likeliest next tokens, each after the right
ones before it, with the text itself: the model is teacher-forced and generates nothing, so this is higher than for text
that it would write alone. Tokens are those of the model, not words, and nothing is stemmed.
"""

import torch
from torch import Tensor


def find_longest_common(one: list[int], two: list[int]) -> int:
    """The length of the longest sequence that both hold in its order, with gaps."""
    row = [0] * (len(two) + 1)
    for a in one:
        diagonal = 0
        for place, b in enumerate(two, 1):
            above = row[place]
            row[place] = diagonal + 1 if a == b else max(above, row[place - 1])
            diagonal = above
    return row[-1]


class RougeL:
    """The mean over texts of 2 P R / (P + R), where P and R are the common length by that of prediction and text."""

    def __init__(self):
        self.total, self.texts = 0.0, 0

    def update(self, logits: Tensor, targets: Tensor) -> None:
        for predicted, target in zip(logits.argmax(-1), targets):
            counts = target >= 0  # -100 stands behind the end of a text
            common = find_longest_common(predicted[counts].tolist(), target[counts].tolist())
            self.total += common / max(int(counts.sum()), 1)  # both are equally long, and so P = R
            self.texts += 1

    def compute(self) -> float:
        return self.total / max(self.texts, 1)


if __name__ == "__main__":
    metric = RougeL()
    text = torch.tensor([[1, 2, 3, 4, -100]])
    metric.update(torch.nn.functional.one_hot(torch.tensor([[1, 3, 4, 0, 2]]), 5).float(), text)
    print(f"ROUGE-L {metric.compute():.2f}")  # 1, 3, 4 of four tokens are there in their order
