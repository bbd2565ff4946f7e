"""Pretrain a small Llama-like model of characters on a text file, and save it as a folder for `model = "hf:FOLDER"`.

    python examples/pretrain_decoder.py shakespeare.txt decoder
    python examples/pretrain_decoder.py shakespeare.txt decoder --hidden 448 --layers 8 --heads 8 --steps 5000 --bf16

The first is a model of 3 million parameters, the second one of 20 million, for a GPU. A tenth of the text, its end, is
held back to judge by. The folder gets the model of the best loss there, a tokenizer of characters, and history.json. It
is plain torch and transformers: nothing of shoal is needed.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<unk>")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file in UTF-8, or one packed as .xz")
    parser.add_argument("folder", type=Path, help="where the model goes")
    for name, value, about in (
        ("hidden", 256, "width of the model"),
        ("layers", 4, "number of layers"),
        ("heads", 4, "attention heads of a layer"),
        ("context", 256, "characters that the model sees, and of a sample"),
        ("batch", 32, "samples of a step"),
        ("steps", 2000, "steps"),
        ("warmup", 100, "steps in which the learning rate rises; then it falls as a cosine to a tenth"),
        ("evaluate-every", 250, "steps between evaluations"),
        ("seed", 0, "of weights and samples"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{about} (default {value})")
    parser.add_argument("--lr", type=float, default=1e-3, help="largest learning rate of AdamW (default 0.001)")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of matrices (default 0.1)")
    parser.add_argument("--dropout", type=float, default=0.0, help="of attention (default 0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16; weights stay in float32")
    parser.add_argument(
        "--checkpointing", action="store_true", help="compute layers again on the way back: less memory"
    )
    return parser.parse_args()


def read_text(path: Path) -> str:
    if path.suffix == ".xz":
        import lzma

        return lzma.decompress(path.read_bytes()).decode("utf-8")
    return path.read_text("utf-8")


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for every character of the text; others are unknown."""
    symbols = {symbol: i for i, symbol in enumerate((*SPECIAL, *sorted(set(text))))}
    tokenizer = Tokenizer(models.WordLevel(symbols, unk_token=SPECIAL[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], unk_token=SPECIAL[1])


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> Tensor:
    """The number of every character, by the vocabulary alone, which is quicker than the tokenizer."""
    numbers = tokenizer.get_vocab()
    return torch.tensor([numbers.get(symbol, 1) for symbol in text])


def make_model(args: argparse.Namespace, vocabulary: int) -> LlamaForCausalLM:
    """A Llama whose layers between have 8/3 of its width, and whose head is the embedding."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=args.hidden,
        intermediate_size=-(-args.hidden * 8 // 3 // 8) * 8,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=args.context,
        attention_dropout=args.dropout,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(args.device)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def compute_loss(model: LlamaForCausalLM, samples: Tensor, half: bool) -> Tensor:
    """The mean cross-entropy of the next characters."""
    with torch.autocast(samples.device.type, torch.bfloat16, enabled=half):
        logits = model(input_ids=samples[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), samples[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, held: Tensor, args: argparse.Namespace) -> float:
    """The loss on what was held back, in pieces of the context that do not overlap."""
    model.eval()
    pieces = held[: len(held) // (args.context + 1) * (args.context + 1)].view(-1, args.context + 1)
    losses = [(len(part), compute_loss(model, part, args.bf16).item()) for part in pieces.split(args.batch)]
    model.train()
    return sum(n * loss for n, loss in losses) / sum(n for n, _ in losses)


def get_lr(step: int, args: argparse.Namespace) -> float:
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def main() -> None:
    args = read_arguments()
    torch.manual_seed(args.seed)
    text = read_text(args.text)
    tokenizer = make_tokenizer(text)
    numbers = encode(tokenizer, text).to(args.device)
    cut = min(len(numbers) * 9 // 10, len(numbers) - args.context - 1)
    train, held = numbers[:cut], numbers[cut:]
    if len(train) <= args.context + 1:
        raise SystemExit(f"{args.text} has {len(text)} characters, too few for a context of {args.context}.")
    model = make_model(args, len(tokenizer))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} characters", flush=True)

    history, best, start = [], math.inf, time.time()
    window = torch.arange(args.context + 1, device=args.device)
    for step in range(args.steps):
        for group in optimiser.param_groups:
            group["lr"] = get_lr(step, args)
        first = torch.randint(len(train) - args.context, (args.batch, 1)).to(args.device)
        loss = compute_loss(model, train[first + window], args.bf16)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if (step + 1) % args.evaluate_every and step + 1 < args.steps:
            continue
        judged = evaluate(model, held, args)
        history.append({"step": step + 1, "loss": loss.item(), "held_back": judged, "seconds": time.time() - start})
        print(f"step {step + 1}: loss {loss.item():.3f}, on what was held back {judged:.3f}", flush=True)
        if judged < best:
            best = judged
            model.save_pretrained(args.folder)
            tokenizer.save_pretrained(args.folder)
        (args.folder / "history.json").write_text(json.dumps(history, indent=1))
    print(f"perplexity {math.exp(best):.2f} of a character; saved to {args.folder}")


if __name__ == "__main__":
    main()
