"""Flower as the carrier: questions and answers travel as bytes in its messages.

What is asked of Flower is in flower_control.py, how it is started in flower_programs.py.
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
"""Environment variables: what a device is, and where a server keeps its runs."""
RECORD_NAME, ARRAY_TYPE = "shoal", "shoal.bytes"
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
AWAY_CODES = {0, 3, 4, 5}
"""Flower's codes for a device that is not there, or a message that was lost: it is asked again."""
CAUSES_BY_CODE = {1: "its program could not be loaded", 2: "its program failed", 8: "its process died"}
POLL_SECONDS, RETRY_SECONDS = 0.2, 3.0

server = ServerApp()
client = ClientApp()


class FlowerTransport:
    """The post office of one run: device numbers on our side, Flower's node numbers on the other."""

    def __init__(self, grid: Grid, nodes: Mapping[int, int] | None):
        self.grid, self.nodes, self.anybody = grid, dict(nodes or {}), nodes is None

    def exchange(self, questions: Mapping[int, bytes], kind: str, seconds: float) -> Iterator[tuple[int, bytes | str]]:
        """Each device is asked until it answers or its time is up; what comes back late or twice is not looked at."""
        end = monotonic() + seconds
        waiting: dict[str, int] = {}
        again = dict.fromkeys(questions, 0.0)
        why = dict.fromkeys(questions, "it was late")
        while (waiting or again) and monotonic() < end:
            due = [d for d, when in again.items() if when <= monotonic()]
            if due:
                for device, number in zip(
                    due, self.push_requests({d: questions[d] for d in due}, kind, end - monotonic())
                ):
                    again.pop(device)
                    if number is None:
                        why[device], again[device] = "it is not there", monotonic() + RETRY_SECONDS
                    else:
                        waiting[number] = device
            for number, found in self.pull_replies(waiting):
                device = waiting.pop(number)
                if isinstance(found, int) and found in AWAY_CODES:
                    why[device], again[device] = "it is not there", monotonic() + RETRY_SECONDS
                else:
                    yield device, CAUSES_BY_CODE.get(found, "its program failed") if isinstance(found, int) else found
            sleep(POLL_SECONDS)
        for device in (*waiting.values(), *again):
            yield device, why[device]

    def push_requests(self, questions: Mapping[int, bytes], kind: str, seconds: float) -> list[str | None]:
        """Flower's number of each message; None where a device is not known or not there."""
        online = set(self.grid.get_node_ids())
        if self.anybody:
            self.assign_device_numbers(online)
        found: list[str | None] = []
        for device, content in questions.items():
            node = self.nodes.get(device)
            if node not in online:
                found.append(None)
                continue
            message = Message(
                bytes_to_record(content),
                dst_node_id=node,
                message_type=MESSAGE_TYPES[kind],
                ttl=max(1.0, seconds),
                group_id=kind,
            )
            found += [number or None for number in self.grid.push_messages([message])]
        return found

    def assign_device_numbers(self, online: set[int]) -> None:
        """Where there are no keys, numbers are given in order; a node that is gone leaves its number to the next."""
        kept = {device: node for device, node in self.nodes.items() if node in online}
        free = (n for n in count() if n not in kept)
        self.nodes = kept | {next(free): node for node in sorted(online - set(kept.values()))}

    def pull_replies(self, waiting: Mapping[str, int]) -> Iterator[tuple[str, bytes | int]]:
        """What has come: an answer's bytes, or Flower's code of what went wrong. One at a time, to bound memory.

        Of several answers to one message the first counts.
        """
        for number in list(waiting):
            for message in self.grid.pull_messages([number]):
                if message.metadata.reply_to_message_id == number:
                    yield number, message.error.code if message.has_error() else bytes_from_message(message)
                    break


MESSAGE_TYPES = {"enrol": "query.enrol", "train": "train.round"}


def bytes_to_record(content: bytes) -> RecordDict:
    """Bytes as Flower carries them."""
    return RecordDict({RECORD_NAME: ArrayRecord({RECORD_NAME: Array("uint8", (len(content),), ARRAY_TYPE, content)})})


def bytes_from_message(message: Message) -> bytes:
    """The bytes of a message; Flower's own decoding is never asked for."""
    try:
        record: Any = message.content[RECORD_NAME]
        return bytes(record[RECORD_NAME].data)
    except Exception:  # whatever a stranger put there instead
        return b""


@client.query("enrol")
def answer_enrol_message(message: Message, context: Context) -> Message:
    return answer_message(message, "enrol")


@client.train("round")
def answer_train_message(message: Message, context: Context) -> Message:
    return answer_message(message, "train")


def answer_message(message: Message, kind: str) -> Message:
    told_of_me = json.loads(os.environ[DEVICE_VARIABLE])
    folder = Path(told_of_me["folder"])
    logging.basicConfig(filename=folder / "device.log", format=LOG_FORMAT, force=True)
    answer = DeviceClient(told_of_me["data"], folder).answer_request(bytes_from_message(message), kind)
    return Message(bytes_to_record(answer), reply_to=message)


@server.main()
def play_submitted_run(grid: Grid, context: Context) -> None:
    """The run that the server's command named; what it says at its end is left in the run's folder."""
    desk = json.loads(os.environ[SERVER_VARIABLE])
    path = Path(desk["runs"]) / Path(str(context.run_config["run"])).name
    logging.basicConfig(filename=path / "server.log", format=LOG_FORMAT, force=True)
    logging.getLogger("shoal").setLevel(logging.INFO)
    write_bytes(path / LOOP_PID_FILE, str(os.getpid()).encode())
    known = json.loads(Path(desk["nodes"]).read_text()) if desk["nodes"] else None
    nodes = None if known is None else {int(device): int(node) for device, node in known.items()}
    try:
        terms = (desk["seconds"], desk["bound"], desk["wait"])
        play_server_run(path, FlowerTransport(grid, nodes), *terms, max_samples=desk["max_samples"])
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
