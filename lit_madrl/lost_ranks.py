"""What is said when a run on several processes loses one of them."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

PATIENCE = timedelta(seconds=10)
"""How long rank 0 waits for the others to report after it has lost contact, and they for an answer of its store."""

_GLOO = re.compile(r"\[\S*gloo/transport\S*\] (?P<what>.+?)(?:\. This is typically|\n|$)")
_NCCL = re.compile(r"(?P<what>[^\n]*(?:remote process exited|ncclRemoteError)[^\n]*)")


@contextmanager
def one_line_lost_ranks(ranks_per_node: int) -> Iterator[None]:
    """End the program with status 1 and one line on stderr when processes do not meet or lose contact.

    Whoever notices a lost one reports to the store that all share and ends, by which the rest notice. Rank 0 closes its
    connections but stays a while, and names those who have not reported. Whatever else fails keeps its traceback.
    """
    try:
        yield
    except RuntimeError as error:
        what = lost_contact(error)
        if what is None:
            raise
        if not dist.is_initialized():
            print(f"error: {not_met(what)}", file=sys.stderr, flush=True)
            raise SystemExit(1) from error
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if rank == 0 and threading.current_thread() is threading.main_thread():
            signal.signal(
                signal.SIGTERM, signal.SIG_IGN
            )  # torchrun sends it when another of the node has ended
        silent = _silent_ranks(rank, ranks)
        print(f"error: {explain(rank, ranks, what, silent, ranks_per_node)}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


@contextmanager
def own_process_group() -> Iterator[None]:
    """Leave the process group that was joined inside, when all went well or the program is to end.

    Lightning leaves it with NCCL alone, and threads of gloo that outlive the interpreter abort it now and then.
    """
    joined_before = dist.is_initialized()
    try:
        yield
    except SystemExit:
        _leave(joined_before)
        raise
    _leave(joined_before)


def _leave(joined_before: bool) -> None:
    if dist.is_initialized() and not joined_before:
        dist.destroy_process_group()


def lost_contact(error: RuntimeError) -> str | None:
    """What an error says of the connection to others; ``None`` when it is about something else."""
    found = _GLOO.search(str(error)) or _NCCL.search(str(error))
    if found is None and isinstance(error, dist.DistError):
        return str(error).strip().split("\n")[0]
    return found and found["what"].strip()


def not_met(what: str) -> str:
    """The line when the processes never were one group."""
    name, ranks, address, port = (
        os.environ.get(key, "?") for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )
    return (
        f"rank {name} of {ranks} did not meet the others at {address}:{port} ({what}). Are all nodes started, with the "
        "same MASTER_ADDR, MASTER_PORT and NNODES, and is IFNAME the interface by which they reach each other?"
    )


def explain(rank: int, ranks: int, what: str, silent: Sequence[int] | None, ranks_per_node: int) -> str:
    """The line. ``silent`` is what rank 0 found, or ``None`` when its node does not answer."""
    if silent is None:
        who = "the node of rank 0 does not answer"
    elif rank != 0:
        who = "rank 0 says with whom"
    elif silent:
        who = "no sign of " + ", ".join(f"rank {other} (node {other // ranks_per_node})" for other in silent)
    else:
        who = "all ranks are there: the network failed, or one was slower than the strategy's timeout"
    return (
        f"rank {rank} of {ranks} lost contact ({what}); {who}. "
        "Start all nodes again with --ckpt_path last to go on from the newest checkpoint"
    )


def _silent_ranks(rank: int, ranks: int) -> list[int] | None:
    """Report to the store; on rank 0, also who has not; ``None`` when the store does not answer."""
    store = _get_default_store()
    keys = [f"lost_contact/{other}" for other in range(ranks)]
    silent: list[list[int]] = []

    def ask() -> None:
        with suppress(dist.DistError):
            store.set(keys[rank], "")
            if rank == 0:
                with suppress(dist.DistStoreError):
                    store.wait(keys, PATIENCE)
            silent.append([other for other in range(ranks) if not store.check([keys[other]])])

    # Aside, as a store that vanished without closing its connections keeps one waiting for ever, whatever the timeout.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    if rank == 0:
        _hang_up()
    asking.join(PATIENCE.total_seconds() * (2 if rank == 0 else 1))
    return silent[0] if silent else None


def _hang_up() -> None:
    """End this process's connections, but for those with the store: there may be ranks that wait for it alone."""
    store_port = int(os.environ["MASTER_PORT"])
    for descriptor in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):
            connection = socket.socket(fileno=descriptor)
            try:
                ports = connection.getsockname()[1], connection.getpeername()[1]
                if connection.family != socket.AF_UNIX and store_port not in ports:
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()
