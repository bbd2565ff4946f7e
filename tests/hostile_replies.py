"""A device's honest reply as bytes, and ways to spoil it."""

from shoal.core.errors import ShoalError
from shoal.core.types import Job, Outcome
from shoal.models import build_model
from shoal.remote import messages
from shoal.remote.messages import RequestStamp, decode_reply_bytes, reply_to_bytes

NET = build_model("mlp", (1, 8, 8), 10, 0)
STAMP = RequestStamp("run", 3, 1, "nonce")
HONEST = reply_to_bytes(
    STAMP,
    Outcome(
        1,
        messages.Message({k: {"value": v.clone()} for k, v in NET.initial.items()}, {"scaffold": {"c": {}}}),
        steps=1,
        samples=16,
        loss=0.5,
        macs_forward=10,
        macs_work=30,
    ),
    True,
)
JOB = Job(1, 3, messages.Plan(), messages.Message({}), messages.Work(1.0, 0, 16, 0.1))


def assert_read_or_refused(content: bytes, has_codecs: bool) -> None:
    try:
        decode_reply_bytes(content, STAMP, JOB, NET, has_codecs, 1e6)
    except ShoalError as error:
        assert error.kind.name == "damaged"


HEADER = 8 + int.from_bytes(HONEST[:8], "little")


def spoil(content: bytearray, position: int, inserted: bytes, kind: int) -> None:
    """Change bytes in place: 0 overwrites some, 1 inserts some, 2 deletes five, 3 deletes all from here on."""
    match kind:
        case 0:
            content[position : position + len(inserted)] = inserted
        case 1:
            content[position:position] = inserted
        case 2:
            del content[position : position + 5]
        case 3:
            del content[position:]
