"""Real devices without a network: the same histories as in simulation, and no reply is trusted."""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import (
    BASE,
    DEVICES,
    InProcessTransport,
    history_rows,
    make_clients,
    make_recipe,
    play_with_devices,
    write_samples_file,
)
from hostile_replies import HEADER, HONEST, JOB, NET, STAMP, assert_read_or_refused, spoil
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shoal
from shoal.cli import federation
from shoal.core.errors import ShoalError
from shoal.remote import messages, tree_bytes
from shoal.remote.keys import make_keys
from shoal.remote.messages import MESSAGE_VERSION, RequestStamp, TrainRequest, decode_reply_bytes, problem_to_bytes
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe
from shoal.runs.session import Result
from shoal.runs.start import load_result, run_recipe
from shoal.service.client import DeviceClient
from shoal.service.flower_bundle import build_app_bundle, check_app_bundle
from shoal.service.run_description import is_described_form
from shoal.service.server_run import play_server_run
from shoal.service.supervisor import prepare_run_folder, read_played_rows

METHODS = {
    "fedavg": {"normalise": True},
    "scaffold": {"normalise_by": "0.5:0.5"},
    "feddhad": {"model": "lenet"},
    "fedbiad(early=2)+dgc": {"rounds": 3},
    "fedacd+mixup": {},
    "feddumap": {"model": "lenet", "server_data": "share:0.1"},
    "fedbr": {"model": "lenet", "rounds": 3},
    "fedap(at=1, rule='fixed')+moon": {"model": "lenet", "server_data": "share:0.1", "rounds": 3},
    "stc(down=True)+catchup": {},
}


FEW = ["fedavg", "feddhad", "fedacd+mixup", "fedbr", "stc(down=True)+catchup"]


@pytest.mark.parametrize("method", [*FEW, *(pytest.param(m, marks=pytest.mark.whole) for m in METHODS if m not in FEW)])
def test_the_history_is_that_of_a_simulation(method, tmp_path):
    more = METHODS[method]
    simulated = shoal.run(method, engine="serial", **BASE | more)
    real = play_with_devices(
        make_recipe(method, tmp_path / "run", **more), InProcessTransport(make_clients(tmp_path, **more))
    )
    assert history_rows(real) == history_rows(simulated)
    assert all(torch.equal(real.params[k], v) for k, v in simulated.params.items())


def test_devices_train_with_the_optimiser_of_the_recipe(tmp_path):
    more = {"optimiser": "adamw", "weight_decay": 0.1, "lr": 0.01, "beta2": 0.9, "accumulate": 3}
    more |= {"local_lr_schedule": "cosine", "local_lr_warmup": 2, "lr_schedule": "step:1:0.5"}
    simulated = shoal.run("fedavg", engine="serial", **BASE | more)
    recipe = make_recipe("fedavg", tmp_path / "run", **more)
    real = play_with_devices(recipe, InProcessTransport(make_clients(tmp_path, **more)))
    assert history_rows(real) == history_rows(simulated)
    assert all(torch.equal(real.params[k], v) for k, v in simulated.params.items())


class Joined(torch.nn.Module):
    """A linear layer over the images and numbers of a dict, or over the two of a tuple."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4 * 4 + 3, 5)

    def forward(self, inputs: Any) -> torch.Tensor:
        image, numbers = (inputs["image"], inputs["numbers"]) if isinstance(inputs, dict) else inputs
        return self.head(torch.cat((image.flatten(1), numbers), 1))


def write_tree_loader(folder: Path, device: int, x: dict[str, Tensor], y: Tensor, form: str) -> str:
    """A file that loads a device's samples; its dict has the keys in another order than the server's."""
    torch.save({"numbers": x["numbers"], "image": x["image"], "y": y}, folder / f"{device}.pt")
    value = "content" if form == "dict" else "(content['image'], content['numbers'])"
    path = folder / f"tree_{device}.py"
    path.write_text(
        f"import torch\ndef load():\n    content = torch.load({str(folder / f'{device}.pt')!r})\n"
        f"    y = content.pop('y')\n    return {value}, y\n"
    )
    return f"{path}:load"


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_samples_of_several_tensors_stay_with_their_devices(form, tmp_path):
    torch.manual_seed(0)
    x = {"image": torch.randn(60, 1, 4, 4), "numbers": torch.randn(60, 3)}
    y = torch.arange(60) % 5
    model = Joined()
    given = shoal.hand_over_objects({"data": (x if form == "dict" else tuple(x.values()), y), "model": model})
    simulated = shoal.run("scaffold", engine="serial", **BASE | given)
    setup = assemble_run(Recipe().with_values(**BASE | given)).loop.host.setup
    clients = []
    for device in range(DEVICES):
        samples = setup.samples(device)
        inputs = samples.take_all().inputs
        own = inputs if form == "dict" else dict(zip(x, inputs))
        data = write_tree_loader(tmp_path, device, own, samples.targets[samples.index], form)
        clients.append(DeviceClient(data, tmp_path / f"home-{device}"))
    real = play_with_devices(make_recipe("scaffold", tmp_path / "run", **given), InProcessTransport(clients))
    assert history_rows(real) == history_rows(simulated)
    assert all(torch.equal(real.params[k], v) for k, v in simulated.params.items())


@pytest.mark.parametrize(
    "inputs",
    [
        torch.zeros(2, 3),
        (torch.zeros(2, 1, 4, 4), torch.zeros(2, 3)),
        {"image": torch.zeros(2, 1, 4, 4)},
        {"image": torch.zeros(2, 1, 4, 4), "numbers": torch.zeros(2, 4)},
        {"image": torch.zeros(2, 1, 4, 4), "numbers": torch.zeros(2, 3, dtype=torch.int64)},
    ],
)
def test_a_device_whose_inputs_have_another_form_is_told_apart(inputs):
    example = {"numbers": torch.zeros(1, 3), "image": torch.zeros(1, 1, 4, 4)}
    good = {"image": torch.zeros(2, 1, 4, 4), "numbers": torch.zeros(2, 3)}
    assert is_described_form(good, {"example": example}) and not is_described_form(inputs, {"example": example})
    assert not is_described_form(good, {"shape": [3]})


def test_a_server_that_stopped_goes_on_with_what_devices_remember(tmp_path):
    """Also when devices have trained a round that the server does not know of."""
    whole = play_with_devices(
        make_recipe("scaffold", tmp_path / "whole", rounds=4), InProcessTransport(make_clients(tmp_path))
    )
    clients = make_clients(tmp_path)

    class Dies(InProcessTransport):
        def exchange(self, requests, kind, timeout):
            replies = list(super().exchange(requests, kind, timeout))
            if self.round == 2:
                raise KeyboardInterrupt
            yield from replies

    recipe = make_recipe("scaffold", tmp_path / "run", rounds=4)
    with pytest.raises(ShoalError, match="Stopped after 2 rounds"):
        play_with_devices(recipe, Dies(clients))
    assert history_rows(play_with_devices(recipe, InProcessTransport(clients))) == history_rows(whole)


def test_a_run_on_real_devices_says_so_and_is_not_simulated_on(tmp_path):
    result = play_with_devices(make_recipe("fedavg", tmp_path / "run"), InProcessTransport(make_clients(tmp_path)))
    assert str(result.engine) == str(load_result(tmp_path / "run").engine) == "flower, real devices"
    with pytest.raises(ShoalError, match="real devices") as refusal:
        shoal.resume(tmp_path / "run", rounds=4)
    assert "shoal server" in refusal.value.advice


def test_a_server_goes_on_for_more_rounds_and_takes_none_back(tmp_path):
    """The budgets of its recipe are those of the run; they were passed over once the folder was there."""
    clients = make_clients(tmp_path)
    for rounds in (2, 4):
        path, lock = prepare_run_folder(make_recipe("scaffold", tmp_path / "run", rounds=rounds))
        lock.close()
        played = play_server_run(path, InProcessTransport(clients), 60, 1e6, 1)
        assert len(played.history) == played.recipe.rounds == rounds
    whole = play_with_devices(
        make_recipe("scaffold", tmp_path / "whole", rounds=4), InProcessTransport(make_clients(tmp_path))
    )
    assert history_rows(played) == history_rows(whole)
    with pytest.raises(ShoalError, match="has played 4 rounds, and the model after round 3 is not kept"):
        prepare_run_folder(make_recipe("scaffold", tmp_path / "run", rounds=3))
    with pytest.raises(ShoalError, match="holds a run of another recipe"):
        prepare_run_folder(make_recipe("fedavg", tmp_path / "run", rounds=4))
    prepare_run_folder(make_recipe("scaffold", tmp_path / "run", rounds=5))[1].close()


def test_a_server_with_more_patience_goes_on(tmp_path):
    """The word that a run was stopped is taken back, as by `shoal resume`."""
    clients, values = make_clients(tmp_path, validation=0.2), {"validation": 0.2, "lr": 1e-6, "rounds": 5}
    ends = []
    for patience in (1, 9):
        recipe = make_recipe("fedavg", tmp_path / "run", patience=patience, **values)
        path, lock = prepare_run_folder(recipe)
        lock.close()
        ends.append(len(play_server_run(path, InProcessTransport(clients), 60, 1e6, 1).history))
    assert ends[0] < 5 == ends[1]


def test_real_devices_do_not_go_on_with_a_simulated_run(tmp_path):
    recipe = make_recipe("scaffold", tmp_path / "run", rounds=4)
    run_recipe(recipe.with_values(rounds=2))
    with pytest.raises(ShoalError, match="was simulated, and real devices remember nothing of it"):
        prepare_run_folder(recipe)


def test_a_device_that_lost_its_memory_is_left_out_and_said_so(tmp_path):
    clients = make_clients(tmp_path)

    class Thief(InProcessTransport):
        def exchange(self, requests, kind, timeout):
            for file in clients[1].folder.rglob("*.safetensors"):
                file.unlink()
            yield from super().exchange(requests, kind, timeout)

    found = play_with_devices(make_recipe("scaffold", tmp_path / "run"), Thief(clients))
    assert found.history.rows[1]["dropped"] == [{"device": 1, "why": "it has lost what it remembered"}]


def test_data_that_vanished_cost_one_device(tmp_path):
    clients = make_clients(tmp_path)

    class Vanishes(InProcessTransport):
        def exchange(self, requests, kind, timeout):
            if self.round == 0:
                (tmp_path / "2.npz").unlink()
            yield from super().exchange(requests, kind, timeout)

    found = play_with_devices(make_recipe("fedavg", tmp_path / "run"), Vanishes(clients))
    assert [row.get("dropped", []) for row in found.history.rows] == [
        [],
        [{"device": 2, "why": "its data are missing or do not fit"}],
    ]


def test_the_model_is_what_it_would_be_without_the_faulty_device(tmp_path):
    """Every kind of bad reply, one in each round."""
    earlier_replies: list[bytes] = []

    def tamper(device: int, round: int, reply: bytes) -> bytes | str:
        if device != 1:
            return reply
        earlier_replies.append(reply)
        found = tree_bytes.tree_from_bytes(reply, 1 << 30)
        first = next(iter(found["body"]))
        match round:
            case 0:
                found["body"][first]["value"][0] = float("nan")
            case 1:
                found["body"][first]["value"] = found["body"][first]["value"][1:]
            case 2:
                return reply[:-5]
            case 3:
                return bytes(400_000_000)
            case 4:
                return earlier_replies[0]
            case 5:
                found["body"][first]["value"] *= 1e30
            case 6:
                found["body"][first]["value"] = found["body"][first]["value"].double()
            case 7:
                del found["beside"]["scaffold"]
            case 8:
                found["numbers"]["samples"] = -1
        return tree_bytes.tree_to_bytes(found)

    why = [
        "A message has numbers that are not finite or too large.",
        "A message has values of another form for fc1.weight.",
        "A message cannot be read.",
        "A message has 400000000 bytes where at most",
        "A message answers another question.",
        "A message has numbers that are not finite or too large.",
        "A message has values of another form for fc1.weight.",
        "its extras for scaffold are not as declared: 'change' is missing",
        "A message counts what cannot be.",
    ]
    rounds = len(why)
    found = play_with_devices(
        make_recipe("scaffold", tmp_path / "bad", rounds=rounds), InProcessTransport(make_clients(tmp_path), tamper)
    )
    drop_device_1 = lambda device, round, reply: "it was late" if device == 1 else reply  # noqa: E731
    other = play_with_devices(
        make_recipe("scaffold", tmp_path / "without", rounds=rounds),
        InProcessTransport(make_clients(tmp_path), drop_device_1),
    )
    reasons = [row["dropped"][0]["why"] for row in found.history.rows]
    assert [real.startswith(wanted) for real, wanted in zip(reasons, why)] == [True] * rounds, reasons
    assert all(torch.equal(found.params[k], v) for k, v in other.params.items())


class Boasts(InProcessTransport):
    """Device 1 counts what it never had: samples when it introduces itself, operations when it has trained."""

    def exchange(self, requests, kind, timeout):
        for device, reply in super().exchange(requests, kind, timeout):
            assert isinstance(reply, bytes)
            found = tree_bytes.tree_from_bytes(reply, 1 << 30)
            if device == 1 and kind == "enrol":
                found["size"] = 10**7
            elif device == 1:
                found["numbers"] |= {"macs_work": 2**59, "macs_forward": 2**59}
            yield device, tree_bytes.tree_to_bytes(found)


def test_a_device_counts_for_no_more_samples_than_the_server_allows(tmp_path):
    clients, max_samples = make_clients(tmp_path), 100
    with_boast = play_with_devices(make_recipe("fedavg", tmp_path / "boast"), Boasts(clients), max_samples=max_samples)
    without = play_with_devices(
        make_recipe("fedavg", tmp_path / "honest"), InProcessTransport(clients), max_samples=max_samples
    )
    unbound = play_with_devices(make_recipe("fedavg", tmp_path / "unbound"), Boasts(clients))
    assert accuracies(with_boast) == accuracies(without) != accuracies(unbound)


def accuracies(result: Result) -> list[float]:
    return [row["accuracy"] for row in result.history.rows]


def test_a_device_cannot_spend_the_budget_of_a_run(tmp_path):
    recipe = make_recipe("fedavg", tmp_path / "run", rounds=3, until_macs=10**15)
    assert len(play_with_devices(recipe, Boasts(make_clients(tmp_path)), max_samples=1000).history) == 3


def test_an_answer_does_not_wait_for_the_next_message(monkeypatch):
    """A run that was stopped while its message was under way left a device one answer behind, for ever."""
    pytest.importorskip("flwr")
    from flwr.app.message.message import make_message
    from flwr.app.metadata import Metadata
    from flwr.common import RecordDict
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.nodestate import NodeStateFactory

    from shoal.service.flower_programs import send_waiting_replies

    monkeypatch.setattr(loop, "_pull_and_store_message", loop._pull_and_store_message)  # put back afterwards
    send_waiting_replies()
    store = ObjectStoreFactory().store()
    state = NodeStateFactory(ObjectStoreFactory()).state()
    nothing = dict.fromkeys(("node_config", "get_run", "get_fab", "pull_object", "confirm_message_received"))
    words: dict[str, Any] = {
        "state": state,
        "object_store": store,
        "receive": lambda: None,
        "trusted_entities": None,
    } | nothing
    assert loop._pull_and_store_message(**words) is None
    about = Metadata(1, "", 2, 1, "the question", "", 0.0, 1e9, "train")
    loop._insert_message(make_message(about, RecordDict()), state, store)
    assert loop._pull_and_store_message(**words) is not None


def test_devices_run_nothing_that_a_server_names(tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    client = DeviceClient(write_samples_file(tmp_path, 0), tmp_path / "home")
    setup = {"method": "fedavg", "model": f"{tmp_path}/evil.py:Evil", "seed": 0, "momentum": 0.0, "weight_decay": 0.0}
    setup |= {"clip": 0.0, "augment": "", "precision": "float32", "shape": [1, 8, 8], "classes": 10}
    request = tree_bytes.tree_to_bytes(
        {"stamp": vars(RequestStamp("r", 0, 0, "n")), "setup": setup | {"mean": None, "std": None}}
    )
    for own in (request, request.replace(b"evil.py:Evil", b"none.py:Evil")):
        assert tree_bytes.tree_from_bytes(client.answer_request(own, "enrol"), 1 << 20)["problem"] == "unread"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("run", ["../victim", "/tmp", "a/b", "", "..", 7])
def test_a_server_cannot_lead_a_device_out_of_its_folder(run):
    """A device files its memories, and deletes old ones, under the name of the run."""
    assert RequestStamp("0123abcd", 0, 0, "n").run == "0123abcd"
    with pytest.raises(ShoalError, match="letters and digits"):
        RequestStamp(run, 0, 0, "n")


def test_messages_of_former_versions_are_read_and_later_ones_refused():
    first = {"run": "r", "round": 0, "device": 0, "nonce": "n"}
    assert RequestStamp.from_dict(first).to_dict() == first
    now = RequestStamp("r", 0, 0, "n")
    assert now.to_dict() == first | {"version": MESSAGE_VERSION} and RequestStamp.from_dict(now.to_dict()) == now
    for version in (0, MESSAGE_VERSION + 1, "2", None, True):
        with pytest.raises(ShoalError, match="of version"):
            RequestStamp.from_dict(first | {"version": version})


def test_no_text_of_a_device_travels(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("def load():\n    raise RuntimeError('patient 17 in /secret')\n")
    client = DeviceClient(f"{path}:load", tmp_path / "home")
    request = tree_bytes.tree_to_bytes({"stamp": vars(RequestStamp("r", 0, 0, "n")), "setup": {}})
    reply = client.answer_request(request, "enrol")
    assert b"patient" not in reply and b"secret" not in reply
    assert tree_bytes.tree_from_bytes(reply, 1 << 20)["problem"] == "data"


@pytest.mark.parametrize("metric", ["devices", "local"])
def test_metrics_that_need_samples_of_devices_are_refused(metric, tmp_path):
    with pytest.raises(ShoalError, match="stay with them"):
        make_recipe("fedavg", tmp_path / "run", metrics=[metric])


def test_commands_say_what_is_missing(tmp_path):
    (tmp_path / "r.toml").write_text("devices = 3\nsample = 3\n")
    key = tmp_path / "device-0.key"
    key.touch()
    named = tmp_path / "cats.csv"
    named.write_text("x,label\n1,cat\n2,dog\n")
    tries = {
        "No --key was given": lambda: federation.join_command("host:1", "nowhere"),
        "There is no key at": lambda: federation.join_command("host:1", "nowhere", key=tmp_path / "none"),
        "There is no .*ca.crt": lambda: federation.join_command("host:1", "nowhere", key=key),
        "There is no nowhere": lambda: federation.join_command("host:1", "nowhere", insecure=True),
        "every device would number": lambda: federation.join_command("h:1", str(named), tmp_path / "d", insecure=True),
        "has no ca.crt": lambda: federation.server_command(tmp_path / "r.toml", tmp_path / "run", tmp_path / "keys"),
        "0 devices": lambda: federation.keys_command(tmp_path / "keys", devices=0),
        "cannot be good for": lambda: federation.keys_command(tmp_path / "keys", days=10**20),
        "0.0.0.0 can be reached": lambda: federation.server_command(
            tmp_path / "r.toml", tmp_path / "run", host="0.0.0.0"
        ),
        "fl.example.org can be": lambda: federation.server_command(
            tmp_path / "r.toml", tmp_path / "run", host="fl.example.org"
        ),
    }
    for problem, command in tries.items():
        with pytest.raises(ShoalError, match=problem):
            command()


@pytest.mark.parametrize("name", ["patience", "wait", "bound"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0, 1e300])
def test_a_limit_that_no_device_could_keep_is_refused(name, value, tmp_path):
    """A device's timer takes no infinity, and nothing is below a bound that is no number."""
    (tmp_path / "r.toml").write_text("devices = 3\nsample = 3\n")
    with pytest.raises(ShoalError, match=f"--{name} is"):
        federation.server_command(tmp_path / "r.toml", tmp_path / "run", tmp_path, **{name: value})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("host", ["fl.exämple.org", "a b", "a..b", "-x", "*", "x" * 64, '"', "a/b", "10.0.0.1:443"])
def test_a_host_that_no_certificate_can_name_is_refused(host, tmp_path):
    pytest.importorskip("cryptography")
    with pytest.raises(ShoalError, match="neither the name of a host nor an address"):
        make_keys(tmp_path / "keys", f"good.example.org,{host}", 1)
    assert not (tmp_path / "keys").exists()


def test_hosts_are_names_and_addresses_with_commas_between_them(tmp_path):
    x509 = pytest.importorskip("cryptography.x509")
    hosts = ["fl.example.org", "localhost", "*.example.org", "a_b-c.x", "10.0.0.1", "::1", "127.0.0.1"]
    make_keys(tmp_path / "keys", ", ".join(hosts[:-1]), 1)
    made = x509.load_pem_x509_certificate((tmp_path / "keys" / "server.pem").read_bytes())
    named = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in named] == hosts


def test_other_machines_reach_a_server_by_a_proxy(tmp_path):
    """Its own port is opened to them only for one who says that there is a proxy."""
    (tmp_path / "r.toml").write_text("devices = 3\nsample = 3\n")
    for host, behind in (("0.0.0.0", True), ("127.0.0.2", False), ("::1", False)):
        with pytest.raises(ShoalError, match="has no ca.crt"):
            federation.server_command(tmp_path / "r.toml", tmp_path / "run", tmp_path, host=host, behind_proxy=behind)


def test_an_app_is_checked_before_it_is_run():
    """It is the same wherever and whenever it is built, and one other byte is enough to be refused."""
    ours = build_app_bundle()
    assert sha256(ours).hexdigest() == "8ceaf73c3c0bdad09fb5283ee0fb5618c257dd2a0ccacd4ca15b6a893c924f20"
    check_app_bundle(ours)
    for other in (ours + b" ", ours[:-1], ours.replace(b"client", b"CLIENT"), b""):
        with pytest.raises(ShoalError, match="not shoal's own. It was not run"):
            check_app_bundle(other)


def test_keys_are_kept_when_devices_are_added(tmp_path):
    pytest.importorskip("cryptography")
    make_keys(tmp_path / "keys", "fl.example.org,10.0.0.1", 1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()}
    made = make_keys(tmp_path / "keys", "", 2)
    assert sorted(path.name for path in made) == ["device-1.key", "device-1.pub"]
    assert all((tmp_path / "keys" / name).read_bytes() == content for name, content in before.items())
    assert not [path for path in (tmp_path / "keys").iterdir() if path.stat().st_mode & 0o077]


def test_an_honest_answer_is_read():
    outcome, remembers = decode_reply_bytes(HONEST, STAMP, JOB, NET, False, 1e6)
    assert remembers and outcome.samples == 16 and outcome.message is not None
    assert (
        decode_reply_bytes(problem_to_bytes(STAMP, "disk"), STAMP, JOB, NET, False, 1e6)[0].problem
        == messages.DEVICE_PROBLEMS["disk"]
    )


@settings(max_examples=2000)
@given(st.data(), st.booleans())
def test_a_fuzzed_answer_is_read_or_refused(data, has_codecs):
    """Changed, cut, doubled and inserted bytes, mostly where they tell something."""
    content = bytearray(HONEST)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, HEADER) | st.integers(0, len(content)))
        inserted = data.draw(st.binary(max_size=6))
        spoil(content, position, inserted, data.draw(st.integers(0, 3)))
    assert_read_or_refused(bytes(content), has_codecs)


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(torch.zeros(2)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=500)
@given(TREES, st.sampled_from(["", "stamp", "numbers", "remembers", "body", "beside", "problem"]), st.booleans())
def test_any_other_tree_is_read_or_refused(content, field, has_codecs):
    if field:
        content = tree_bytes.tree_from_bytes(HONEST, 1 << 20) | {field: content}
    assert_read_or_refused(tree_bytes.tree_to_bytes(content), has_codecs)


@given(TREES, st.sampled_from(["", "stamp", "size", "card", "problem"]))
def test_any_other_enrolment_is_read_or_refused(content, field):
    if field:
        content = {"stamp": STAMP.to_dict(), "size": 3, "card": {}} | {field: content}
    try:
        messages.read_enrolment_bytes(tree_bytes.tree_to_bytes(content), STAMP, 1 << 16, 10)
    except ShoalError as error:
        assert error.kind.name == "damaged"


@given(st.binary(max_size=200))
def test_any_bytes_are_no_order(content):
    with pytest.raises(ShoalError):
        TrainRequest.from_bytes(content, 1 << 20)


def test_an_order_is_read_as_it_was_written():
    plan = messages.Plan({"a": torch.arange(3)}, {}, frozenset({"x"}), True, True)
    job = replace(
        JOB, plan=plan, message=messages.Message({"x": {"value": torch.ones(2)}}, {"p": {"q": torch.ones(1)}})
    )
    request = TrainRequest(STAMP, {"seed": 1}, job, (plan,), (2, 0), 5.0)
    found = TrainRequest.from_bytes(request.to_bytes(), 1 << 20)
    assert found.stamp == STAMP and found.since == (2, 0) and found.job.plan.sent == frozenset({"x"})
    assert torch.equal(found.job.message.body["x"]["value"], torch.ones(2)) and found.job.work == job.work
    assert found.cuts[0].level and torch.equal(found.cuts[0].kept["a"], torch.arange(3))


def test_a_server_reads_the_rounds_before_what_a_power_cut_tore(tmp_path):
    (tmp_path / "history.jsonl").write_bytes(b'{"round":0}\n{"round":1}\n' + bytes(9) + b'\n{"round":3}\n{"rou')
    assert read_played_rows(tmp_path) == [{"round": 0}, {"round": 1}]
