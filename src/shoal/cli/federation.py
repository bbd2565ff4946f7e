"""The commands for training on real devices: keys, server, proxy and join.

What runs them is imported by each command, so that other commands start without it.
"""

import time
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.console import make_console
from shoal.core.errors import ShoalError
from shoal.core.interrupts import stop_error
from shoal.core.ledger import Row
from shoal.remote.engine import MAX_CLAIMED_SAMPLES
from shoal.runs.failed_runs import refuse_all_void
from shoal.runs.history import read_history
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_files import parse_recipe_pairs, read_recipe_file
from shoal.runs.store import RunFolder
from shoal.storage.files import explain_disk_errors

Keys = Annotated[Path, typer.Option(help="The folder that `shoal keys` made.", metavar="FOLDER")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without encryption and keys: for a try on one machine.")]
PORT = 8443
MOST_OF_A_LIMIT = 1e9
"""The most seconds that a server waits, and the largest norm that it lets pass: devices set a timer by the first."""


def keys_command(
    folder: Annotated[Path, typer.Argument(help="Where to; what is there already is kept.")],
    host: Annotated[str, typer.Option(help="Names and addresses of the server, with commas between them.")] = "",
    devices: Annotated[int, typer.Option(help="How many devices there are.", metavar="N")] = 3,
    days: Annotated[int, typer.Option(help="How long the certificates are good.", metavar="N", min=1)] = 730,
) -> None:
    """Make the certificates of a server and a key for every device."""
    from shoal.remote.keys import AUTHORITY, make_keys

    written = make_keys(folder, host, devices, days)
    console = make_console(soft_wrap=True)
    console.print(f"{len(written)} files written to {folder}." if written else f"Everything was in {folder} already.")
    console.print(f"Each device gets {AUTHORITY} and its own device-N.key; all else stays on the server.")


def proxy_command(
    keys: Keys = Path("keys"),
    listen: Annotated[str, typer.Option(help="Where devices come from outside.", metavar="HOST:PORT")] = "0.0.0.0:443",
    server: Annotated[str, typer.Option(help="Where the server listens, on this machine.")] = f"127.0.0.1:{PORT}",
    folder: Annotated[Path, typer.Option(help="For nginx's own files.")] = Path("proxy"),
) -> None:
    """Print the configuration of an nginx that lets devices in, and nobody else."""
    from shoal.service.processes import build_proxy_config
    from shoal.service.supervisor import check_key_folder

    check_key_folder(keys, 0)
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    typer.echo(build_proxy_config(keys, listen, server, folder), nl=False)


def server_command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="What to run.")],
    out: Annotated[Path, typer.Option(help="The folder of the run; if it is there, the run goes on.")],
    keys: Keys = Path("keys"),
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535)] = PORT,
    patience: Annotated[float, typer.Option(help="Seconds that a round waits for an answer.", min=1)] = 600,
    wait: Annotated[float, typer.Option(help="Seconds that a new run waits for its devices.", min=1)] = 600,
    bound: Annotated[float, typer.Option(help="The largest norm of a tensor that a device may send.")] = 1e6,
    max_samples: Annotated[
        int, typer.Option(help="A device counts for at most so many samples, whatever it says.", min=1)
    ] = MAX_CLAIMED_SAMPLES,
    sets: Annotated[list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE")] = None,
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="Only a proxy can reach --host, though it is not on this machine.")
    ] = False,
    insecure: Insecure = False,
) -> None:
    """Run a recipe on real devices, which come by `shoal join`."""
    from shoal.service.processes import FlowerServer
    from shoal.service.server_run import adapt_recipe_to_devices
    from shoal.service.supervisor import FLOWER_FOLDER, DeviceTerms, Supervisor, check_key_folder, prepare_run_folder

    if not behind_proxy and not is_loopback(host):
        problem = f"--host {host} can be reached from other machines, and a server is not to be reached directly."
        advice = "Leave it out and let devices in by `shoal proxy`; --behind-proxy is for a proxy on another machine."
        raise ShoalError("bad-value", problem, advice)
    for name, value in (("patience", patience), ("wait", wait), ("bound", bound)):
        if not 0 < value <= MOST_OF_A_LIMIT:
            raise ShoalError("bad-value", f"--{name} is {value:g}.", f"Give a number up to {MOST_OF_A_LIMIT:g}.")
    settings = Recipe().with_values(**read_recipe_file(recipe) | parse_recipe_pairs(sets or []) | {"out": str(out)})
    settings = adapt_recipe_to_devices(settings)
    key_folder = None if insecure else check_key_folder(keys, settings.devices)
    path, lock = prepare_run_folder(settings)
    console = make_console(soft_wrap=True)
    flower_server = FlowerServer((path / FLOWER_FOLDER).resolve(), key_folder, host, port)
    terms = DeviceTerms(patience, bound, wait, max_samples)

    def print_round(row: Row) -> None:
        headline = RunFolder(path, None).read_headline(settings)
        reached = "" if row.get(headline) is None else f", {headline} {row[headline]:.3f}"
        console.print(f"round {row['round'] + 1}{reached}, {row['wall_seconds']:.0f} s")
        for reply in row.get("dropped", ()):
            console.print(f"  device {reply['device']}: {reply['why']}")

    try:
        with lock, Supervisor(flower_server, path.parent, settings.devices, terms) as supervisor:
            console.print(f"listening on {host}:{port}, {'NOT ENCRYPTED' if insecure else 'TLS and device keys'}")
            supervisor.play_run(path, print_round)
    except KeyboardInterrupt as error:
        raise stop_error(error, "Stopped.", "The same command goes on from the last round.") from None
    console.print(f"The run is over: {path}")
    refuse_all_void([read_history(path / "history.jsonl")])


def join_command(
    server: Annotated[str, typer.Option(help="The server.", metavar="HOST:PORT")],
    data: Annotated[str, typer.Option(help="This device's samples: a folder, a CSV file, or file.py:function.")],
    folder: Annotated[Path, typer.Option(help="Where this device remembers.")] = Path("device"),
    key: Annotated[Path | None, typer.Option(help="This device's own key.", metavar="FILE")] = None,
    authority: Annotated[Path | None, typer.Option(help="The certificate to trust.", metavar="FILE")] = None,
    models: Annotated[
        Path | None,
        typer.Option(help="Where models of Hugging Face lie on this device, a folder each.", metavar="FOLDER"),
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Take part as a device: train on what is here, and send only what was learnt."""
    from shoal.data.text_columns import TextReading, count_each_text_as_a_token
    from shoal.remote.keys import AUTHORITY
    from shoal.service.client import DeviceClient
    from shoal.service.private_socket import PrivateFolder
    from shoal.service.processes import DEPARTURE_SECONDS, end_processes, explain_refusal, start_supernode

    if insecure:
        key = authority = None
    elif key is None or not key.is_file():
        problem = f"There is no key at {key}." if key else "No --key was given."
        raise ShoalError("unreachable", problem, "Give the device-N.key that `shoal keys` made for this device.")
    else:
        authority = authority or key.with_name(AUTHORITY)
        if not authority.is_file():
            raise ShoalError("unreachable", f"There is no {authority}.", "Give the server's ca.crt with --authority.")
    data_path, _, function = data.partition(".py:")
    if not Path(data_path + ".py" if function else data_path).expanduser().exists():
        raise ShoalError("no-data", f"There is no {data_path}{'.py' if function else ''}.", "Correct --data.")
    if models and not models.is_dir():
        raise ShoalError("no-data", f"There is no folder {models}.", "Correct --models.")
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    source = str(Path(data_path).expanduser().resolve()) + (f".py:{function}" if function else "")
    device_config = {"data": source, "folder": str(folder.resolve())}
    device_config |= {"models": str(models.resolve())} if models else {}
    console = make_console(soft_wrap=True)
    text = TextReading(count_each_text_as_a_token, next_tokens=True) if models else None
    _, y = DeviceClient(source, folder).load_samples(text)
    classes = f" of {len(y.unique())} classes" if y.dim() == 1 else ""
    console.print(f"{len(y)} samples{classes}; they stay here")
    private = PrivateFolder.create()
    while True:
        process = start_supernode(server, key, authority, device_config, private)
        console.print(f"waiting for work from {server}" + (", NOT ENCRYPTED" if insecure else ""))
        try:
            code = process.wait()
        except KeyboardInterrupt:
            end_processes([process])
            return
        console.print(f"The node ended with code {code}: {explain_refusal(folder)}. Next try in {DEPARTURE_SECONDS} s.")
        try:
            time.sleep(DEPARTURE_SECONDS)
        except KeyboardInterrupt:
            return


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
