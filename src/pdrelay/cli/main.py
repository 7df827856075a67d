"""The command `pdrelay`: one file a command, imported only when that command runs.

Exit codes: 0 success, 1 something failed, 2 bad input, 130 interrupted. Errors are one line on stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from pdrelay import __version__
from pdrelay.cli.lazy import LazyGroup
from pdrelay.errors import ConfigError, PdrelayError

COMMANDS = {
    "up": "Start a whole deployment on this machine and leave it serving.",
    "down": "Stop the deployment that `up` started.",
    "status": "Show the parts of a running deployment and their counters.",
    "chat": "Hold a conversation in the terminal, each token coloured by the tier that made it.",
    "gateway": "Run the OpenAI-compatible gateway of a deployment.",
    "depot": "Run the depot of one host.",
    "engine": "Run one engine instance, or print its command line.",
    "certs": "Make a fleet's certificate authority, certificates and key.",
    "profile": "Measure a running instance and the lines; write a profile file.",
    "plan": "Find the best deployment for a workload, prices, lines and service levels.",
    "simulate": "Run a workload through a deployment that need not exist.",
    "reproduce": "Compare published figures with those that we obtain.",
    "study": "Answer questions beyond the papers' tables with the planner's model.",
    "bench": "Measure: transfers between depots, beside other tools in the same run.",
    "line": "Run a shaped line in user space, standing in for a wide-area network.",
}
"""Command name to its line in `pdrelay --help`; the code is in `pdrelay.cli.<name>`."""


class Program(LazyGroup):
    """The whole command line; errors are one line."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs the program; errors leave as one line and an exit code."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **extra)
        try:
            result = super().main(args, prog_name, complete_var, False, **extra)
        except click.UsageError as error:
            _fail(error.format_message() + _hint(error), 2)
        except click.ClickException as error:
            _fail(error.format_message(), error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            sys.exit(130)
        except ConfigError as error:
            _fail(str(error), 2)
        except PdrelayError as error:
            _fail(str(error), 1)
        except BrokenPipeError:
            # The reader of our output went away; without this Python complains once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        sys.exit(result if isinstance(result, int) else 0)


def _hint(error: click.UsageError) -> str:
    return f" (see `{error.ctx.command_path} --help`)" if error.ctx is not None else ""


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"pdrelay: {' '.join(message.split())}", err=True)
    sys.exit(code)


@click.group(
    cls=Program, table=COMMANDS, package="pdrelay.cli",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)  # fmt: skip
@click.version_option(__version__, prog_name="pdrelay")
def main() -> None:
    """Serve one model across datacenters: prefill, relay decode and main decode on stock vLLM."""


if __name__ == "__main__":
    main(prog_name="pdrelay")
