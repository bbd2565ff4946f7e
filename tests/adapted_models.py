"""Models with low-rank adapters for tests: one product that can be followed by hand, and small transformers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.builtin_tasks import TASKS
from shoal.core.model.net import Net
from shoal.core.part import Part
from shoal.parts.lora import LoRA
from shoal.testing.toy import Toy, toy


def make_product_net(rank: int = 1, scale: float = 2.0, **roles: str) -> Net:
    """The output (1 + scale B A) x with A = 1 and B = 0; the layer after it is 1 and frozen."""
    base = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    net = replace(Net(base, (1,), 1), task=TASKS["regress"])
    net.module.load_state_dict({k: torch.ones_like(v) for k, v in net.initial.items()})
    part = LoRA(rank=rank, alpha=scale * rank, where="0", **{"head": "frozen"} | roles)  # type: ignore[arg-type]
    adapted = part.model(replace(net))
    module: Any = adapted.module
    with torch.no_grad():
        module[0].lora_A.fill_(1)
    return replace(adapted)


def start_product_run(
    method: str | Part | Sequence[Part] = "lora", targets: Sequence[float] = (4.0,), net: Net | None = None
) -> Toy:
    """Devices with one target each on the loss (w - target)^2 / 2, two steps at rate 0.1 in a round."""
    y = torch.tensor([*(value for value in targets for _ in range(4)), 0, 0, 0, 0]).double()[:, None]
    sizes = (4,) * len(targets)
    return toy(method, sizes=sizes, net=net or make_product_net(), inputs=torch.ones_like(y), targets=y, lr=0.05)


def read_weight(run: Toy, params: dict[str, Tensor] | None = None) -> float:
    """w = 1 + 2 B A of a model."""
    known = run.net.frozen | (params or run.params)
    return 1 + 2 * float(known["0.lora_B"] @ known["0.lora_A"])


def draw_texts(count: int = 60, length: int = 6, next_word: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    """Random words out of 40, and the word after each, or whether the first one is even."""
    words = torch.randint(1, 40, (count, length + 1), generator=torch.Generator().manual_seed(0))
    tokens = words[:, :-1].contiguous()
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return inputs, words[:, 1:].contiguous() if next_word else words[:, 0] % 2


def make_transformer(kind: str) -> Any:
    """A tiny model of transformers, the same every time."""
    import transformers as hf

    torch.manual_seed(0)
    if kind == "llama":
        sizes: Any = dict(vocab_size=40, hidden_size=8, intermediate_size=16, num_hidden_layers=1)
        heads: Any = dict(num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=8)
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads))
    if kind == "gpt2":
        ends: Any = dict(bos_token_id=0, eos_token_id=0)
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=2, n_positions=8, **ends))
    sizes = dict(vocab_size=40, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    sizes["num_labels"] = 2
    return hf.BertForSequenceClassification(hf.BertConfig(**sizes, max_position_embeddings=8))
