"""Parts that give every device a model of its own: numbers worked out by hand, and what stays where it is."""

from dataclasses import replace

import pytest
import torch
from one_weight import Squared, one_weight, start_one_weight
from torch import nn

import shoal
from shoal.core.batch import Samples
from shoal.core.builtin_tasks import TASKS
from shoal.core.compose import compose
from shoal.core.errors import ShoalError
from shoal.core.local.optimiser_checks import refuse_optimiser_clashes
from shoal.core.model.heads import list_side_tensors
from shoal.core.model.net import Net
from shoal.core.part import Part
from shoal.core.session import Session, play_round
from shoal.core.types import Optimiser, Work
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.device_tests import DeviceTester, FinetunedModels
from shoal.engines.serial import SerialEngine
from shoal.parts.apfl import APFL
from shoal.parts.ditto import Ditto
from shoal.parts.fedala import FedALA, learn_shares, mix_tensors
from shoal.parts.fedas import FedAS, compute_alignment_gradient, compute_class_features, compute_fisher_trace
from shoal.parts.fedbabu import FedBABU
from shoal.parts.fedbn import FedBN
from shoal.parts.feddf import FedDF
from shoal.parts.fednh import FedNH
from shoal.parts.fedper import FedPer
from shoal.parts.fedrep import FedRep
from shoal.parts.fedrod import FedROD
from shoal.parts.fedsam import FedSAM
from shoal.parts.finetune import FineTune
from shoal.parts.lgfedavg import LGFedAvg
from shoal.parts.perfedavg import PerFedAvg
from shoal.parts.pfedme import PFedMe
from shoal.plugins.smoke_run import SmokeSetup, build_tiny_run
from shoal.testing.laws import play_on
from shoal.testing.rounds import assert_trees_close
from shoal.testing.toy import Toy, toy

TWO_STEPS = lambda device: 2  # noqa: E731


def start_product(part: Part, steps: int = 1, momentum: float = 0.0, decay: float = 0.0) -> Toy:
    """The model a * b (a the head, b the body, both 1) on the loss (ab - 4)^2, at half the rate of its half."""
    body, head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    net = replace(Net(nn.Sequential(body, head).double(), (1,), 1), task=TASKS["regress"])
    net.module.load_state_dict({k: torch.ones_like(v) for k, v in net.initial.items()})
    net = replace(net)
    samples = 2 * steps + 4
    inputs, targets = torch.ones(samples, 1).double(), torch.full((samples, 1), 4.0).double()
    optimiser = Optimiser(momentum, decay)
    return toy(part, sizes=(2 * steps,), net=net, inputs=inputs, targets=targets, lr=0.05, optimiser=optimiser)


def read_product(run: Toy) -> tuple[float, float]:
    """The head and the body of device 0."""
    own = run.session.loop.host.make_personal_model(0, run.params, 0)
    return float(own["1.weight"]), float(own["0.weight"])


@pytest.mark.parametrize("part", [FedPer(), LGFedAvg()], ids=str)
def test_all_layers_are_trained_together(part):
    """The gradient of (ab - 4)^2 / 2 at 1, 1 is -3 for both: 1 + 0.1 * 3."""
    run = start_product(part)
    run.play()
    assert read_product(run) == pytest.approx((1.3, 1.3))


def test_a_layer_is_on_the_server_or_on_the_device():
    for part, own, shared in ((FedPer(), "1.weight", "0.weight"), (LGFedAvg(), "0.weight", "1.weight")):
        run = start_product(part)
        row = run.play()[0]
        assert float(run.params[own]) == 1.0 and float(run.params[shared]) == pytest.approx(1.3)
        assert list(run.memory(0)[".personal"]) == [own]
        assert row["bytes_up"] < one_message_of_both()


def one_message_of_both() -> int:
    run = start_product(FineTune())
    return run.play()[0]["bytes_up"]


def test_fedrep_trains_the_head_and_then_the_body():
    """a = 1 + 0.1 * 3 = 1.3, then b = 1 + 0.1 * 1.3 * (4 - 1.3) = 1.351."""
    run = start_product(FedRep(), steps=2)
    run.play()
    assert read_product(run) == pytest.approx((1.3, 1.351))


def test_what_a_phase_does_not_train_stays_bit_for_bit_with_momentum_and_decay():
    """In the second phase the body has the velocity of its own first step: nothing of the head's phase."""
    run = start_product(FedRep(), steps=2, momentum=0.9, decay=0.1)
    run.play()
    head, body = read_product(run)
    first = 1 - 0.05 * (-6 + 0.1)
    assert head == pytest.approx(first, abs=1e-12)
    assert body == pytest.approx(1 - 0.05 * (2 * (first - 4) * first + 0.1), abs=1e-12)
    whole = start_product(FedRep(head_share=1.0), steps=2, momentum=0.9, decay=0.1)
    whole.play()
    assert read_product(whole)[1] == 1.0


def test_phases_hold_for_gradients_at_shifted_parameters():
    """Uphill is along the head alone in its phase, and along the body alone in its own."""
    run = start_product(compose([FedRep(), FedSAM(rho=0.1)]).parts, steps=2)  # type: ignore[arg-type]
    run.play()
    head = 1 - 0.05 * 2 * (0.9 - 4)
    body = 1 - 0.05 * 2 * head * (head * 0.9 - 4)
    assert read_product(run) == pytest.approx((head, body))


def test_fedbabu_leaves_the_head_alone_until_a_device_fine_tunes():
    run = start_product(FedBABU(), momentum=0.9, decay=0.1)
    run.play(2)
    assert read_product(run)[0] == 1.0
    run = start_product(FedBABU())
    run.play()
    assert read_product(run) == pytest.approx((1.0, 1.3))
    assert FedBABU(epochs=3).finetune(Work(1.0, 4, 8, 0.1)) == Work(3.0, 0, 8, 0.1)


def test_finetune_has_its_epochs_and_its_rate():
    assert FineTune(epochs=0.5).finetune(Work(3.0, 4, 8, 0.1)) == Work(0.5, 0, 8, 0.1)
    assert FineTune(lr=0.3).finetune(Work(3.0, 0, 8, 0.1)) == Work(1.0, 0, 8, 0.3)


def test_a_device_fine_tunes_from_the_global_model_by_hand():
    """w = 1.19 after two steps of both: a step of device 0 leads to 1.071, one of device 4 to 1.471."""
    session = start_one_weight([FineTune(lr=0.1)], [[0], [4]], steps=TWO_STEPS, start=1.0)
    play_round(session)
    assert session.server_state and float(session.server_state.params["weight"]) == pytest.approx(1.19)
    host, params = session.loop.host, session.server_state.params
    tester = DeviceTester(host, host.setup.samples, [0, 1], lambda round, device: Work(1.0, 0, 8, 0.5))
    make_params = lambda device: host.make_personal_model(device, params, 0)  # noqa: E731
    plain_setup = replace(host.server_setup, method=compose([Squared()]))
    models = FinetunedModels(tester, host.setup, plain_setup, make_params, 0)
    assert [float(models.get(device)["weight"]) for device in range(2)] == pytest.approx([1.071, 1.471])


def test_layers_that_stay_are_counted_from_the_last():
    result = shoal.run(method="fedper(layers=2)", model="lenet", rounds=1, devices=2, sample=2, steps="1")
    linears = [name for name, m in result.module().named_modules() if isinstance(m, nn.Linear)]
    kept = {name.rpartition(".")[0] for name in result.net.names_with_role("personal")}
    assert kept == set(linears[-2:])
    with pytest.raises(ShoalError, match="nothing is left to share"):
        shoal.run(method="fedper(layers=99)", rounds=1)


# batch norm -----------------------------------------------------------------------------------------------------------
def make_norm_setup() -> SmokeSetup:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).double()
    x = torch.randn(20, 4, dtype=torch.float64)
    return SmokeSetup(Net(module, (4,), 2), x, torch.randint(0, 2, (20,)), kind="norm")


def test_fedbn_keeps_norms_and_their_statistics_on_devices():
    for part, kept in ((FedBN(), 5), (FedBN(statistics=True), 3)):
        loop, net = build_tiny_run(compose([part]), (4, 4), setting=make_norm_setup())
        assert len(net.names_with_role("personal")) == kept
        session = Session(loop, net)
        play_round(session)
        assert session.server_state
        mean = session.server_state.params["1.running_mean"]
        assert torch.equal(mean, torch.zeros(6)), "statistics have travelled"
        own = [loop.host.make_personal_model(d, session.server_state.params, 0)["1.running_mean"] for d in range(2)]
        assert not torch.equal(own[0], own[1]) and not torch.equal(own[0], mean)
    (expected, _), (actual, _) = (
        play_on(engine, FedBN(), (4, 6, 2), make_norm_setup()) for engine in (SerialEngine(), BatchedEngine(2))
    )
    assert_trees_close(actual, expected, 1e-9, "another engine trains norms to other numbers")


def test_fedbn_without_batch_norm_says_so():
    row = toy(FedBN()).play()[0]
    assert "log" not in row
    run = shoal.run(method="fedbn", rounds=1, devices=2, sample=2, engine="serial")
    assert run.net.names_with_role("personal") == ()


# two models on a device -----------------------------------------------------------------------------------------------
def read_personal(session: Session, device: int = 0) -> float:
    assert session.server_state
    return float(session.loop.host.make_personal_model(device, session.server_state.params, 0)["weight"])


def test_ditto_pulls_its_own_model_to_what_was_received():
    """c = 4, w = v = 1: v = 1.3, then 1.3 + 0.1 (2.7 - 0.3) = 1.54; w is 1.3, then 1.57."""
    session = start_one_weight([Ditto(lam=1.0)], [[4]], steps=TWO_STEPS, start=1.0)
    play_round(session)
    assert session.server_state
    assert read_personal(session) == pytest.approx(1.54)
    assert float(session.server_state.params["weight"]) == pytest.approx(1.57)


def test_the_shared_model_of_ditto_and_apfl_is_that_of_fedavg_bit_for_bit():
    optimiser = Optimiser(momentum=0.9, weight_decay=0.1, clip=0.5)
    plain = one_weight([], [[0], [4]], 3, steps=TWO_STEPS, start=1.0, optimiser=optimiser)[0]
    for part in (Ditto(), APFL()):
        assert one_weight([part], [[0], [4]], 3, steps=TWO_STEPS, start=1.0, optimiser=optimiser)[0] == plain


def test_ditto_without_a_pull_is_local_training():
    session = start_one_weight([Ditto(lam=0.0)], [[0], [4]], start=1.0)
    for _ in range(2):
        play_round(session)
    assert [read_personal(session, d) for d in range(2)] == pytest.approx([0.81, 1.57])


def test_ditto_ends_between_its_target_and_what_was_received():
    """c = 4, w = 1: v ends at (c + lam w) / (1 + lam), 2.5 for lam 1; where lam is large, next to w."""
    for lam, end in ((1.0, 2.5), (9.0, 1.3)):
        session = start_one_weight([Ditto(lam=lam)], [[4]], steps=lambda device: 200, start=1.0)
        play_round(session)
        assert read_personal(session) == pytest.approx(end, abs=1e-6)


def test_apfl_is_the_shared_model_without_a_share_and_a_local_one_with_all_of_it():
    """share 0: v stays where it was, and w is used; share 1: v is 1.3, then 1.57 of device 4, whatever w is."""
    for share, own, used in ((0.0, [1.0, 1.0], [1.19, 1.19]), (1.0, [0.81, 1.57], [0.81, 1.57])):
        session = start_one_weight([APFL(share=share)], [[0], [4]], steps=TWO_STEPS, start=1.0)
        play_round(session)
        remembered = [float(session.loop.host.memory.get(d)[".personal"]["apfl.weight"]) for d in range(2)]
        assert remembered == pytest.approx(own)
        assert [read_personal(session, d) for d in range(2)] == pytest.approx(used)


def test_apfl_learns_its_own_model_inside_the_mixture():
    """c = 4, share 0.5, w = v = 1: w = 1.3, v = 1 + 0.1 * 0.5 * 3 = 1.15; used is 0.5 * 1.15 + 0.5 * 1.3."""
    session = start_one_weight([APFL()], [[4]], start=1.0)
    play_round(session)
    own = session.loop.host.memory.get(0)[".personal"]
    assert float(own["apfl.weight"]) == pytest.approx(1.15) and read_personal(session) == pytest.approx(1.225)


def test_apfl_learns_the_share():
    """w = 1, v = 2: the mixture 1.5 has the gradient -2.5, so that v = 2.125 and the share 0.5 + 0.1 * 2.5."""
    session = start_one_weight([APFL(adaptive=True)], [[4]], start=1.0)
    host = session.loop.host
    host.memory.put(0, {".personal": {"apfl.weight": torch.tensor([[2.0]]).double()}})
    host.memory.commit(0)
    play_round(session)
    own = host.memory.get(0)[".personal"]
    assert float(own["apfl.weight"]) == pytest.approx(2.125)
    assert float(own["apfl_mixture.share"]) == pytest.approx(0.75)


@pytest.mark.parametrize("own", ["ditto", "apfl(adaptive=True)"])
@pytest.mark.parametrize(
    "method",
    ["fedsam", "fedsam(adaptive=True)", "fedspeed", "fedsmoo", "fedper", "fedrep", "lgfedavg", "fedas", "fednh"],
)
@pytest.mark.parametrize("optimiser", [Optimiser(), Optimiser(weight_decay=0.1, clip=0.3)], ids=["", "clip"])
def test_a_second_model_changes_nothing_of_the_first_beside_other_parts(method: str, own: str, optimiser: Optimiser):
    """Neither its norm nor its losses reach what the method trains without it, shared or personal."""
    plain = toy(method, optimiser=optimiser)
    plain.play(3)
    for both in (f"{method}+{own}", f"{own}+{method}"):
        run = toy(both, optimiser=optimiser)
        run.play(3)
        assert all(torch.equal(run.params[k], plain.params[k]) for k in plain.params), both
        for device in range(2):
            head, remembered = (r.memory(device).get(".personal", {}) for r in (plain, run))
            assert all(torch.equal(remembered[k], head[k]) for k in head), both


def test_a_second_model_has_all_layers_of_its_own():
    """The head that FedPer keeps is that of the first model; that of the second goes its own way."""
    for method in ("fedper+ditto(lam=0.0)", "ditto(lam=0.0)+fedper"):
        run, alone = toy(method), toy("ditto(lam=0.0)")
        run.play(3)
        alone.play(3)
        own, local = (r.memory(0)[".personal"] for r in (run, alone))
        assert all(torch.equal(own[k], local[k]) for k in local) and len(local) == 4


@pytest.mark.parametrize("own", ["ditto", "apfl", "fedrod"])
@pytest.mark.parametrize("method", ["", "afd", "poc"])
def test_the_loss_that_is_told_is_that_of_the_first_model(method: str, own: str):
    """So that parts which choose by losses choose as they do without the second one."""
    plain_name = f"{method}+balanced_softmax" if own == "fedrod" else method
    plain, run = toy(plain_name.strip("+") or "fedavg"), toy(f"{method}+{own}".strip("+"))
    for row, other in zip(plain.play(3), run.play(3)):
        assert other["train_loss"] == pytest.approx(row["train_loss"], rel=1e-12)
        if method == "poc":
            assert other["poc.loss"] == pytest.approx(row["poc.loss"], rel=1e-6)
    assert all(torch.equal(run.params[k], plain.params[k]) for k in plain.params)


@pytest.mark.parametrize("own", ["ditto", "apfl(share=0.3, adaptive=True)", "fedrod"])
def test_the_phases_of_fedrep_are_those_of_the_model_alone(own: str):
    """What is beside the model learns in all steps, also in those of the head; so the share of APFL moves at all."""
    run = toy(f"fedrep(head_share=1.0)+{own}")
    run.play(2)
    beside = list_side_tensors(run.net)
    assert beside and all(torch.equal(run.params[k], run.net.initial[k]) for k in ("a.weight", "a.bias"))
    assert not any(torch.equal(run.memory(0)[".personal"][k], run.net.initial[k]) for k in beside)
    assert float(run.net.initial.get("apfl_mixture.share", 0.3)) == 0.3


def test_two_models_and_batch_norm_are_refused():
    with pytest.raises(ShoalError, match="statistics of one"):
        build_tiny_run(compose([Ditto()]), (4, 4), setting=make_norm_setup())


# gradients elsewhere --------------------------------------------------------------------------------------------------
def test_pfedme_follows_the_envelope():
    """lam 2, two inner steps of 0.1 from 1 to 4: 1.3, 1.51; w = 1 + 0.1 * 2 * 0.51."""
    part = PFedMe(lam=2.0, inner_lr=0.1, inner_steps=2)
    session = start_one_weight([part], [[4]], start=1.0)
    play_round(session)
    assert session.server_state
    assert float(session.server_state.params["weight"]) == pytest.approx(1.102)
    assert read_personal(session) == pytest.approx(1.51)
    for warm, theta, w in ((True, 1.79458, 1.240516), (False, 1.59466, 1.200532)):
        session = start_one_weight([replace(part, warm=warm)], [[4]], steps=TWO_STEPS, start=1.0)
        play_round(session)
        assert session.server_state
        assert read_personal(session) == pytest.approx(theta)
        assert float(session.server_state.params["weight"]) == pytest.approx(w)


def test_pfedme_ends_between_its_target_and_what_was_received():
    """lam 2: theta ends at (c + lam w) / (1 + lam) = 2, and w goes by 0.1 * 2 * (2 - 1)."""
    session = start_one_weight([PFedMe(lam=2.0, inner_lr=0.1, inner_steps=100)], [[4]], start=1.0)
    play_round(session)
    assert session.server_state
    assert read_personal(session) == pytest.approx(2.0)
    assert float(session.server_state.params["weight"]) == pytest.approx(1.2)


def test_pfedme_moves_the_server_by_beta():
    part = PFedMe(lam=2.0, inner_lr=0.1, inner_steps=2, beta=2.0)
    assert one_weight([part], [[4]], start=1.0)[0] == pytest.approx([1.204])


def test_perfedavg_takes_the_gradient_a_step_ahead():
    """c = 4, alpha 0.1: u = 1.3, so that FO goes to 1.27; the Hessian is 1, so that HF takes a tenth of it off."""
    for order, w in (("fo", 1.27), ("hf", 1.243)):
        for halves in (True, False):
            part = PerFedAvg(alpha=0.1, order=order, halves=halves)
            assert one_weight([part], [[4, 4]], start=1.0)[0] == pytest.approx([w], rel=1e-9)
    assert PerFedAvg(alpha=0.2).finetune(Work(3.0, 0, 8, 0.1)) == Work(0.0, 1, 8, 0.2)


def test_perfedavg_looks_ahead_on_other_samples_than_it_learns_from():
    """u comes from the sample with 2, the gradient at u from the one with 4, or the other way round."""
    ends = {1 - 0.1 * (1 + 0.1 * (a - 1) - b) for a, b in ((2, 4), (4, 2))}
    assert any(one_weight([PerFedAvg(alpha=0.1)], [[2, 4]], start=1.0)[0] == pytest.approx([end]) for end in ends)


# mixing and aligning --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "optimiser", [Optimiser(kind="adam"), Optimiser(lr_groups=(("*", 10.0),))], ids=["adam", "groups"]
)
def test_perfedavg_needs_steps_in_use_that_are_those_in_training(optimiser: Optimiser):
    """A device uses w after one step of the recipe's optimiser, which must be the step ahead of training."""
    with pytest.raises(ShoalError, match="perfedavg cannot be used with"):
        refuse_optimiser_clashes(compose([PerFedAvg()]), optimiser)


def test_fedala_learns_how_much_to_take_over():
    """own 2, w 1, c 4: the gradient -3 times w - own = -1 takes 0.3 off A = 1, then 2.7 * 0.1; theta 1.3, 1.57."""
    run = start_product(FedALA())
    params, samples = run.params, run.session.loop.host.setup.samples(0)
    own, share = {"1.weight": torch.tensor([[2.0]]).double()}, {"1.weight": torch.ones(1, 1).double()}
    for expected, theta in ((0.7, 1.3), (0.43, 1.57)):
        share = learn_shares(run.net, params, own, share, samples, samples.index, eta=0.05)
        assert float(share["1.weight"]) == pytest.approx(expected)
        assert float(mix_tensors(params, own, share)["1.weight"]) == pytest.approx(theta)
    far = learn_shares(run.net, params, own, {"1.weight": torch.ones(1, 1).double()}, samples, samples.index, eta=1.0)
    assert float(far["1.weight"]) == 0.0 and float(mix_tensors(params, own, far)["1.weight"]) == 2.0
    same = learn_shares(run.net, params, {"1.weight": params["1.weight"]}, share, samples, samples.index, eta=1.0)
    assert torch.equal(same["1.weight"], share["1.weight"])


def test_fedala_goes_on_from_the_mixture():
    run = start_product(FedALA(eta=0.05, first_epochs=1, sample_share=1.0, batch=100))
    run.play()
    received, own = float(run.params["1.weight"]), float(run.memory(0)["fedala"]["own"]["1.weight"])
    assert received == pytest.approx(1.3) and own == pytest.approx(1.3)
    run.play()
    assert float(run.memory(0)["fedala"]["share"]["1.weight"]) == 1.0, "where both agree, there is nothing to learn"
    run = toy(FedALA(eta=0.5, batch=2))
    run.play(3)
    shares = torch.cat([v.flatten() for v in run.memory(0)["fedala"]["share"].values()])
    assert shares.min() >= 0 and shares.max() <= 1 and not torch.equal(shares, torch.ones_like(shares))


def test_fedas_weighs_by_traces():
    """After training 0.81 and 1.57 with targets 0 and 4: traces 0.6561 and 5.9049, so that they count 0.1 and 0.9."""
    run, part = toy(FedAS()), FedAS()

    def weigh(*traces: float) -> list[float]:
        replies = [run.reply(d, report={"fedas": {"trace": torch.tensor(t)}}) for d, t in enumerate(traces)]
        weights, _ = part.weigh(torch.tensor([5.0, 3.0]).double(), {}, run.round("fedas", replies))
        return (weights / weights.sum()).tolist()

    weights = weigh(0.81**2, 2.43**2)
    assert weights == pytest.approx([0.1, 0.9]) and 0.81 * weights[0] + 1.57 * weights[1] == pytest.approx(1.494)
    assert weigh(0.0, 0.0) == pytest.approx([5 / 8, 3 / 8])
    scaled = weigh(100 * 0.81**2, 100 * 2.43**2)
    assert scaled == pytest.approx(weights) and sum(scaled) == pytest.approx(1), (
        "losses ten times as large change nothing"
    )


def test_fedas_is_evaluated_with_an_average_of_the_heads_where_they_are_sent():
    """The heads that devices keep, averaged by the traces that the bodies are averaged by; without, the first head."""
    run, plain = toy(FedAS(average_head=True, batch=100)), toy(FedAS(batch=100))
    row, plain_row = run.play()[0], plain.play()[0]
    loop, names = run.session.loop, run.net.names_with_role("personal")
    own = [run.params | r for r in (run.memory(d)[".personal"] | run.memory(d)["fedas"]["body"] for d in range(2))]
    traces = [float(compute_fisher_trace(run.net, p, loop.host.setup.samples(d), 100)) for d, p in enumerate(own)]
    judged = loop.make_final_params(run.server_state, 1)
    for name in names:
        mean = torch.stack([t * p[name] for t, p in zip(traces, own)]).sum(0) / sum(traces)
        assert torch.allclose(judged[name], mean, rtol=1e-6) and not torch.equal(judged[name], run.params[name])
    assert torch.equal(plain.session.loop.make_final_params(plain.server_state, 1)["b.weight"], run.params["b.weight"])
    assert all(torch.equal(run.params[k], v) for k, v in plain.params.items()), "devices are sent what they were sent"
    sent = sum(run.net.initial[name].numel() * run.net.initial[name].element_size() for name in names)
    assert row["bytes_up"] - plain_row["bytes_up"] == 2 * sent


def test_the_trace_of_fedas_is_the_squared_gradient():
    """The gradient of (ab - 4)^2 at 1, 1 is -6 for both: 72 for every batch."""
    run = start_product(FineTune(), steps=2)
    samples = run.session.loop.host.setup.samples(0)
    assert float(compute_fisher_trace(run.net, run.params, samples, 2)) == pytest.approx(144)
    assert float(compute_fisher_trace(run.net, run.params, samples, 4)) == pytest.approx(72)


def test_the_alignment_of_fedas_is_summed_over_classes():
    """Feature b x with b = 1, where the old body has b = 2: (1 - 2)^2 for each class has the gradient -2."""
    net = Net(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2)).double(), (1,), 2)
    net = replace(net, roles={"1.weight": "personal", "1.bias": "personal"})
    samples = Samples(torch.ones(3, 1).double(), torch.tensor([0, 0, 1]), torch.arange(3))
    received, old = (net.initial | {"0.weight": torch.full((1, 1), b).double()} for b in (1.0, 2.0))
    means = compute_class_features(net, old, samples)
    assert means.flatten().tolist() == [2.0, 2.0]
    for rows, gradient in (([0, 1], -2.0), ([0, 1, 2], -4.0)):
        found = compute_alignment_gradient(net, received, samples, torch.tensor(rows), means)
        assert list(found) == ["0.weight"] and float(found["0.weight"]) == pytest.approx(gradient)


def test_fedas_aligns_features_to_those_of_the_old_body():
    run = toy(FedAS(align_lr=0.0))
    run.play()
    net, device = run.net, run.device(0, "fedas")
    old = {k: v + 0.5 for k, v in run.params.items() if k.startswith("a.")}
    means = compute_class_features(net, run.params | old, device.samples)
    features = net.forward(run.params | old, device.samples.take_all().inputs)[1]
    labels = device.samples.take_all().targets[0][0]
    for label in labels.unique():
        assert torch.allclose(means[label], features[labels == label].mean(0))

    def distance(params):
        seen = net.forward(params, device.samples.take_all().inputs)[1]
        return float((seen - means[labels]).square().mean())

    aligned, _ = FedAS(align_lr=0.05, align_epochs=20).begin(run.params, {"body": old}, device)
    assert distance(aligned) < distance(run.params)
    assert torch.equal(aligned["b.weight"], run.params["b.weight"]), "the head is not aligned"


# FedROD ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedrod", "fedper+fedrod", "fednh+fedrod", "fedrod+fednh"])
def test_the_head_of_fedrod_is_added_to_the_model(method: str):
    """What a device uses is what it has trained, also where the last layer (FedNH's) has no bias."""
    run = toy(method)
    run.play(2)
    own = run.session.loop.host.make_personal_model(0, run.params, 1)
    remembered = run.memory(0)[".personal"]
    x = torch.randn(5, 4, dtype=torch.float64)
    logits, features, *_ = run.net.forward(run.params | remembered, x)
    together = logits + features @ remembered["rod.weight"].T + remembered.get("rod.bias", 0.0)
    assert torch.allclose(run.net.forward(own, x)[0], together, atol=1e-12)
    assert not torch.allclose(logits, together)


def test_the_generic_model_of_fedrod_is_that_of_balanced_softmax_beside_clipping_and_steps_uphill():
    for other in ("", "+fedsam", "+fedspeed"):
        plain, run = (toy(part + other, optimiser=Optimiser(clip=0.3)) for part in ("balanced_softmax", "fedrod"))
        plain.play(3)
        run.play(3)
        assert all(torch.equal(run.params[k], plain.params[k]) for k in plain.params), other


def test_the_head_of_fedrod_by_hand():
    """Feature 1, logits 0: the gradient of its cross-entropy is -1/2 for the true class and 1/2 for the other."""
    net = Net(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2)).double(), (1,), 2)
    net.module.load_state_dict({k: torch.ones_like(v) if k == "0.weight" else v * 0 for k, v in net.initial.items()})
    inputs, targets = torch.ones(5, 1).double(), torch.zeros(5, dtype=torch.int64)
    run = toy([FedROD()], sizes=(1,), net=replace(net), inputs=inputs, targets=targets, lr=0.1)
    run.play()
    head = run.memory(0)[".personal"]
    assert head["rod.weight"].flatten().tolist() == pytest.approx([0.05, -0.05])
    assert head["rod.bias"].tolist() == pytest.approx([0.05, -0.05])
    own = run.session.loop.host.make_personal_model(0, run.params, 0)
    for key in ("weight", "bias"):
        assert torch.allclose(own[f"1.{key}"], run.params[f"1.{key}"] + head[f"rod.{key}"])
    assert float(run.params["0.weight"]) == 1.0, "its loss does not move the features"


def test_clashes_are_refused_by_name():
    for parts in ([FedPer(), LGFedAvg()], [FedRep(), FedBABU()], [FedPer(), FedDF()], [FedBN(), FedNH()]):
        with pytest.raises(ShoalError) as error:
            compose(parts)
        assert all(part.name() in str(error.value) for part in parts)


@pytest.mark.parametrize("method", ["fedper", "fedbabu", "ditto+topk(ratio=0.3)", "fedrep+feddh", "apfl+fjord"])
def test_personal_models_beat_the_shared_one_on_devices_that_see_few_classes(method):
    common = dict(split="labels:2", devices=6, sample=6, rounds=6, epochs="2", local_test=0.25, engine="serial")
    plain = shoal.run("fedavg", **common).history.last("personal_mean")  # type: ignore[arg-type]
    own = shoal.run(method, **common).history.last("personal_mean")  # type: ignore[arg-type]
    assert own is not None and plain is not None and own > plain + 0.05
