"""The part of stock SGLang that takes broadcasts, alone: small enough to start at once, and to
fail on demand.

    python tests/support/broadcast_engine.py DIRECTORY        # prints its port; one
        tensor-parallel rank

It works on one request at a time, as SGLang's scheduler does, joins groups as its
`init_custom_process_group` does, and receives a bucket as its "flattened_bucket" format says. POST
/fault {"kind", "nth"} plans what happens to the nth bucket from then on: "die" in the middle,
"refuse" it, "hang" before taking it. GET /log tells what it did.
"""

from __future__ import annotations

import base64
import http.server
import json
import os
import pickle
import sys
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rlhf_megatron.weights.bucket_manifest import BucketManifest
from rlhf_megatron.weights.tensor_digest import digest_tensor, format_digest

HANG_S = 8.0


class Engine:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.groups: dict[str, Any] = {}
        self.standing: dict[str, torch.Tensor] = {}
        self.log: list[dict[str, Any]] = []
        self.fault: dict[str, Any] = {}

    def init_weights_update_group(self, request: dict[str, Any]) -> str:
        rank = request["rank_offset"]
        world = request["world_size"]
        name = request["group_name"]
        init_method = f"tcp://{request['master_address']}:{request['master_port']}"
        store, rank, world = next(
            c10d.rendezvous(init_method, rank, world, timeout=c10d.default_pg_timeout)
        )
        store.set_timeout(c10d.default_pg_timeout)
        store = c10d.PrefixStore(name, store)
        group, _ = c10d._new_process_group_helper(
            world,
            rank,
            [],
            c10d.Backend(request["backend"]),
            store,
            group_name=name,
            backend_options=None,
            timeout=c10d.default_pg_timeout,
        )
        c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
        self.groups[name] = group
        return "joined"

    def destroy_weights_update_group(self, request: dict[str, Any]) -> str:
        dist.destroy_process_group(self.groups.pop(request["group_name"]))
        return "left"

    def update_weights_from_distributed(self, request: dict[str, Any]) -> str:
        if self.fault:
            self.fault["nth"] -= 1
            if self.fault["nth"] == 0:
                kind = self.fault.pop("kind")
                self.fault = {}
                if kind == "refuse":
                    raise RuntimeError("this bucket is not to the taste of the engine")
                if kind == "die":
                    os._exit(1)
                time.sleep(HANG_S)
                raise RuntimeError("hung")
        assert request["load_format"] == "flattened_bucket"
        empty = [
            torch.empty(shape, dtype=getattr(torch, dtype))
            for shape, dtype in zip(request["shapes"], request["dtypes"], strict=True)
        ]
        flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in empty])
        dist.broadcast(flat, src=0, group=self.groups[request["group_name"]])
        start = 0
        for name, tensor in zip(request["names"], empty, strict=True):
            end = start + tensor.nbytes
            self.standing[name] = flat[start:end].view(tensor.dtype).view(tensor.shape)
            start = end
        return "loaded"

    def update_weights_from_tensor(self, request: dict[str, Any]) -> str:
        pairs = pickle.loads(base64.b64decode(request["serialized_named_tensors"][0]))
        order = json.loads(bytes(pairs[0][1].tolist()))
        entries = BucketManifest.parse_json(order["digest"]).tensors
        standing = {entry.name: self.standing[entry.name] for entry in entries}
        receipt = {
            "rank": 0,
            "size": 1,
            "error": None,
            "bucket": "a bucket",
            "names": list(standing),
            "tensors": {
                entry.name: (entry.shape, astuple(entry.span), entry.dtype) for entry in entries
            },
            "parts": {
                name: [(0, 0, t.shape[0], format_digest(digest_tensor(t)))]
                for name, t in standing.items()
            },
            "unlike": {},
            "misfits": {},
            "stands_as": {},
            "num_bytes_read": sum(tensor.nbytes for tensor in standing.values()),
            "num_bytes_standing": sum(tensor.nbytes for tensor in standing.values()),
        }
        (self.directory / f"{order['receipt']}.0").write_text(json.dumps(receipt))
        return "receipt"


class Handler(http.server.BaseHTTPRequestHandler):
    engine: Engine

    def do_GET(self) -> None:
        self._answer(200, {"log": self.engine.log, "groups": list(self.engine.groups)})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        verb = self.path.removeprefix("/")
        if verb == "fault":
            self.engine.fault = request
            self._answer(200, {"success": True})
            return
        start = time.time()
        try:
            message = getattr(self.engine, verb)(request)
            is_done = True
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            is_done = False
        group = request.get("group_name", "")
        self.engine.log.append(
            {"verb": verb, "group": group, "start": start, "end": time.time(), "good": is_done}
        )
        self._answer(200 if is_done else 400, {"success": is_done, "message": message})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    torch.set_num_threads(1)
    Handler.engine = Engine(Path(sys.argv[1]))
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
