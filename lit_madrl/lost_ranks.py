"""What is said and done when a run on several processes loses one of them."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

PATIENCE = timedelta(seconds=10)
"""How long a rank that has lost contact waits for the others to say so too."""

_GLOO = re.compile(r"\[\S*gloo/transport\S*\] (?P<what>.+?)(?:\. This is typically|\n|$)")
_NCCL = re.compile(r"(?P<what>[^\n]*(?:remote process exited|ncclRemoteError)[^\n]*)")


@contextmanager
def one_line_lost_ranks(ranks_per_node: int) -> Iterator[None]:
    """End the program with status 1 and one line on stderr, which names the lost ranks, when contact is lost.

    A rank that notices says so in the store that all share and closes its connections, by which the others notice too.
    Lost are those who have not said so after :data:`PATIENCE`. Whatever else fails keeps its traceback.
    """
    try:
        yield
    except RuntimeError as error:
        what = lost_contact(error)
        if what is None or not dist.is_initialized():
            raise
        rank, ranks = dist.get_rank(), dist.get_world_size()
        silent = _silent_ranks(rank, ranks)
        print(f"error: {explain(rank, ranks, what, silent, ranks_per_node)}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


def lost_contact(error: RuntimeError) -> str | None:
    """What a collective's error says of the connection; ``None`` when it is about something else."""
    found = _GLOO.search(str(error)) or _NCCL.search(str(error))
    return found and found["what"].strip()


def explain(rank: int, ranks: int, what: str, silent: Sequence[int] | None, ranks_per_node: int) -> str:
    """The line. ``silent`` is ``None`` when the store, which the node of rank 0 keeps, does not answer."""
    if silent is None:
        answer = "the node of rank 0 does not answer"
    elif silent:
        names = ", ".join(f"{other} (node {other // ranks_per_node})" for other in silent)
        answer = f"no answer from rank{'s' * (len(silent) > 1)} {names}"
    else:
        answer = "all ranks answer: the network or a rank that was too slow broke it"
    return (
        f"rank {rank} of {ranks} lost contact ({what}); {answer}. The log of what was lost may say why. "
        "Start all nodes again with --ckpt_path last to go on from the newest checkpoint"
    )


def _silent_ranks(rank: int, ranks: int) -> list[int] | None:
    # Rank 0 may be the process that keeps the store: it leaves last.
    patience = PATIENCE * (1.5 if rank == 0 else 1)
    store = _get_default_store()
    keys = [f"lost_contact/{other}" for other in range(ranks)]
    silent: list[list[int]] = []

    def ask() -> None:
        with suppress(dist.DistError):
            store.set(keys[rank], "")
            with suppress(dist.DistStoreError):
                store.wait(keys, patience)
            silent.append([other for other, key in enumerate(keys) if not store.check([key])])

    # Aside, as a store that vanished without closing its connections keeps one waiting for ever, whatever the timeout.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    if dist.get_backend() == "gloo":  # NCCL might wait for what will never come
        dist.destroy_process_group()
    asking.join(patience.total_seconds() + 5)
    return silent[0] if silent else None
