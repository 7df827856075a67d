"""`pdrelay chat`: a conversation in the terminal."""

from __future__ import annotations

import click


@click.command("chat")
@click.option("--url", metavar="URL", help="Address of the gateway, with its /v1. Default: that of the deployment "
              "that `up` started here, else http://127.0.0.1:8000/v1.")  # fmt: skip
@click.option("--once", metavar="PROMPT", help="Ask this one question, print the answer and end.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True,
              help="Longest answer.")  # fmt: skip
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True,
              help="0: the same answer every time.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True,
              help="Print one JSON object an answer: its text, the tier of each piece, the trace.")  # fmt: skip
@click.pass_context
def command(
    ctx: click.Context, url: str | None, once: str | None, max_tokens: int, temperature: float, as_json: bool
) -> None:
    """Hold a conversation in the terminal, each token coloured by the tier that made it.

    Each answer closes with its times: prefill, first and second token, the handoff from relay to main decode, and
    the bytes that crossed the line. Ctrl-C ends an answer; /exit or Ctrl-D ends the conversation.
    """
    from pdrelay.cli.conversation import Chat

    with Chat(url or _running() or "http://127.0.0.1:8000/v1", max_tokens, temperature, as_json) as chat:
        ctx.exit(chat.ask(once) if once is not None else chat.converse())


def _running() -> str | None:
    """Address of the deployment in the default run directory."""
    from pdrelay.cli.local.rundir import RunDirectory

    run = RunDirectory.default()
    state = run.read_state() if run.running else None
    return state.url if state is not None else None
