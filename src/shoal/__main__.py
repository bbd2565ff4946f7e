"""`python -m shoal` is `shoal`."""

from shoal.cli.commands import run_command_line

if __name__ == "__main__":
    run_command_line()
