"""The Flower app: requests and replies travel as bytes in Flower's messages.

Calls to the SuperLink's control interface are in flower_control.py, the start of Flower's programs in
flower_programs.py.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from shoal.core.errors import ShoalError, describe_error
from shoal.service.client import DeviceClient
from shoal.service.server_run import play_server_run
from shoal.service.supervisor import ENDING_FILE, LOOP_PID_FILE
from shoal.storage.files import write_bytes

log = logging.getLogger("shoal")
DEVICE_VARIABLE, SERVER_VARIABLE = "SHOAL_SEAT", "SHOAL_DESK"
"""Environment variables with settings as JSON: those of a device, and those of a server."""
RECORD_NAME, ARRAY_TYPE = "shoal", "shoal.bytes"
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
AWAY_CODES = {0, 3, 4, 5}
"""Flower's error codes for a device that is offline, or a message that was lost: the request is sent again."""
CAUSES_BY_CODE = {1: "its program could not be loaded", 2: "its program failed", 8: "its process died"}
POLL_SECONDS, RETRY_SECONDS = 0.2, 3.0

server = ServerApp()
client = ClientApp()


class FlowerTransport:
    """The transport of one run, by Flower's grid: device numbers on our side, Flower's node ids on the other.

    Without `nodes` (no keys), every node that is online is given a device number.
    """

    def __init__(self, grid: Grid, nodes: Mapping[int, int] | None):
        self.grid, self.nodes, self.accepts_any_node = grid, dict(nodes or {}), nodes is None

    def exchange(self, requests: Mapping[int, bytes], kind: str, timeout: float) -> Iterator[tuple[int, bytes | str]]:
        """Send requests again until a device replies or the time is up; late and second replies are ignored."""
        deadline = monotonic() + timeout
        waiting: dict[str, int] = {}
        retry_times = dict.fromkeys(requests, 0.0)
        problems = dict.fromkeys(requests, "it was late")
        while (waiting or retry_times) and monotonic() < deadline:
            due = [d for d, time in retry_times.items() if time <= monotonic()]
            if due:
                for device, message_id in zip(
                    due, self.push_requests({d: requests[d] for d in due}, kind, deadline - monotonic())
                ):
                    retry_times.pop(device)
                    if message_id is None:
                        problems[device], retry_times[device] = "it is not there", monotonic() + RETRY_SECONDS
                    else:
                        waiting[message_id] = device
            for message_id, reply in self.pull_replies(waiting):
                device = waiting.pop(message_id)
                if isinstance(reply, int) and reply in AWAY_CODES:
                    problems[device], retry_times[device] = "it is not there", monotonic() + RETRY_SECONDS
                else:
                    yield device, CAUSES_BY_CODE.get(reply, "its program failed") if isinstance(reply, int) else reply
            sleep(POLL_SECONDS)
        for device in (*waiting.values(), *retry_times):
            yield device, problems[device]

    def push_requests(self, requests: Mapping[int, bytes], kind: str, timeout: float) -> list[str | None]:
        """Flower's id of each message; None where a device is not known or not online."""
        online = set(self.grid.get_node_ids())
        if self.accepts_any_node:
            self.assign_device_numbers(online)
        message_ids: list[str | None] = []
        for device, content in requests.items():
            node = self.nodes.get(device)
            if node not in online:
                message_ids.append(None)
                continue
            message = Message(
                bytes_to_record(content),
                dst_node_id=node,
                message_type=MESSAGE_TYPES[kind],
                ttl=max(1.0, timeout),
                group_id=kind,
            )
            message_ids += [message_id or None for message_id in self.grid.push_messages([message])]
        return message_ids

    def assign_device_numbers(self, online: set[int]) -> None:
        """Give new nodes the lowest free device numbers; the number of a node that is gone is free again."""
        nodes = {device: node for device, node in self.nodes.items() if node in online}
        free = (n for n in count() if n not in nodes)
        self.nodes = nodes | {next(free): node for node in sorted(online - set(nodes.values()))}

    def pull_replies(self, waiting: Mapping[str, int]) -> Iterator[tuple[str, bytes | int]]:
        """The replies that have come: bytes, or Flower's error code. They are fetched one at a time, to bound memory.

        Of several replies to one message the first counts.
        """
        for message_id in list(waiting):
            for message in self.grid.pull_messages([message_id]):
                if message.metadata.reply_to_message_id == message_id:
                    yield message_id, message.error.code if message.has_error() else bytes_from_message(message)
                    break


MESSAGE_TYPES = {"enrol": "query.enrol", "train": "train.round", "judge": "query.judge"}


def bytes_to_record(content: bytes) -> RecordDict:
    """Bytes as a record of Flower."""
    return RecordDict({RECORD_NAME: ArrayRecord({RECORD_NAME: Array("uint8", (len(content),), ARRAY_TYPE, content)})})


def bytes_from_message(message: Message) -> bytes:
    """The bytes of a message, without Flower's own decoding; empty where it has another form."""
    try:
        record: Any = message.content[RECORD_NAME]
        return bytes(record[RECORD_NAME].data)
    except Exception:  # the sender is untrusted: anything may be there instead
        return b""


@client.query("enrol")
def answer_enrol_message(message: Message, context: Context) -> Message:
    return answer_message(message, "enrol")


@client.query("judge")
def answer_judge_message(message: Message, context: Context) -> Message:
    return answer_message(message, "judge")


@client.train("round")
def answer_train_message(message: Message, context: Context) -> Message:
    return answer_message(message, "train")


def answer_message(message: Message, kind: str) -> Message:
    settings = json.loads(os.environ[DEVICE_VARIABLE])
    folder = Path(settings["folder"])
    logging.basicConfig(filename=folder / "device.log", format=LOG_FORMAT, force=True)
    reply = DeviceClient(settings["data"], folder, settings.get("models", "")).answer_request(
        bytes_from_message(message), kind
    )
    return Message(bytes_to_record(reply), reply_to=message)


@server.main()
def play_submitted_run(grid: Grid, context: Context) -> None:
    """Play the run that `shoal server` submitted; how it ended is written to ENDING_FILE in the run's folder."""
    settings = json.loads(os.environ[SERVER_VARIABLE])
    path = Path(settings["runs"]) / Path(str(context.run_config["run"])).name
    logging.basicConfig(filename=path / "server.log", format=LOG_FORMAT, force=True)
    logging.getLogger("shoal").setLevel(logging.INFO)
    write_bytes(path / LOOP_PID_FILE, str(os.getpid()).encode())
    numbers = json.loads(Path(settings["nodes"]).read_text()) if settings["nodes"] else None
    nodes = None if numbers is None else {int(device): int(node) for device, node in numbers.items()}
    try:
        terms = (settings["seconds"], settings["bound"], settings["wait"])
        play_server_run(path, FlowerTransport(grid, nodes), *terms, max_samples=settings["max_samples"])
        ending = {"kind": "", "problem": "", "advice": ""}
    except ShoalError as error:
        ending = {"kind": error.kind.name, "problem": error.problem, "advice": error.advice}
    except Exception as error:
        log.exception("the server broke")
        ending = {
            "kind": "bug",
            "problem": f"The server broke ({describe_error(error)}).",
            "advice": f"See {path}/server.log.",
        }
    write_bytes(path / ENDING_FILE, json.dumps(ending).encode())
