"""`pdrelay bench codec`: wire codecs on real KV."""

from __future__ import annotations

from pathlib import Path

import click

from pdrelay.cluster.topology import CodecName


@click.command("codec")
@click.option("--model", type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="DIR",
              help="Model in transformers' format. Default: SmolLM2-135M, made in the cache if need be.")  # fmt: skip
@click.option("--codec", "codecs", type=click.Choice(["zstd", "fp8", "int8"]), multiple=True,
              help="Measure this one; may be given again. Default: all.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True,
              help="Number format of weights and KV.")  # fmt: skip
@click.option("--prompts", type=click.IntRange(1), default=50, show_default=True, help="How many prompts.")
@click.option("--prompt-tokens", type=click.IntRange(2), default=512, show_default=True,
              help="Length of the longest prompt; the others are spread down to 32.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="Greedy tokens of each prompt.")
@click.option("--quick", is_flag=True, help="Few and short prompts: shows that everything runs, says little.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.pass_context
def command(
    context: click.Context, model: Path | None, codecs: tuple[CodecName, ...], dtype: str, prompts: int,
    prompt_tokens: int, tokens: int, quick: bool, as_json: bool,
) -> int:  # fmt: skip
    """Encode and decode the KV of a real model, and decode from the result.

    For each codec: how much smaller, how fast on one core, up to which line rate it pays, and how much of greedy output
    stays the same. The last row shows how much output differs between two exact computations of the same KV.
    """
    from pdrelay.bench import codec, codec_text
    from pdrelay.cli.bench.running import given, measure
    from pdrelay.cli.local.model import ensure_checkpoint

    if quick:
        prompts, prompt_tokens, tokens = min(prompts, 3), min(prompt_tokens, 80), min(tokens, 8)
    settings = codec.Settings(
        model or ensure_checkpoint(), dtype, codecs or codec.CODECS, prompts, prompt_tokens, tokens
    )
    report = codec.new_report(f"pdrelay bench {' '.join([context.info_name or '', *given(context)])}")
    return measure(report, lambda progress: codec.run(settings, report, progress), codec_text.show, as_json)
