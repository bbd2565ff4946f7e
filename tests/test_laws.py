"""The laws of `shoal.testing`, over one table of all parts and over every pair of them."""

import pickle
from itertools import permutations

import pytest
from tiny_parts import TINY

from shoal.core.expression import parse
from shoal.core.part import Part
from shoal.parts import PRESETS, shipped
from shoal.testing import check_pair, check_part

OTHER_VALUES = [
    "fedprox(mu=1.5)",
    "trimmedmean(trim=0.4)",
    "weighted(power=0.0)",
    "uniform(share=0.5)",
    "feddyn(alpha=1.0)",
    "feddh(lr_v=1.0, lr_b=1.0, gradient='server_data', reaggregate=True)",
    "feddh(lr_b=1.0, gradient='client_grad')",
    "feddh(labels='estimated', cap=0.6)",
    "fedad(rule='fixed', rate=0.5, check=1, force=0)",
    "fedad(check=1, force=0, direction='literal')",
    "feddrop(rate=0.3, filters=True)",
    "fjord(widths='0.3,1', distil=True)",
    "heterofl(rates='1,0.4', mask_loss=False)",
    "fedmp(arms='0.6')",
    "fedbiad(rate=0.4, window=1, combining='fill')",
    "topk(ratio=0.3, feedback=False, positions='golomb')",
    "dgc(ratio=0.3, momentum=0.5, clip=0.1, warmup='1,2', positions='auto')",
    "stc(ratio=0.3, positions='auto')",
    "stc(ratio=0.3, down=True)",
    "catchup(positions='golomb')",
    "fedpaq(bits=4)",
    "half(kind='bfloat16', down=True)",
    "randomk(ratio=0.4, feedback=False)",
    "signsgd(lr=0.1)",
]
EACH: list[Part] = [*(cls() for cls in shipped().values()), *TINY]
TABLE: list[Part] = [*EACH, *(parse(text, shipped(), PRESETS).parts[0] for text in OTHER_VALUES)]


@pytest.mark.parametrize("part", TABLE, ids=str)
def test_laws(part: Part):
    check_part(part)


@pytest.mark.parametrize("part", TABLE, ids=str)
def test_pickles(part: Part):
    assert pickle.loads(pickle.dumps(part)) == part


@pytest.mark.parametrize("first", EACH, ids=str)
def test_pairs(first: Part):
    for a, b in permutations(EACH, 2):
        if a is first and a.name() != b.name():
            check_pair(a, b)
