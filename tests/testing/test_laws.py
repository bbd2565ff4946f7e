"""The laws of `shoal.testing`, over one table of all parts and over pairs of them.

`make test` asks for law 2 on the fewest engines and for law 8 of pairs that cover all; `make test-all` for the rest.
"""

import pickle

import pytest
from covering import cover_pairs, list_pairs
from tiny_parts import TINY

from shoal.core.expression import parse_method
from shoal.core.part import Part
from shoal.parts import PRESETS, find_shipped_parts
from shoal.testing.extra_laws import check_reads_are_declared
from shoal.testing.laws import check_engines_agree, check_pair, check_part

OTHER_VALUES = [
    "fedprox(mu=1.5)",
    "trimmedmean(trim=0.4)",
    "weighted(power=0.0)",
    "uniform(share=0.5)",
    "feddyn(alpha=1.0)",
    "feddh(lr_v=1.0, lr_b=1.0, gradient_from='server_data', reaggregate=True)",
    "feddh(lr_b=1.0, gradient_from='client_grad')",
    "feddh(labels='estimated', cap=0.6)",
    "fedad(rule='fixed', rate=0.5, check=1, force=0)",
    "fedad(check=1, force=0, direction='literal')",
    "feddh_released(lr_v=1.0, lr_b=1.0)",
    "fedad_released(rule='fixed', rate=0.5, start=0, score_scale=0.1)",
    "fedad_released(start=0, steps=5, images=4)",
    "serverm_released(beta=0.5)",
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
    "fedacd(cadence='batch_ema', weights='uniform')",
    "fedacd(lam=0.5, cadence='round', reduce='sum')",
    "mixup(alpha=0.3)",
    "cutmix(alpha=0.3)",
    "balanced_softmax(strength=0.3)",
    "fedlc(tau=0.1)",
    "fedntd(beta=0.5, tau=3.0)",
    "feddecorr(beta=2.0)",
    "feddu(steps=1)",
    "feddu(accuracy='inverse', scale=0.1)",
    "devicem(beta=0.9)",
    "fedavgm(ema=True, start='first')",
    "fedap(at=2)",
    "fedap(at=1, rule='fixed', rate=0.5)",
    "hrank(rate=0.5, at=2)",
    "fednh(rho=0.3, scale=5.0)",
    "creff(features=3, match_steps=4, epochs=2, batch=2)",
    "imc(rule='fixed', rate=0.5, at=1)",
    "imc(rule='eigen_gap', at=2, images=3, steps=4)",
    "prunefl(rate=0.3, every=1, change=0.5, half_life=2)",
    "feddst(sparsity=0.5, alpha=0.5, every=1)",
    "fedmlb(cross=0.3, distil=0.5, heat=2.0)",
    "fedbr(tau=2, choose='random')",
    "fedbr(choose='all', max_age=1)",
    "datasharing(share=0.5)",
    "feddf(lr=0.01, steps=7, patience=3, batch=3)",
    "fedkt(epochs=1)",
    "fedda(beta=0.5, walk='momentum')",
    "moon(mu=1.0, temperature=0.1, width=5)",
    "moon(width=0)",
    "signsgd(lr=0.1)",
    "fedsam(rho=0.7, adaptive=True)",
    "fedlesam(rho=0.5)",
    "fedcm(alpha=0.5)",
    "fedspeed(alpha=0.5, normalised=False, over='round')",
    "fedsmoo(lam=0.5, rho=0.3)",
    "window(rounds=2)",
    "window(rounds=2, blocks=1)",
    "swa(start=1, every=2)",
    "fedacg(lam=0.5, beta=1.0)",
    "fedexp(eps=0.0)",
    "qffl(q=0.5)",
    "qffl(q=3.0)",
    "poc(d=1, chances='equal')",
    "oort(explore=0.0, least=0.0, pace=1)",
    "normbound(bound=0.01)",
    "normbound(times=0.5)",
    "fedrep(head_share=0.3)",
    "fedbn(statistics=True)",
    "ditto(lam=0.1)",
    "apfl(share=0.3, adaptive=True)",
    "pfedme(lam=2.0, inner_steps=2, beta=2.0, warm=True)",
    "perfedavg(alpha=0.1, order='hf', halves=False)",
    "finetune(epochs=2, lr=0.01)",
    "fedas(align_lr=0.5, align_epochs=2, batch=2)",
    "fedas(average_head=True)",
    "fedala(eta=0.3, sample_share=0.5, first_epochs=2, batch=2)",
    "lora(rank=2, alpha=1.0, where='a,b', head='personal')",
    "lora(a='frozen')",
    "lora(b='personal', head='frozen')",
    "hetlora(rates='1,0.3', padded=False)",
    "hetlora(rates='1,0.5', gamma=0.6, lam=0.3, weights='size')",
    "biasonly(head=False)",
    "lastlayers(layers=2)",
    "prompt(length=2, init='random', head='frozen')",
    "prompt(length=3, role='personal')",
]
EACH: list[Part] = [*(cls() for cls in find_shipped_parts().values()), *TINY]
TABLE: list[Part] = [*EACH, *(parse_method(text, find_shipped_parts(), PRESETS).parts[0] for text in OTHER_VALUES)]


@pytest.mark.parametrize("part", TABLE, ids=str)
def test_laws(part: Part):
    check_part(part, whole=False)


@pytest.mark.parametrize("cls", [cls for cls in find_shipped_parts().values() if cls.reads], ids=lambda cls: cls.name())
def test_what_a_part_declares_to_read_it_reads_at_some_setting(cls: type[Part]):
    literal = parse_method("fedbiad(combining='literal')", find_shipped_parts(), PRESETS).parts[0]
    settings = [part for part in (*TABLE, literal) if type(part) is cls]
    check_reads_are_declared(settings[0], *(settings[1:] or settings))


@pytest.mark.whole
@pytest.mark.parametrize("part", TABLE, ids=str)
def test_every_engine(part: Part):
    check_engines_agree(part)


@pytest.mark.parametrize("part", TABLE, ids=str)
def test_pickles(part: Part):
    assert pickle.loads(pickle.dumps(part)) == part


@pytest.mark.parametrize("first", EACH, ids=str)
def test_pairs_that_cover(first: Part):
    for a, b in cover_pairs(tuple(EACH)):
        if a is first:
            check_pair(a, b)


@pytest.mark.whole
@pytest.mark.parametrize("first", EACH, ids=str)
def test_every_pair(first: Part):
    for a, b in list_pairs(EACH):
        if a is first:
            check_pair(a, b)
