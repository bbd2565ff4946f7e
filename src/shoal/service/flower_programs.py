"""Flower's programs as shoal starts them: `python -P flower_programs.py NAME ...`.

Flower's own commands offer all interfaces on one TCP port, and run whatever app they are sent. Here

- the TCP port offers only the interface for devices, with their keys; all others are on a Unix socket in a folder that
  only its owner can enter;
- a device can send messages in its own name alone, so it cannot send requests to other devices;
- an app that is not shoal's own is refused, on the server and on every device;
- a server starts nothing but the loop of a run, a device nothing but its training.

This replaces functions inside Flower, so it works with one version and refuses others. It imports shoal, and with it
torch, only where a run is played or a device trains, so that the other programs stay small; and there not before the
process has called Flower: a task whose process does not call in time is given to another.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from threading import Thread
from time import sleep
from typing import Any, TypeVar

import httpx
from flwr import __version__ as version
from flwr.supercore.protobuf.client import ProtobufClient

FLOWER_VERSION = "1.41.0"
FLEET_PATH = "/v1/fleet/"
"""The path of the interface for devices, where they fetch requests and leave replies; it needs a registered key."""
UNIX_PREFIX = "unix:"
"""The beginning of an address that is a Unix socket."""
REPLY_TIMEOUT = 30.0
"""Seconds that an HTTP reply may take, as in Flower's clients."""
Client = TypeVar("Client", bound=ProtobufClient)


def superlink(socket: str, *arguments: str) -> None:
    """The SuperLink: devices connect by TCP, shoal's own processes by the socket."""
    uvicorn = import_module("uvicorn")
    flower = import_module("flwr.superlink.cli.flower_superlink")
    sys.argv = ["flower-superlink", *arguments]
    config = flower._parse_superlink_lifespan_config()
    refuse_foreign_messages()
    app = import_module("flwr.superlink.main").create_app(config, flower.SuperLinkLifespan)
    logs = {"log_config": flower.get_uvicorn_log_config(flower.console_handler.level), "access_log": False}
    private_server = uvicorn.Server(uvicorn.Config(app, uds=socket, lifespan="off", **logs))
    thread = Thread(target=private_server.run, daemon=True)
    thread.start()
    while thread.is_alive() and not private_server.started:
        sleep(0.05)
    keys = {"ssl_keyfile": config.ssl_keyfile, "ssl_certfile": config.ssl_certfile}
    uvicorn.run(FleetOnlyApp(app), host=config.host, port=config.port, **keys, **logs)


def refuse_foreign_messages() -> None:
    """Refuse messages that a device sends in the name of another node: Flower checks only who delivers them."""
    from fastapi import HTTPException

    handlers = import_module("flwr.superlink.servicer.fleet.fleet_handlers")
    push = handlers.push_messages

    def push_own_messages(request: Any, state: Any) -> Any:
        if any(message.metadata.src_node_id != request.node.node_id for message in request.messages_list):
            raise HTTPException(401, "Messages of another SuperNode")
        return push(request=request, state=state)

    replace_attribute(handlers, "push_messages", push_own_messages)


class FleetOnlyApp:
    """An ASGI app that passes on requests for the devices' interface, and answers 403 to all others."""

    def __init__(self, app: Callable):
        self.app = app

    async def __call__(self, scope: Mapping[str, Any], receive: Callable, send: Callable) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"].startswith(FLEET_PATH)):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})
        else:
            await send({"type": "websocket.close"})


def supernode(socket: str, secret: str, *arguments: str) -> None:
    """A device's SuperNode, without any port, and the SuperExec that works for it; they end together."""
    uvicorn = import_module("uvicorn")
    flower = import_module("flwr.supernode.cli.flower_supernode")
    worker = subprocess.Popen([*build_program_command("superexec"), "clientapp", socket, secret, str(os.getpid())])

    def end_with_superexec() -> None:
        worker.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=end_with_superexec, daemon=True).start()
    replace_attribute(uvicorn, "Config", partial(uvicorn.Config, uds=socket))
    send_waiting_replies()
    sys.argv = ["flower-supernode", *arguments, "--isolation", "process", "--superexec-auth-secret-file", secret]
    flower.flower_supernode()


def send_waiting_replies() -> None:
    """Let a SuperNode send a reply that is ready even when no further message comes.

    Flower sends replies only after it has received a message. A run that is stopped while its message is under way
    leaves one reply more than messages, and from then on every reply would wait for the message of the next round.
    """
    loop = import_module("flwr.supernode.start_client_internal")
    pull = loop._pull_and_store_message

    def pull_or_send(*, state: Any, **more: Any) -> int | None:
        run = pull(state=state, **more)
        if run is not None:
            return run
        with state.lock_msg_store:
            waiting = [e for e in state.msg_store.values() if not e.is_retrieved]
        return 0 if any(entry.message.metadata.reply_to_message_id for entry in waiting) else None

    replace_attribute(loop, "_pull_and_store_message", pull_or_send)


def superexec(task: str, socket: str, secret: str, parent: str) -> None:
    """A SuperExec that fetches and starts tasks of one kind, and ends with its parent (a process id)."""
    plugin = import_module("flwr.supercore.superexec.plugin").AutoExecPlugin
    executor = import_module("flwr.supercore.superexec.executor.subprocess_executor")
    replace_attribute(plugin, "supported_task_types", frozenset({executor.TaskType(f"flwr-{task}")}))

    def launch_task(self: Any, spec: Any) -> Any:
        # Other users can read the token in the process list, but cannot reach the socket that accepts it.
        arguments = ["--runtime-api-address", spec.runtime_api_address, "--token", spec.token, "--insecure"]
        subprocess.Popen([*build_program_command(task), *arguments, "--parent-pid", str(spec.parent_pid)])
        return executor.LaunchResult.accepted()

    replace_attribute(executor.SubprocessExecutor, "launch", launch_task)
    allow_unix_sockets()
    options = ["--runtime-api-address", f"{UNIX_PREFIX}{socket}", "--insecure", "--superexec-auth-secret-file", secret]
    sys.argv = ["flower-superexec", *options, "--parent-pid", parent]
    import_module("flwr.supercore.cli.flower_superexec").flower_superexec()


def serverapp(*arguments: str) -> None:
    """The process that plays a run, after a check of the app that it was sent."""
    module = import_module("flwr.superlink.runtime.run_serverapp")
    install = module.install_from_fab

    def install_checked_bundle(content: bytes, **more: Any) -> Any:
        from shoal.service.flower_bundle import check_app_bundle

        check_app_bundle(content)
        return install(content, **more)

    replace_attribute(module, "install_from_fab", install_checked_bundle)
    allow_unix_sockets()
    sys.argv = ["flwr-serverapp", *arguments]
    import_module("flwr.superlink.cli.flwr_serverapp").flwr_serverapp()


def clientapp(*arguments: str) -> None:
    """The process that answers one message on a device, with the installed app, never with the one that was sent."""
    module = import_module("flwr.supernode.runtime.run_clientapp")

    def check_bundle(content: bytes, **_: Any) -> None:
        from shoal.core.errors import ShoalError
        from shoal.service.flower_bundle import check_app_bundle

        try:
            check_app_bundle(content)
        except ShoalError as error:
            raise module.LoadClientAppError(str(error)) from error  # only its code is sent, no text

    def load_installed(*_: str) -> Any:
        from shoal.service.flower_app import client

        return client

    replace_attribute(module, "install_from_fab", check_bundle)
    replace_attribute(module, "get_load_client_app_fn", lambda **_: load_installed)
    allow_unix_sockets()
    sys.argv = ["flwr-clientapp", *arguments]
    import_module("flwr.supernode.cli.flwr_clientapp").flwr_clientapp()


def build_program_command(name: str) -> list[str]:
    """The command line of one of these programs; with -P nothing is imported from the present folder."""
    return [sys.executable, "-P", __file__, name]


def connect_to_socket(kind: type[Client], path: str, interceptors: Sequence[Any] = (), retry: Any = None) -> Client:
    """One of Flower's HTTP clients, which know TCP alone, connected to a Unix socket."""
    client = kind("http://localhost", interceptors=interceptors, verify=False, retry_invoker=retry)
    client._client.close()
    client._client = httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=REPLY_TIMEOUT)
    return client


def allow_unix_sockets() -> None:
    """Let Flower's clients accept the address of a Unix socket."""
    connect_by_tcp = ProtobufClient.from_server_address

    def from_server_address(cls: Any, server_address: str, *more: Any, **named: Any) -> Any:
        if not server_address.startswith(UNIX_PREFIX):
            return connect_by_tcp.__func__(cls, server_address, *more, **named)
        path = server_address.removeprefix(UNIX_PREFIX)
        return connect_to_socket(cls, path, named["interceptors"], named.get("retry_invoker"))

    replace_attribute(ProtobufClient, "from_server_address", classmethod(from_server_address))


def replace_attribute(owner: Any, name: str, new: Any) -> None:
    """Replace an attribute of Flower, which must exist."""
    getattr(owner, name)
    setattr(owner, name, new)


PROGRAMS = {run.__name__: run for run in (superlink, supernode, superexec, serverapp, clientapp)}


if __name__ == "__main__":
    if version != FLOWER_VERSION:
        sys.exit(f"Flower is {version}, and shoal can close the doors of {FLOWER_VERSION} alone. Install that version.")
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
