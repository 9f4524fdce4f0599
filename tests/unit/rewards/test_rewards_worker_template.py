"""The process that reward workers are forked off, alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

TIMEOUT_S = 60.0


def test_a_controller_that_goes_with_unread_messages_leaves_no_traceback() -> None:
    """The end of each run: rewards.log is for what a user's reward prints."""
    control, template_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.settimeout(TIMEOUT_S)
    module = "rlhf_megatron.rewards.service.worker_template"
    with control, template_end:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(template_end.fileno()), str(os.getpid())],
            pass_fds=[template_end.fileno()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        template_end.close()
        rewards = [{"key": "reward", "name": "exact_match", "params": {}}]
        first_message = {"rewards": rewards, "plugins": [], "num_machines": 1}
        control.send(json.dumps(first_message).encode())
        assert json.loads(control.recv(1 << 17))["ready"]
        control.send(json.dumps({"fork": 1}).encode())
        assert control.recv(1, socket.MSG_PEEK)  # the worker's message stays in the socket
        control.close()
        text, _ = process.communicate(timeout=TIMEOUT_S)
    assert (text, process.returncode) == ("", 0)
