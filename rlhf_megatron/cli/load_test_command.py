"""`rlhf-megatron load-test URL`: latency and tokens a second of an OpenAI-compatible
server under load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from functools import partial

from rlhf_megatron.cli.generate_command import read_api_key
from rlhf_megatron.data.data_rows import read_prompt_rows
from rlhf_megatron.data.extra_columns import ExtraColumnWriter
from rlhf_megatron.jobs.generation.endpoint_job import fetch_model_name
from rlhf_megatron.jobs.serving.load_test_client import (
    LoadTestPlan,
    load_test_to_json,
    plot_load_levels,
    run_load_test,
)
from rlhf_megatron.write_errors import write_text_file

REQUEST_TIMEOUT_S = 600.0  # of one request


def run_load_test_command(args: argparse.Namespace) -> int:
    """Measure a server with each number of clients, print the figures, and write --json and --plot.
    Return 0 if all requests were answered, 1 if some failed.
    """
    url = args.url.rstrip("/")
    url = url if url.endswith("/v1") else f"{url}/v1"
    key = read_api_key(args.api_key_file)
    prompts = [args.prompt]
    if args.prompts is not None:
        rows, _ = read_prompt_rows(
            [args.prompts],
            args.prompt_key,
            args.prompt_key,
            skip_bad_rows=False,
            extra_writer=ExtraColumnWriter(()),
        )
        if args.completions and any(not isinstance(row.prompt, str) for row in rows):
            raise ValueError(f"{args.prompts} has chats; --completions needs texts.")
        chats = [row.prompt for row in rows]
        prompts = [
            c if isinstance(c, str) else [{"role": m.role, "content": m.content} for m in c]
            for c in chats
        ]
    model = args.model or asyncio.run(fetch_model_name(url, key, REQUEST_TIMEOUT_S))
    plan = LoadTestPlan(
        url,
        model,
        tuple(prompts),
        tuple(args.clients),
        num_requests=args.requests,
        max_tokens=args.max_tokens,
        is_stream=not args.no_stream,
        is_chat=not args.completions,
        key=key,
        timeout_s=REQUEST_TIMEOUT_S,
    )
    levels = asyncio.run(run_load_test(plan, partial(print, flush=True)))
    for level in levels:
        for reason in level.reasons:
            print(f"failed with {level.clients} clients: {reason}")
    if len(levels) < len(plan.clients):
        hint = (
            " Chats need a model with a chat template; --completions asks for texts."
            if plan.is_chat
            else ""
        )
        print(f"more clients were not tried: the server refuses every request.{hint}")
    if args.json:
        write_text_file(args.json, json.dumps(load_test_to_json(plan, levels), indent=1) + "\n")
        print(f"all figures: {args.json}")
    if args.plot:
        plot_load_levels(levels, args.plot)
        print(f"picture: {args.plot}")
    return int(any(level.failed for level in levels))
