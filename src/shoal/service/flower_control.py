"""What `shoal server` asks of its SuperLink, through the socket that nobody else can open: devices and runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto import control_pb2
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from shoal.core.errors import ShoalError, describe_error
from shoal.service.flower_bundle import build_app_bundle
from shoal.service.flower_programs import connect_to_socket

messages: Any = control_pb2


@contextmanager
def open_control_client(socket: Path) -> Iterator[ControlHttpClient]:
    """Flower's control interface; whatever it refuses is an error that a user can read."""
    try:
        with connect_to_socket(ControlHttpClient, str(socket)) as client:
            yield client
    except httpx.HTTPStatusError as error:
        raise ShoalError(
            "unreachable", f"Flower refused ({error.response.text[:160]}).", "See superlink.log."
        ) from error
    except httpx.HTTPError as error:
        raise ShoalError(
            "unreachable", f"Flower did not answer ({describe_error(error)}).", "See superlink.log."
        ) from error


def register_device(socket: Path, public_key: Path, name: str) -> str:
    """Tell the SuperLink a device's key; the number that it gave the device."""
    try:
        key = load_ssh_public_key(public_key.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ShoalError(
            "damaged", f"{public_key} cannot be read ({describe_error(error)}).", "Copy it again."
        ) from error
    if not isinstance(key, EllipticCurvePublicKey):
        raise ShoalError("damaged", f"{public_key} is a key of another kind.", "Make keys with `shoal keys`.")
    with open_control_client(socket) as client:
        request = messages.RegisterNodeRequest(public_key=public_key_to_bytes(key), name=name)
        return str(client.RegisterNode(request).node_id)


def list_devices(socket: Path) -> dict[str, str]:
    """The number of every device that the SuperLink knows, and whether it is online."""
    with open_control_client(socket) as client:
        return {str(node.node_id): node.status for node in client.ListNodes(messages.ListNodesRequest()).nodes_info}


def start_flower_run(socket: Path, name: str) -> str:
    """Have the run of this name started; Flower's number of it."""
    content = build_app_bundle()
    app = fab_to_proto(Fab(sha256(content).hexdigest(), content, {}))
    with open_control_client(socket) as client:
        found = client.StartRun(messages.StartRunRequest(fab=app, override_config=user_config_to_proto({"run": name})))
    if not found.HasField("run_id"):
        raise ShoalError("unreachable", "Flower started no run.", "See superlink.log.")
    return str(found.run_id)


def get_flower_run_status(socket: Path, number: str) -> str:
    """What Flower says of a run: pending, starting, running or finished."""
    with open_control_client(socket) as client:
        [run] = client.ListRuns(messages.ListRunsRequest(run_id=int(number))).run_dict.values()
        return run.status.status


def stop_flower_run(socket: Path, number: str) -> None:
    with open_control_client(socket) as client:
        client.StopRun(messages.StopRunRequest(run_id=int(number)))
