"""`rlhf-megatron load-test URL`: latency and tokens a second of an OpenAI-compatible server under load."""

from __future__ import annotations

import argparse
import asyncio
import json
from functools import partial

from rlhf_megatron.cli.generate import api_key
from rlhf_megatron.data.rows import read_rows
from rlhf_megatron.generation.endpoint import model_of
from rlhf_megatron.serving.load_test import Plan, as_json, plot, run

TIMEOUT_S = 600.0  # of one request


def load_test(args: argparse.Namespace) -> int:
    """Exit code 0: all requests were answered; 1: some failed."""
    url = args.url.rstrip("/")
    url = url if url.endswith("/v1") else f"{url}/v1"
    key = api_key(args.api_key_file)
    prompts = [args.prompt]
    if args.prompts is not None:
        rows, _ = read_rows([args.prompts], args.prompt_key, args.prompt_key, skip_bad_rows=False)
        if args.completions and any(not isinstance(row.prompt, str) for row in rows):
            raise ValueError(f"{args.prompts} has chats; --completions needs texts.")
        chats = [row.prompt for row in rows]
        prompts = [c if isinstance(c, str) else [{"role": m.role, "content": m.content} for m in c] for c in chats]
    model = args.model or asyncio.run(model_of(url, key, TIMEOUT_S))
    how = (args.max_tokens, not args.no_stream, not args.completions, key, TIMEOUT_S)
    plan = Plan(url, model, tuple(prompts), tuple(args.clients), args.requests, *how)
    levels = asyncio.run(run(plan, partial(print, flush=True)))
    for level in levels:
        for reason in level.reasons:
            print(f"failed with {level.clients} clients: {reason}")
    if args.json:
        args.json.write_text(json.dumps(as_json(plan, levels), indent=1) + "\n")
        print(f"all figures: {args.json}")
    if args.plot:
        plot(levels, args.plot)
        print(f"picture: {args.plot}")
    return int(any(level.failed for level in levels))
