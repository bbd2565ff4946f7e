"""Folders of small models of transformers with random weights, and tokenizers of a few words, as save_pretrained
writes them."""

from pathlib import Path
from typing import Any

import torch

WORDS = "[PAD] [UNK] good fine bad dull the film was and a story with music".split()
"""The vocabulary: the first two stand for padding and for words that are not in it."""
SIZES: dict[str, Any] = dict(num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16)
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertForSequenceClassification", SIZES | dict(hidden_size=8, intermediate_size=12)),
    "masked-bert": ("BertConfig", "BertForMaskedLM", SIZES | dict(hidden_size=8, intermediate_size=12)),
    "tagger": ("BertConfig", "BertForTokenClassification", SIZES | dict(hidden_size=8, intermediate_size=12)),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", SIZES | dict(hidden_size=8, intermediate_size=12)),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        dict(n_embd=8, n_layer=2, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=1),
    ),
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        SIZES | dict(hidden_size=8, intermediate_size=12, attention_dropout=0.2, bos_token_id=1, eos_token_id=1),
    ),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        dict(
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            image_size=8,
            patch_size=4,
            num_channels=1,
            hidden_dropout_prob=0.1,
        ),
    ),
    "t5": ("T5Config", "T5ForConditionalGeneration", dict(d_model=8, d_ff=8, num_layers=1, num_heads=2, d_kv=4)),
}


def write_hf_folder(folder: Path, kind: str, tokenizer: bool = True, weights: bool = True, **more: Any) -> Path:
    """A folder with config, weights and tokenizer of one of `CONFIGS`; `more` goes into the config."""
    import transformers

    config_name, class_name, values = CONFIGS[kind]
    if kind != "vit":
        values = dict(vocab_size=len(WORDS), pad_token_id=0) | values
    config = getattr(transformers, config_name)(**values | more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, class_name)(config)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder) if weights else model.config.save_pretrained(folder)
    if not weights:
        config.architectures = [class_name]
        config.save_pretrained(folder)
    if tokenizer and kind != "vit":
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer that splits at spaces and knows `WORDS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)


def draw_reviews(count: int = 48, seed: int = 0) -> tuple[list[str], list[str]]:
    """Sentences of 2 to 7 words, and whether the last of them praises."""
    generator = torch.Generator().manual_seed(seed)
    texts, labels = [], []
    for row in range(count):
        length = int(torch.randint(1, 7, (), generator=generator))
        words = [WORDS[i] for i in torch.randint(6, len(WORDS), (length,), generator=generator).tolist()]
        last = int(torch.randint(0, 2, (), generator=generator)) + (2 if row % 2 else 4)
        texts.append(" ".join([*words, WORDS[last]]))
        labels.append("praise" if row % 2 else "blame")
    return texts, labels


def write_reviews(path: Path, label: bool = True) -> Path:
    """A CSV file of reviews, with or without their labels."""
    texts, labels = draw_reviews()
    rows = [f"{text},{mark}" if label else text for text, mark in zip(texts, labels)]
    path.write_text("\n".join(["text,label" if label else "text", *rows]) + "\n")
    return path
