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
from shoal.service.client import Seat
from shoal.service.server_run import conducted
from shoal.service.supervisor import ALIVE, ENDING
from shoal.storage.files import write_bytes

log = logging.getLogger("shoal")
SEAT, DESK = "SHOAL_SEAT", "SHOAL_DESK"
"""Environment variables: what a device is, and where a server keeps its runs."""
PLACE, STYPE = "shoal", "shoal.bytes"
FORM = "%(asctime)s %(levelname)s %(message)s"
AWAY = {0, 3, 4, 5}
"""Flower's codes for a device that is not there, or a message that was lost: it is asked again."""
CAUSES = {1: "its program could not be loaded", 2: "its program failed", 8: "its process died"}
POLL, AGAIN = 0.2, 3.0

server = ServerApp()
client = ClientApp()


class Flower:
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
                for device, number in zip(due, self.push({d: questions[d] for d in due}, kind, end - monotonic())):
                    again.pop(device)
                    if number is None:
                        why[device], again[device] = "it is not there", monotonic() + AGAIN
                    else:
                        waiting[number] = device
            for number, found in self.pull(waiting):
                device = waiting.pop(number)
                if isinstance(found, int) and found in AWAY:
                    why[device], again[device] = "it is not there", monotonic() + AGAIN
                else:
                    yield device, CAUSES.get(found, "its program failed") if isinstance(found, int) else found
            sleep(POLL)
        for device in (*waiting.values(), *again):
            yield device, why[device]

    def push(self, questions: Mapping[int, bytes], kind: str, seconds: float) -> list[str | None]:
        """Flower's number of each message; None where a device is not known or not there."""
        online = set(self.grid.get_node_ids())
        if self.anybody:
            self.seat(online)
        found: list[str | None] = []
        for device, content in questions.items():
            node = self.nodes.get(device)
            if node not in online:
                found.append(None)
                continue
            message = Message(
                enclosed(content), dst_node_id=node, message_type=TYPES[kind], ttl=max(1.0, seconds), group_id=kind
            )
            found += [number or None for number in self.grid.push_messages([message])]
        return found

    def seat(self, online: set[int]) -> None:
        """Where there are no keys, numbers are given in order; a node that is gone leaves its number to the next."""
        kept = {device: node for device, node in self.nodes.items() if node in online}
        free = (n for n in count() if n not in kept)
        self.nodes = kept | {next(free): node for node in sorted(online - set(kept.values()))}

    def pull(self, waiting: Mapping[str, int]) -> Iterator[tuple[str, bytes | int]]:
        """What has come: an answer's bytes, or Flower's code of what went wrong. One at a time, to bound memory.

        Of several answers to one message the first counts.
        """
        for number in list(waiting):
            for message in self.grid.pull_messages([number]):
                if message.metadata.reply_to_message_id == number:
                    yield number, message.error.code if message.has_error() else opened(message)
                    break


TYPES = {"enrol": "query.enrol", "train": "train.round"}


def enclosed(content: bytes) -> RecordDict:
    """Bytes as Flower carries them."""
    return RecordDict({PLACE: ArrayRecord({PLACE: Array("uint8", (len(content),), STYPE, content)})})


def opened(message: Message) -> bytes:
    """The bytes of a message; Flower's own decoding is never asked for."""
    try:
        record: Any = message.content[PLACE]
        return bytes(record[PLACE].data)
    except Exception:  # whatever a stranger put there instead
        return b""


@client.query("enrol")
def enrol(message: Message, context: Context) -> Message:
    return reply(message, "enrol")


@client.train("round")
def train(message: Message, context: Context) -> Message:
    return reply(message, "train")


def reply(message: Message, kind: str) -> Message:
    told_of_me = json.loads(os.environ[SEAT])
    folder = Path(told_of_me["folder"])
    logging.basicConfig(filename=folder / "device.log", format=FORM, force=True)
    answer = Seat(told_of_me["data"], folder).answer(opened(message), kind)
    return Message(enclosed(answer), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """The run that the server's command named; what it says at its end is left in the run's folder."""
    desk = json.loads(os.environ[DESK])
    path = Path(desk["runs"]) / Path(str(context.run_config["run"])).name
    logging.basicConfig(filename=path / "server.log", format=FORM, force=True)
    logging.getLogger("shoal").setLevel(logging.INFO)
    write_bytes(path / ALIVE, str(os.getpid()).encode())
    known = json.loads(Path(desk["nodes"]).read_text()) if desk["nodes"] else None
    nodes = None if known is None else {int(device): int(node) for device, node in known.items()}
    try:
        terms = (desk["seconds"], desk["bound"], desk["wait"])
        conducted(path, Flower(grid, nodes), *terms, max_samples=desk["max_samples"])
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
    write_bytes(path / ENDING, json.dumps(ending).encode())
