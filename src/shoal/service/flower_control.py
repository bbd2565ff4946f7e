"""Calls of `shoal server` to its SuperLink's control interface, through a private socket: devices and runs."""

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
    """A client of Flower's control interface; its HTTP errors become ShoalErrors."""
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
    """Register a device's public key at the SuperLink; the node id that it gave the device."""
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
    """The status (online, offline ...) of every device that the SuperLink knows, by node id."""
    with open_control_client(socket) as client:
        return {str(node.node_id): node.status for node in client.ListNodes(messages.ListNodesRequest()).nodes_info}


def start_flower_run(socket: Path, name: str) -> str:
    """Start the run of this name; Flower's id of it."""
    content = build_app_bundle()
    app = fab_to_proto(Fab(sha256(content).hexdigest(), content, {}))
    with open_control_client(socket) as client:
        reply = client.StartRun(messages.StartRunRequest(fab=app, override_config=user_config_to_proto({"run": name})))
    if not reply.HasField("run_id"):
        raise ShoalError("unreachable", "Flower started no run.", "See superlink.log.")
    return str(reply.run_id)


def get_flower_run_status(socket: Path, run_id: str) -> str:
    """Flower's status of a run: pending, starting, running or finished."""
    with open_control_client(socket) as client:
        [run] = client.ListRuns(messages.ListRunsRequest(run_id=int(run_id))).run_dict.values()
        return run.status.status


def stop_flower_run(socket: Path, run_id: str) -> None:
    with open_control_client(socket) as client:
        client.StopRun(messages.StopRunRequest(run_id=int(run_id)))
