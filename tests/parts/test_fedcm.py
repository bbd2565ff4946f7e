"""FedCM and MoFedSAM on one weight, with numbers worked out by hand."""

import pytest
from one_weight import one_weight

from shoal.core.model import tree
from shoal.core.types import Optimiser
from shoal.parts.fedcm import FedCM
from shoal.parts.fedsam import FedSAM
from shoal.testing.toy import make_method, toy

DEVICES = {"targets": [[1], [3]], "x": [-1.0, 1.0], "steps": lambda device: 2}
"""From 0, gradients w + 1 and w - 3, two steps of rate 0.1."""


def test_fedcm_walks_along_the_mean_step_of_the_last_round():
    # round 1 with m = 0: -0.01 and -0.0199, 0.03 and 0.0597; m = -(0.0597 - 0.0199) / 2 / 0.2
    sent, judged, rows = one_weight([FedCM()], rounds=2, **DEVICES)
    assert sent == judged == pytest.approx([0.0199, 0.057224], rel=1e-5)
    assert [row["fedcm.m_norm"] for row in rows] == pytest.approx([0.0995, 0.186622], rel=1e-5)
    assert rows[0]["bytes_down"] == 2 * 16 and rows[0]["bytes_up"] == 2 * 8


def test_m_is_made_with_the_mean_number_of_steps():
    # A: 0.05; B: 0.15, then along 0.5 * -2.85 to 0.2925; mean 0.17125 in 1.5 steps of 0.1
    _, _, rows = one_weight([FedCM(alpha=0.5)], [[1], [3]], steps=lambda device: device + 1)
    assert rows[0]["fedcm.m_norm"] == pytest.approx(0.17125 / 0.15)


def test_weight_decay_is_mixed_like_the_gradient():
    # step 1 along 0.5 * -1; step 2 along 0.5 * (-0.95 + 1 * 0.05)
    sent, _, _ = one_weight([FedCM(alpha=0.5)], [[1]], steps=lambda _: 2, optimiser=Optimiser(weight_decay=1.0))
    assert sent == pytest.approx([0.05 + 0.045])


def test_without_m_it_is_fedavg_bit_for_bit():
    ours, plain = toy(FedCM(alpha=1.0)), toy()
    ours.play(3)
    plain.play(3)
    assert tree.is_same_tree(ours.params, plain.params)


def test_a_learning_rate_of_0_leaves_m_at_0():
    _, _, rows = one_weight([FedCM()], [[1]], rounds=2, lr=0.0)
    assert [row["fedcm.m_norm"] for row in rows] == [0.0, 0.0] and not any(row.get("void") for row in rows)


@pytest.mark.parametrize("parts", [make_method("mofedsam").parts, (FedCM(), FedSAM())], ids=["alias", "other order"])
def test_mofedsam_is_fedsam_in_fedcms_step(parts):
    # round 1: -0.02189 and 0.06169; e is not scaled by alpha
    alone, _, _ = one_weight(parts, [[1]], x=[-1.0], steps=lambda _: 2)
    assert alone == pytest.approx([-0.02189], rel=1e-5)
    sent, _, _ = one_weight(parts, rounds=2, **DEVICES)
    assert sent == pytest.approx([0.0199, 0.057224], rel=1e-5)
